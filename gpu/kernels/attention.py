"""What attention is asked to do, checked once for the kernel and its twin; tile sizes.

Needs torch, not triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gpu.check import ArgumentError, check_range, check_tensor

from .launch import FLOATS, KVView, native_fp8, next_power_of_2


def kv_tile(head_dim: int, element_bytes: int) -> int:
    """Positions of a tile of K and V: 8 KiB at most, so that several, and two buffers of each, fit into the shared memory of every
    target. Numbers of 8 bits count as 16: so wide they are in registers.
    """
    positions = 8192 // (next_power_of_2(head_dim) * max(element_bytes, 2))
    return max(16, min(64, positions))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """What decode and prefill attention have in common."""

    query: Any
    """`[num_seqs or num_tokens, num_q_heads, head_dim]`; heads and numbers dense."""
    cache: KVView
    """One layer of the pool; the new tokens' K and V are already in it."""
    block_table: Any
    """`[num_seqs, max_blocks]` int32; entries beyond a sequence's length are never looked at."""
    seq_lens: Any
    """`[num_seqs]` int32: KV length of each sequence, the new tokens included; 0 for padding, whose output is 0 (decode) or
    not written (prefill)."""
    out: Any
    """Like `query`; written."""
    softmax_scale: float
    """Usually `head_dim ** -0.5`."""
    window: int | None = None
    """A token attends to itself and the `window - 1` positions before it; None for all."""
    num_sink_tokens: int = 0
    """With a window: leading positions that stay visible (StreamingLLM)."""
    sinks: Any = None
    """`[num_q_heads]` float32: a logit a head that joins the softmax denominator (gpt-oss); None for none."""

    def __post_init__(self) -> None:
        _, _, _, num_kv_heads, head_dim = self.cache.kv.shape
        num_seqs = int(self.seq_lens.shape[0])
        check_tensor("query", self.query, (None, None, head_dim), dtype=FLOATS, like=self.cache.kv)
        rows, num_q_heads, _ = self.query.shape
        if num_q_heads % num_kv_heads:
            raise ArgumentError(f"{num_q_heads} query heads are not a multiple of {num_kv_heads} KV heads")
        check_tensor("out", self.out, (rows, num_q_heads, head_dim), dtype=FLOATS, like=self.query)
        for name, tensor in (("query", self.query), ("out", self.out)):
            if rows and num_q_heads > 1 and tensor.stride(1) != head_dim:
                raise ArgumentError(f"the heads of {name} must be dense; its strides are {tensor.stride()}")
        check_tensor("block_table", self.block_table, (num_seqs, None), dtype=torch.int32, like=self.query)
        check_tensor("seq_lens", self.seq_lens, (num_seqs,), dtype=torch.int32, like=self.query)
        if self.sinks is not None:
            check_tensor("sinks", self.sinks, (num_q_heads,), dtype=torch.float32, like=self.query)
        check_range("window", 1 if self.window is None else self.window, 1)
        check_range("num_sink_tokens", self.num_sink_tokens, 0)

    @property
    def group(self) -> int:
        """Query heads a KV head."""
        return int(self.query.shape[1]) // int(self.cache.kv.shape[3])

    @property
    def native_fp8(self) -> bool:
        """Whether the device converts fp8."""
        return native_fp8(self.query)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCall(AttentionCall):
    """One query token a sequence: `query[s]` belongs to sequence s."""

    num_splits: int = 1
    """Programs that share a sequence; see `splits.choose_splits`."""
    partial_out: Any = None
    """`[num_seqs, num_q_heads, num_splits, head_dim]` float32 workspace; needed with more than one split."""
    partial_lse: Any = None
    """`[num_seqs, num_q_heads, num_splits]` float32 workspace; likewise."""

    def __post_init__(self) -> None:
        AttentionCall.__post_init__(self)
        num_seqs, num_q_heads, head_dim = self.query.shape
        check_tensor("seq_lens", self.seq_lens, (num_seqs,))
        check_range("num_splits", self.num_splits, 1)
        if self.num_splits > 1:
            shape = (num_seqs, num_q_heads, self.num_splits)
            for name, tensor, wanted in (
                ("partial_out", self.partial_out, (*shape, head_dim)),
                ("partial_lse", self.partial_lse, shape),
            ):
                if tensor is None:
                    raise ArgumentError(f"{self.num_splits} splits need {name} {list(wanted)}")
                check_tensor(name, tensor, wanted, dtype=torch.float32, like=self.query, contiguous=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCall(AttentionCall):
    """Several query tokens a sequence, packed: those of sequence s are rows `[query_starts[s], query_starts[s + 1])`, and
    are its last tokens. A whole prompt, a chunk of one, one on top of a cached prefix, and a decode are the same call.
    """

    query_starts: Any
    """`[num_seqs + 1]` int32, ascending, from 0 to the number of rows."""

    def __post_init__(self) -> None:
        AttentionCall.__post_init__(self)
        num_seqs = int(self.seq_lens.shape[0])
        check_tensor("query_starts", self.query_starts, (num_seqs + 1,), dtype=torch.int32, like=self.query)
