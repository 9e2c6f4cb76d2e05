"""Paged prefill attention: the last tokens of each sequence over all its blocks, causal, lengths as they come.

    out[t, h] = sum_{p visible from t} softmax_p(q[t, h] . k[p, g] * softmax_scale) v[p, g],     g = h // group

Token t of sequence s stands at position `seq_lens[s] - num_query_tokens[s] + t` and sees the positions up to its own
(with a sliding window only the last `window` of them, and the sink tokens). So a whole prompt, a chunk of one on top of
what was computed before, and a prompt on top of a cached prefix are the same computation. Scores exist for one tile of
queries and one tile of positions at a time: nothing of size S x S is ever made.

Query heads of one KV head share a tile with `BLOCK_M // group` tokens (GQA packing). The grid has one program for every
tile that could exist, `num_tokens // BLOCK_Q + num_seqs`; each finds its sequence by binary search, without asking the host.

**Source:** FlashAttention-2 (arXiv:2307.08691); the tile search of vLLM's `triton_unified_attention`.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .attention import PrefillCall, kv_tile
from .launch import Launch, next_power_of_2
from .paged import LOG2E, attend, dot_type, tile_range, tile_start

STAGES = 5
"""As in decode attention: with fewer a program never loads while it multiplies, and here there is one on a multiprocessor."""


@triton.jit
def find_sequence(starts_ptr, tile, num_seqs, BLOCK_Q: tl.constexpr):
    """The last sequence s with `query_starts[s] // BLOCK_Q + s <= tile`: sequence s owns the tiles from there on, enough
    for all its tokens wherever they begin.
    """
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle
    return low


# What differs from step to step is compiled once: behind the decodes of a batch, rows begin anywhere.
@triton.jit(do_not_specialize=["num_seqs", "table_stride"], do_not_specialize_on_alignment=["table_ptr", "length_ptr"])
def prefill_attention_kernel(
    query_ptr,  # [num_tokens, num_q_heads, head_dim]
    cache_ptr,  # [num_blocks + 1, 2, block_size, num_kv_heads, head_dim], one layer; uint8 when fp8
    scale_ptr,  # [num_blocks + 1, 2, block_size, num_kv_heads] float32; not read without fp8
    table_ptr,  # [num_seqs, max_blocks] int32
    length_ptr,  # [num_seqs] int32: KV length, the new tokens included
    starts_ptr,  # [num_seqs + 1] int32: first row of each sequence
    sink_ptr,  # [num_q_heads] float32; not read without HAS_SINKS
    out_ptr,  # [num_tokens, num_q_heads, head_dim]
    softmax_scale,
    window,  # positions, 0 for all
    num_sink_tokens,
    num_seqs,
    query_stride,  # elements from a token to the next
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
    BLOCK_Q: tl.constexpr,  # tokens of a tile: BLOCK_M // GROUP
    BLOCK_M: tl.constexpr,  # rows of a tile, token by token, head by head; the rest is padding
    BLOCK_N: tl.constexpr,  # positions of a tile
    BLOCK_D: tl.constexpr,  # power of two >= HEAD_DIM
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,  # the device converts fp8
    HAS_SINKS: tl.constexpr,
    DOT: tl.constexpr,  # format of matrix products' inputs
    STAGES: tl.constexpr,  # tiles in flight
):
    """One program: one tile of query tokens of one sequence, one KV head."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = find_sequence(starts_ptr, tile, num_seqs, BLOCK_Q)
    start = tl.load(starts_ptr + seq)
    num_tokens = tl.load(starts_ptr + seq + 1) - start
    token0 = (tile - start // BLOCK_Q - seq) * BLOCK_Q
    if token0 < num_tokens:
        context = tl.load(length_ptr + seq) - num_tokens
        rows = tl.arange(0, BLOCK_M)
        dims = tl.arange(0, BLOCK_D)
        tokens = token0 + rows // GROUP
        heads = kv_head * GROUP + rows % GROUP
        real = (rows < BLOCK_Q * GROUP) & (tokens < num_tokens)
        inside = real[:, None] & (dims < HEAD_DIM)[None, :]
        row = (start + tokens).to(tl.int64)
        head_at = heads[:, None] * HEAD_DIM + dims[None, :]
        query = tl.load(query_ptr + row[:, None] * query_stride + head_at, mask=inside, other=0.0).to(DOT)

        stands = context + tokens  # position of each row
        oldest = tl.where(window > 0, tl.maximum(stands - window + 1, 0), 0)  # first it sees, sink tokens apart
        first = tl.where(window > 0, tl.maximum(context + token0 - window + 1, 0), 0)
        end = context + tl.minimum(token0 + BLOCK_Q, num_tokens)
        sink_tiles, low, tiles = tile_range(first, end, num_sink_tokens, BLOCK_N)

        maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if HAS_SINKS:  # the sink logit takes part as a position whose value is zero
            maximum = tl.load(sink_ptr + heads, mask=real, other=0.0).to(tl.float32) * LOG2E
            total += 1.0
        output = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

        TOKEN: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
        key_ptr = cache_ptr + kv_head * HEAD_DIM
        row_ptr = table_ptr + seq.to(tl.int64) * table_stride
        key_scale_ptr = scale_ptr + kv_head * scale_head_stride
        for index in tl.range(0, tiles, num_stages=STAGES):
            positions = tile_start(index, sink_tiles, low, BLOCK_N) + tl.arange(0, BLOCK_N)
            readable = (positions < end) & ((positions >= first) | (positions < num_sink_tokens))
            near = (positions[None, :] >= oldest[:, None]) | (positions < num_sink_tokens)[None, :]
            maximum, total, output = attend(
                query, key_ptr, key_scale_ptr, row_ptr, positions, readable,
                (positions[None, :] <= stands[:, None]) & near, softmax_scale * LOG2E,
                maximum, total, output, block_stride, scale_block_stride, scale_half_stride, scale_token_stride,
                TOKEN, BLOCK_SIZE, HEAD_DIM, BLOCK_D, FP8, NATIVE, DOT,
            )  # fmt: skip

        output = output / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out_ptr + row[:, None] * out_stride + head_at, output.to(out_ptr.dtype.element_ty), mask=inside)


