"""What sampling is asked to do, checked once for the kernel and its twin. Needs torch, not triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gpu.check import check_range, check_tensor

from .launch import FLOATS


class BrokenLogitsError(RuntimeError):
    """Logits that are not a number: a block was read that nobody wrote, or a layer overflowed. Names the rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCall:
    """One token to be drawn a row."""

    logits: Any
    """`[num_rows, vocab_size]`; rows may be strided. Read only; a masked token is -inf."""
    temperature: Any
    """`[num_rows]` float32; 0 takes the largest logit, the first of equals."""
    top_k: Any
    """`[num_rows]` int32; 0 for all."""
    top_p: Any
    """`[num_rows]` float32; 1 for all."""
    uniform: Any
    """`[num_rows]` float32 in [0, 1), one random number a row, drawn by the caller."""
    tokens: Any
    """`[num_rows]` int64; written: the token, or -1 (no vocabulary has it) for a row that has a NaN or whose largest logit is infinite."""

    def __post_init__(self) -> None:
        check_tensor("logits", self.logits, (None, None), dtype=FLOATS)
        num_rows, vocab_size = self.logits.shape
        check_range("vocab_size", vocab_size, 1, 2**24)
        for name, dtype in (
            ("temperature", torch.float32),
            ("top_k", torch.int32),
            ("top_p", torch.float32),
            ("uniform", torch.float32),
            ("tokens", torch.int64),
        ):
            check_tensor(name, getattr(self, name), (num_rows,), dtype=dtype, like=self.logits, contiguous=True)


def key_bits(dtype: Any) -> int:
    """Leading bits of a logit's float32 form that its own format can set, rounded up to even: bfloat16 is its upper half;
    float16 has 10 mantissa bits.
    """
    return {torch.bfloat16: 16, torch.float16: 20}.get(dtype, 32)


def check_tokens(drawn: list[int], names: list[str]) -> None:
    """Verify that a token was drawn from every row.

    Raises:
        BrokenLogitsError: a row had logits that are not a number; `names` says whose rows they are.
    """
    broken = [name for name, token in zip(names, drawn, strict=True) if token < 0]
    if broken:
        raise BrokenLogitsError(f"logits of {', '.join(broken)} are not numbers")
