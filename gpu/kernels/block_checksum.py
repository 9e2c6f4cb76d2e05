"""Block checksum: has a block changed, and do two copies agree?

    checksum(b) = sum_i mix(word_i ^ (i * 0x9E3779B9))    (mod 2^32)
    mix(x): x = x * 0x85EBCA6B;  x = x ^ (x >> 16);  x = x * 0xC2B2AE35

over the 32-bit words of the block, layer after layer, i counting from 0. `mix` can be undone, so a change of one word always
shows; that several changes cancel out, words that changed places included, has a chance of 2^-32. (A sum without mixing
would be 0 for every block filled with one float.) The sum does not depend on an order, so programs may add their parts as
they finish and the result is still exact.

**Source:** the finaliser of MurmurHash3 (Appleby, public domain).
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from gpu.check import check_tensor

from .block_rows import BlockRows, check_ids
from .launch import Launch

WORDS = 2048
"""Words that one program sums."""


@triton.jit
def block_checksum_kernel(
    words_ptr,  # int32 words: [rows, num_layers, chunk_words] in strides
    ids_ptr,  # [num_blocks] int64
    sum_ptr,  # [num_blocks] int32, zero before; written
    block_stride,  # words from a block to the next
    layer_stride,
    chunk_words,  # a multiple of 4
    WORDS: tl.constexpr,
):
    """One program adds WORDS words of one layer of one block to the block's sum."""
    index = tl.program_id(0)
    layer = tl.program_id(1)
    at = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    start = tl.load(ids_ptr + index) * block_stride + layer.to(tl.int64) * layer_stride
    inside = at // 4 < chunk_words // 4
    words = tl.load(words_ptr + start + at, mask=inside, other=0)
    word_index = (layer * chunk_words + at).to(tl.uint32)
    mixed = words.to(tl.uint32, bitcast=True) ^ (word_index * 0x9E3779B9)
    mixed = mixed * 0x85EBCA6B  # uint32 arithmetic wraps, as wanted
    mixed = (mixed ^ (mixed >> 16)) * 0xC2B2AE35
    part = tl.sum(tl.where(inside, mixed, 0).to(tl.int64), axis=0)  # cut to 32 bits at the end
    tl.atomic_add(sum_ptr + index, part.to(tl.int32))


def block_checksum_launch(rows: BlockRows, block_ids: Any, out: Any) -> Launch | None:
    """The launch that `block_checksum` runs; None for no blocks."""
    num_blocks = check_ids("block_ids", block_ids, rows)
    check_tensor("out", out, (num_blocks,), like=rows.words, contiguous=True)
    if num_blocks == 0:
        return None
    return Launch(
        kernel=block_checksum_kernel,
        grid=(num_blocks, rows.num_layers, triton.cdiv(rows.chunk_words, WORDS)),
        arguments=(rows.words, block_ids, out, rows.block_stride, rows.layer_stride, rows.chunk_words),
        constants={"WORDS": WORDS},
        num_warps=4,
    )


def block_checksum(rows: BlockRows, block_ids: Any, out: Any) -> Any:
    """Checksums of blocks. Writes `out` `[num_blocks]` int32 (a bit pattern); `block_ids` is `[num_blocks]` int64."""
    launch = block_checksum_launch(rows, block_ids, out)
    if launch is not None:
        out.zero_()
        launch.run()
    return out