def query_tile(head_dim: int, group: int, element_bytes: int, dtype: Any) -> tuple[int, int, int]:
    """(rows, positions, warps) of a tile: what keeps the accumulator in registers on every target, and two buffers of K and V in the
    shared memory of the smallest.
    """
    if dtype is torch.float32:
        return max(16, next_power_of_2(group)), kv_tile(head_dim, element_bytes), 4
    rows = 128 if head_dim <= 128 else 64
    positions = 64 if head_dim <= 64 else 32 if head_dim <= 128 else 16
    if element_bytes == 1 and head_dim > 64:
        positions = 16  # numbers of 8 bits are widened in registers, on sm_80 by integer arithmetic
    return max(rows, next_power_of_2(group)), positions, 8


def prefill_attention_launch(call: PrefillCall) -> Launch | None:
    """The launch that `prefill_attention` runs; None for no tokens."""
    num_tokens, _, head_dim = call.query.shape
    num_seqs = int(call.seq_lens.shape[0])
    if num_tokens == 0:
        return None
    _, _, block_size, num_kv_heads, _ = call.cache.kv.shape
    block_m, block_n, warps = query_tile(head_dim, call.group, call.cache.bits.element_size(), call.query.dtype)
    block_q = block_m // call.group
    scales, strides = call.cache.scale_arguments()
    return Launch(
        kernel=prefill_attention_kernel,
        grid=(num_tokens // block_q + num_seqs, num_kv_heads),
        arguments=(
            call.query,
            call.cache.bits,
            scales,
            call.block_table,
            call.seq_lens,
            call.query_starts,
            call.query if call.sinks is None else call.sinks,
            call.out,
            call.softmax_scale,
            call.window or 0,
            call.num_sink_tokens,
            num_seqs,
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
            "BLOCK_Q": block_q,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_D": max(16, next_power_of_2(head_dim)),
            "FP8": call.cache.scale is not None,
            "NATIVE": call.native_fp8,
            "HAS_SINKS": call.sinks is not None,
            "DOT": dot_type(call.query.dtype),
            "STAGES": STAGES,
        },
        num_warps=warps,
    )


def prefill_attention(call: PrefillCall) -> Any:
    """Causal attention of packed new tokens. Writes `call.out` only."""
    launch = prefill_attention_launch(call)
    if launch is not None:
        launch.run()
    return call.out
