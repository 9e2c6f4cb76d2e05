"""Rotary position embedding of queries and keys, in place.

    x1, x2 = x[: r / 2], x[r / 2 : r]
    x[: r / 2] = x1 cos - x2 sin,      x[r / 2 : r] = x2 cos + x1 sin

for the first r = rotary_dim numbers of every head (the pairing of GPT-NeoX and Llama), with `table[position]` holding
r / 2 cosines followed by r / 2 sines. Computed in float32, whatever the format.

**Sources:** Su et al. (arXiv:2104.09864); `apply_rotary_pos_emb`, transformers.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from .elementwise import check_rope
from .launch import Launch, next_power_of_2, warps_for


@triton.jit
def rope_kernel(
    query_ptr,  # [num_tokens, num_q_heads, head_dim]; read and written
    key_ptr,  # [num_tokens, num_kv_heads, head_dim]; read and written
    table_ptr,  # [max_positions, 2 * HALF] float32: cosines, sines
    position_ptr,  # [num_tokens] int64
    query_stride,  # elements from a token to the next
    key_stride,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,  # rotary_dim / 2
    BLOCK_H: tl.constexpr,  # heads of a tile
    BLOCK_D: tl.constexpr,  # power of two >= HALF
):
    """One program rotates BLOCK_H heads of one token: query heads first, then key heads."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    row = table_ptr + tl.load(position_ptr + token) * (2 * HALF) + dims
    cos = tl.load(row, mask=dims < HALF, other=0.0)
    sin = tl.load(row + HALF, mask=dims < HALF, other=0.0)

    QUERY_TILES: tl.constexpr = (NUM_Q_HEADS + BLOCK_H - 1) // BLOCK_H
    if tl.program_id(1) < QUERY_TILES:
        base = query_ptr + token * query_stride
        inside = (heads < NUM_Q_HEADS) & (dims < HALF)
    else:
        heads -= QUERY_TILES * BLOCK_H
        base = key_ptr + token * key_stride
        inside = (heads < NUM_KV_HEADS) & (dims < HALF)
    place = base + heads * HEAD_DIM + dims
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, (first * cos - second * sin).to(query_ptr.dtype.element_ty), mask=inside)
    tl.store(place + HALF, (second * cos + first * sin).to(query_ptr.dtype.element_ty), mask=inside)


def rope_launch(query: Any, key: Any, table: Any, positions: Any) -> Launch | None:
    """The launch that `rope` runs; None for no tokens."""
    num_tokens, rotary_dim = check_rope(query, key, table, positions)
    if num_tokens == 0:
        return None
    _, num_q_heads, head_dim = query.shape
    num_kv_heads = int(key.shape[1])
    block_d = next_power_of_2(rotary_dim // 2)
    block_h = min(next_power_of_2(max(num_q_heads, num_kv_heads)), max(1, 2048 // block_d))
    return Launch(
        kernel=rope_kernel,
        grid=(num_tokens, triton.cdiv(num_q_heads, block_h) + triton.cdiv(num_kv_heads, block_h)),
        arguments=(query, key, table, positions, query.stride(0), key.stride(0)),
        constants={
            "NUM_Q_HEADS": num_q_heads,
            "NUM_KV_HEADS": num_kv_heads,
            "HEAD_DIM": head_dim,
            "HALF": rotary_dim // 2,
            "BLOCK_H": block_h,
            "BLOCK_D": block_d,
        },
        num_warps=warps_for(block_h * block_d),
    )


def rope(query: Any, key: Any, table: Any, positions: Any) -> None:
    """Rotate `query` and `key` in place. Changes those two.

    Args:
        query: `[num_tokens, num_q_heads, head_dim]`; tokens may be strided.
        key: `[num_tokens, num_kv_heads, head_dim]`, in the same format.
        table: `[max_positions, rotary_dim]` float32: for each position, rotary_dim / 2 cosines, then as many sines.
        positions: `[num_tokens]` int64.
    """
    launch = rope_launch(query, key, table, positions)
    if launch is not None:
        launch.run()
