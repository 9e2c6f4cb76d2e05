"""Merge the partial results of a split attention.

    out = sum_i 2^(lse_i - lse) out_i,      lse = log2 sum_i 2^lse_i

Each `out_i` is the attention over the positions of split i alone, each `lse_i` the base-2 logarithm of its denominator;
a split without positions has `lse_i = -inf` and weight 0.

**Source:** the merge state of FlashInfer (Ye et al., arXiv:2501.01005, section 2.2).
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from .launch import Launch, next_power_of_2

SPLITS = 8
"""Splits of a tile: the same for any number of splits, so that one kernel serves all."""


@triton.jit(do_not_specialize=["num_splits"])
def merge_splits_kernel(
    part_ptr,  # [num_seqs, num_q_heads, num_splits, head_dim] float32
    lse_ptr,  # [num_seqs, num_q_heads, num_splits] float32, base 2
    out_ptr,  # [num_seqs, num_q_heads, head_dim]
    num_splits,
    out_stride,  # elements from a sequence to the next
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,  # splits of a tile
    BLOCK_D: tl.constexpr,  # power of two >= HEAD_DIM
):
    """One program: one query head of one sequence."""
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = (seq * NUM_HEADS + head) * num_splits
    dims = tl.arange(0, BLOCK_D)
    maximum = float("-inf")
    total = 0.0
    output = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, num_splits, BLOCK_S):
        splits = start + tl.arange(0, BLOCK_S)
        lse = tl.load(lse_ptr + row + splits, mask=splits < num_splits, other=float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(lse, axis=0))
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(lse - base)
        factor = tl.exp2(maximum - base)
        mask = (splits < num_splits)[:, None] & (dims < HEAD_DIM)[None, :]
        part = tl.load(part_ptr + (row + splits)[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
        output = output * factor + tl.sum(part * weights[:, None], axis=0)
        total = total * factor + tl.sum(weights, axis=0)
        maximum = new_maximum
    output = output / tl.where(total == 0.0, 1.0, total)
    place = seq * out_stride + head * HEAD_DIM + dims
    tl.store(out_ptr + place, output.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


def merge_splits_launch(partial_out: Any, partial_lse: Any, out: Any) -> Launch:
    """The launch that `merge_splits` runs."""
    num_seqs, num_heads, num_splits, head_dim = partial_out.shape
    return Launch(
        kernel=merge_splits_kernel,
        grid=(num_seqs, num_heads),
        arguments=(partial_out, partial_lse, out, num_splits, out.stride(0)),
        constants={
            "NUM_HEADS": num_heads,
            "HEAD_DIM": head_dim,
            "BLOCK_S": SPLITS,
            "BLOCK_D": next_power_of_2(head_dim),
        },
        num_warps=2,
    )


def merge_splits(partial_out: Any, partial_lse: Any, out: Any) -> None:
    """Merge partial results `[num_seqs, num_q_heads, num_splits, head_dim]` and their LSE into `out`. Writes `out` only."""
    if out.shape[0]:
        merge_splits_launch(partial_out, partial_lse, out).run()
