"""Paged decode attention: one query token a sequence over its blocks of the KV cache.

    out[s, h] = sum_p softmax_p(q[s, h] . k[p, g] * softmax_scale) v[p, g],      g = h // group

over the visible positions p of sequence s: all `[0, length)`, or with a sliding window `[length - window, length)` and
the first `num_sink_tokens`. A sink logit per head adds `exp(sink[h])` to the denominator and nothing to the sum.

The query heads of a KV head are the rows of one tile (GQA packing), so K and V are read once. The positions of one
sequence are split over `num_splits` programs; their partial results are merged by `merge_splits`.
In an fp8 cache the scale of a K vector multiplies its score, that of a V vector its weight.

**Sources:** Flash-Decoding (Dao et al., 2023); the FlashInfer paged decode contract; sink logits: gpt-oss.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from .attention import DecodeCall, kv_tile
from .launch import Launch, next_power_of_2
from .merge_splits import merge_splits
from .paged import LOG2E, attend, dot_type, tile_range, tile_start

STAGES = 5
"""Stages of the loop: block ids are two tiles ahead of their K and V, which are two ahead of their use. With three, Triton keeps one
buffer, and asks for the next tile only when it is done with this one: loads and products of a program never overlap."""


@triton.jit(do_not_specialize=["num_splits", "table_stride"])  # what differs from batch to batch is compiled once
def decode_attention_kernel(
    query_ptr,  # [num_seqs, num_q_heads, head_dim]
    cache_ptr,  # [num_blocks + 1, 2, block_size, num_kv_heads, head_dim], one layer; uint8 when fp8
    scale_ptr,  # [num_blocks + 1, 2, block_size, num_kv_heads] float32; not read without fp8
    table_ptr,  # [num_seqs, max_blocks] int32
    length_ptr,  # [num_seqs] int32: KV length, the new token included; 0 for padding
    sink_ptr,  # [num_q_heads] float32; not read without HAS_SINKS
    out_ptr,  # [num_seqs, num_q_heads, head_dim]; written when SPLIT is false
    part_ptr,  # [num_seqs, num_q_heads, num_splits, head_dim] float32; written when SPLIT is true
    lse_ptr,  # [num_seqs, num_q_heads, num_splits] float32, base 2; likewise
    softmax_scale,
    window,  # positions, 0 for all
    num_sink_tokens,
    num_splits,
    query_stride,  # elements from a sequence to the next
    table_stride,
    out_stride,
    block_stride,  # elements from a block to the next
    scale_block_stride,
    scale_half_stride,
    scale_token_stride,
    scale_head_stride,
    GROUP: tl.constexpr,  # query heads a KV head
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows of the tile: power of two >= max(GROUP, 16)
    BLOCK_N: tl.constexpr,  # positions of a tile
    BLOCK_D: tl.constexpr,  # power of two >= HEAD_DIM
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,  # the device converts fp8
    HAS_SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    DOT: tl.constexpr,  # format of matrix products' inputs
    STAGES: tl.constexpr,  # tiles in flight
):
    """One program: one sequence, one KV head, one split."""
    kv_head = tl.program_id(
        0
    )  # neighbours read the same tokens at the same time: whole rows of memory, not a part each
    seq = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(length_ptr + seq)

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    real = rows < GROUP
    heads = kv_head * GROUP + rows
    inside = real[:, None] & (dims < HEAD_DIM)[None, :]
    query = tl.load(query_ptr + seq * query_stride + heads[:, None] * HEAD_DIM + dims[None, :], mask=inside, other=0.0)
    query = query.to(DOT)

    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    sink_tiles, low, tiles = tile_range(first, length, num_sink_tokens, BLOCK_N)
    per_split = tl.cdiv(tiles, num_splits)
    begin = split * per_split
    end = tl.minimum(begin + per_split, tiles)

    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:  # noqa: SIM102  # known when compiled; the next is not
        if split == 0:  # the sink logit takes part as a position whose value is zero
            maximum = tl.load(sink_ptr + heads, mask=real, other=0.0).to(tl.float32) * LOG2E
            total += 1.0
    output = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    TOKEN: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    key_ptr = cache_ptr + kv_head * HEAD_DIM
    row_ptr = table_ptr + seq * table_stride
    key_scale_ptr = scale_ptr + kv_head * scale_head_stride
    for index in tl.range(begin, end, num_stages=STAGES):
        positions = tile_start(index, sink_tiles, low, BLOCK_N) + tl.arange(0, BLOCK_N)
        visible = (positions < length) & ((positions >= first) | (positions < num_sink_tokens))
        maximum, total, output = attend(
            query, key_ptr, key_scale_ptr, row_ptr, positions, visible, visible[None, :], softmax_scale * LOG2E,
            maximum, total, output, block_stride, scale_block_stride, scale_half_stride, scale_token_stride,
            TOKEN, BLOCK_SIZE, HEAD_DIM, BLOCK_D, FP8, NATIVE, DOT,
        )  # fmt: skip

    output = output / tl.where(total == 0.0, 1.0, total)[:, None]
    if SPLIT:
        lse = tl.where(total == 0.0, float("-inf"), maximum + tl.log2(tl.where(total == 0.0, 1.0, total)))
        slot = (seq * (NUM_KV_HEADS * GROUP) + heads) * num_splits + split
        tl.store(part_ptr + slot[:, None] * HEAD_DIM + dims[None, :], output, mask=inside)
        tl.store(lse_ptr + slot, lse, mask=real)
    else:
        place = seq * out_stride + heads[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out_ptr + place, output.to(out_ptr.dtype.element_ty), mask=inside)


def decode_attention_launch(call: DecodeCall) -> Launch | None:
    """The first launch of `decode_attention`; None for no sequences. With splits, `merge_splits_launch` is the second."""
    num_seqs, _, head_dim = call.query.shape
    if num_seqs == 0:
        return None
    _, _, block_size, num_kv_heads, _ = call.cache.kv.shape
    block_n = kv_tile(head_dim, call.cache.bits.element_size())
    split = call.num_splits > 1
    scales, strides = call.cache.scale_arguments()
    return Launch(
        kernel=decode_attention_kernel,
        grid=(num_kv_heads, num_seqs, call.num_splits),
        arguments=(
            call.query,
            call.cache.bits,
            scales,
            call.block_table,
            call.seq_lens,
            call.query if call.sinks is None else call.sinks,
            call.out,
            call.partial_out if split else call.out,
            call.partial_lse if split else call.out,
            call.softmax_scale,
            call.window or 0,
            call.num_sink_tokens,
            call.num_splits,
            call.query.stride(0),
            call.block_table.stride(0),
            call.out.stride(0),
            call.cache.kv.stride(0),
            *strides,
        ),
        constants={
            "GROUP": call.group,
            "NUM_KV_HEADS": num_kv_heads,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": block_size,
            "BLOCK_M": max(16, next_power_of_2(call.group)),
            "BLOCK_N": block_n,
            "BLOCK_D": max(16, next_power_of_2(head_dim)),
            "FP8": call.cache.scale is not None,
            "NATIVE": call.native_fp8,
            "HAS_SINKS": call.sinks is not None,
            "SPLIT": split,
            "DOT": dot_type(call.query.dtype),
            "STAGES": STAGES,
        },
        num_warps=4,
    )


def decode_attention(call: DecodeCall) -> Any:
    """Attention of one new token a sequence. Writes `call.out` (and the partial results, with more than one split)."""
    launch = decode_attention_launch(call)
    if launch is not None:
        launch.run()
        if call.num_splits > 1:
            merge_splits(call.partial_out, call.partial_lse, call.out)
    return call.out
