"""How far a timed decode is from the truth: a figure of speed says nothing of a kernel that computes something else."""

from __future__ import annotations

from dataclasses import replace

import torch

from .kernels.attention import DecodeCall
from .kernels.attention_twin import decode_attention_twin

LARGEST_ERROR = 0.01
"""Relative, of a 16-bit format: results are rounded to 8 bits of mantissa or more, and weights once before."""


def relative_error(call: DecodeCall) -> float:
    """Of what lies in `call.out`, for its first and last sequence, against the twin in float64: the norm of the difference over that of the
    truth. NaN where something was not written.
    """
    ends = sorted({0, int(call.query.shape[0]) - 1})
    errors: list[float] = []
    for row in ends:
        one = slice(row, row + 1)
        alone = replace(
            call,
            query=call.query[one],
            block_table=call.block_table[one],
            seq_lens=call.seq_lens[one],
            out=torch.empty(call.out[one].shape, dtype=torch.float32, device=call.out.device),
            num_splits=1,
        )
        truth = decode_attention_twin(alone, compute=torch.float64).to(torch.float64)
        off = torch.linalg.vector_norm(call.out[one].to(torch.float64) - truth)
        errors.append((off / torch.linalg.vector_norm(truth)).tolist())
    worst = [error for error in errors if error != error] or [max(errors)]
    return float(worst[0])
