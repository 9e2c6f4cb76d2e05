"""What the two attention kernels share: which tiles of positions are read, where their vectors lie, online softmax.

**Sources:** paged attention, Kwon et al. (arXiv:2309.06180); online softmax, Milakov and Gimelshein (arXiv:1805.02867)
as in FlashAttention-2 (arXiv:2307.08691); sliding window with sink tokens, StreamingLLM (arXiv:2309.17453).
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .fp8 import decode_e4m3
from .launch import dot_in_float32

LOG2E = tl.constexpr(1.4426950408889634)
"""Softmax is done in base 2: the GPU has an instruction for it."""


@triton.jit
def tile_range(first, end, num_sink_tokens, BLOCK_N: tl.constexpr):
    """The tiles that hold a visible position: those of the sink tokens `[0, num_sink_tokens)`, then those of
    `[first, end)`; what lies between is never read. Returns (sink tiles, first tile after them, number of all).
    """
    sink_tiles = tl.cdiv(tl.minimum(num_sink_tokens, first), BLOCK_N)
    low = tl.maximum(first // BLOCK_N, sink_tiles)
    return sink_tiles, low, sink_tiles + tl.maximum(tl.cdiv(end, BLOCK_N) - low, 0)


@triton.jit
def tile_start(index, sink_tiles, low, BLOCK_N: tl.constexpr):
    """First position of the tile with this index in the order of `tile_range`."""
    return tl.where(index < sink_tiles, index, index - sink_tiles + low) * BLOCK_N


@triton.jit
def locate(table_ptr, positions, readable, block_stride, scale_block_stride, scale_token_stride,
           TOKEN: tl.constexpr, BLOCK_SIZE: tl.constexpr):  # fmt: skip
    """Offsets of positions' vectors (and of their scales) from the start of a layer, as int64.

    `table_ptr` points to the sequence's row of the block table; entries of positions that are not `readable` are not
    looked at. TOKEN is the number of elements from a token to the next.
    """
    block = tl.load(table_ptr + positions // BLOCK_SIZE, mask=readable, other=0).to(tl.int64)
    offset = positions % BLOCK_SIZE
    return block * block_stride + offset * TOKEN, block * scale_block_stride + offset * scale_token_stride


@triton.jit
def load_vectors(pointers, mask, FP8: tl.constexpr, NATIVE: tl.constexpr, DOT: tl.constexpr):
    """A tile of K or V in the format that matrix products take; scales are applied to the products instead."""
    raw = tl.load(pointers, mask=mask, other=0.0 if not FP8 else 0)
    if FP8:
        return decode_e4m3(raw, NATIVE).to(DOT)
    return raw.to(DOT)


@triton.jit
def online_softmax(scores, maximum, total):
    """One tile of masked scores (base 2) `[M, N]`: (weights, factor for what was there, new maximum, new total).

    A row that has seen no visible position has maximum -inf; its weights and factor are 0, not NaN.
    """
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
    base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weights = tl.exp2(scores - base[:, None])
    factor = tl.exp2(maximum - base)
    return weights, factor, new_maximum, total * factor + tl.sum(weights, axis=1)


@triton.jit
def attend(query, key_ptr, key_scale_ptr, table_ptr, positions, readable, seen, scale, maximum, total, output,
           block_stride, scale_block_stride, scale_half_stride, scale_token_stride,
           TOKEN: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
           FP8: tl.constexpr, NATIVE: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """One tile of positions `[N]` joins the attention of a tile of queries `[M, BLOCK_D]`: (new maximum, total, output).

    Positions that are `readable` are read, once for all queries; `seen` (`[1, N]` or `[M, N]`) says which of them a query sees.
    `key_ptr` and `key_scale_ptr` point to one KV head of a layer, `table_ptr` to the sequence's row of the block table; `scale` is
    that of the scores, in base 2.
    """
    dims = tl.arange(0, BLOCK_D)
    at, scale_at = locate(
        table_ptr, positions, readable, block_stride, scale_block_stride, scale_token_stride, TOKEN, BLOCK_SIZE
    )
    place = at[:, None] + dims[None, :]
    mask = readable[:, None] & (dims < HEAD_DIM)[None, :]
    key = load_vectors(key_ptr + place, mask, FP8, NATIVE, DOT)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if FP8:
        scores *= tl.load(key_scale_ptr + scale_at, mask=readable, other=0.0)[None, :]
    scores = tl.where(seen, scores, float("-inf"))
    weights, factor, maximum, total = online_softmax(scores, maximum, total)
    value = load_vectors(key_ptr + BLOCK_SIZE * TOKEN + place, mask, FP8, NATIVE, DOT)
    if FP8:
        weights *= tl.load(key_scale_ptr + scale_half_stride + scale_at, mask=readable, other=0.0)[None, :]
    return maximum, total, tl.dot(weights.to(DOT), value, output * factor[:, None], input_precision="ieee")


def dot_type(dtype: Any) -> Any:
    """The triton format in which matrix products take inputs of a torch dtype."""
    if dot_in_float32(dtype):
        return tl.float32
    return tl.bfloat16 if dtype is torch.bfloat16 else tl.float16
