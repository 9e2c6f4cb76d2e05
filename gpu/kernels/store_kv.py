"""Store KV: write the keys and values of new tokens into their slots of the paged cache.

    cache[slot // block_size, 0, slot % block_size, h, :] = quantise(key[token, h, :])      (1: value)

where `slot = slot_mapping[token]` and, in an fp8 cache, `quantise(x) = round_e4m3(x / scale)` with one scale a vector,
`max|x| / 448`, written beside the cache, or with a constant scale a layer. A slot of block 0 (NO_BLOCK) names no place:
its token is padding and is not written.

**Source:** `reshape_and_cache_flash`, vLLM; per-token-head scales as in vLLM's `fp8_per_token_head`.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from .fp8 import encode_e4m3
from .launch import KVView, Launch, next_power_of_2, warps_for


@triton.jit
def store_half(vector, cache_ptr, row, place, inside, scales, heads, NUM_HEADS: tl.constexpr, SCALING: tl.constexpr):
    """Write the K or the V of one token, `[BLOCK_H, BLOCK_D]`, and, where it is computed, its scale of each head."""
    if SCALING == 0:
        tl.store(cache_ptr + row + place, vector.to(cache_ptr.dtype.element_ty), mask=inside)
    else:
        wide = vector.to(tl.float32)
        if SCALING == 2:
            scale = tl.max(tl.abs(wide), axis=1)[:, None] * (1.0 / 448.0)
            scale = tl.where(scale == 0.0, 1.0, scale)  # all zeros: any scale will do
            tl.store(scales, scale, mask=heads < NUM_HEADS)
        else:
            scale = tl.load(scales, mask=heads < NUM_HEADS, other=1.0)
        tl.store(cache_ptr + row + place, encode_e4m3(wide / scale), mask=inside)


@triton.jit
def store_kv_kernel(
    key_ptr,  # [num_tokens, num_kv_heads, head_dim], heads and numbers dense
    value_ptr,  # [num_tokens, num_kv_heads, head_dim]
    cache_ptr,  # [num_blocks + 1, 2, block_size, num_kv_heads, head_dim], one layer; uint8 when fp8
    scale_ptr,  # [num_blocks + 1, 2, block_size, num_kv_heads] float32; not read without fp8
    slot_ptr,  # [num_tokens] int64
    key_stride,  # elements from a token to the next
    value_stride,
    block_stride,  # elements from a block to the next
    scale_block_stride,
    scale_half_stride,
    scale_token_stride,
    scale_head_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,  # power of two >= NUM_HEADS
    BLOCK_D: tl.constexpr,  # power of two >= HEAD_DIM
    SCALING: tl.constexpr,  # 0: not fp8, 1: scale given, 2: scale computed and written
):
    """One program writes K and V of one token; both are on their way before either is waited for."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    block = slot // BLOCK_SIZE  # int64, as its product with a stride must be: a 4 GiB layer passes 2^31 elements
    offset = slot % BLOCK_SIZE
    if block > 0:
        heads = tl.arange(0, BLOCK_H)[:, None]
        dims = tl.arange(0, BLOCK_D)[None, :]
        inside = (heads < NUM_HEADS) & (dims < HEAD_DIM)
        place = heads * HEAD_DIM + dims
        key = tl.load(key_ptr + token * key_stride + place, mask=inside, other=0.0)
        value = tl.load(value_ptr + token * value_stride + place, mask=inside, other=0.0)
        row = block * block_stride + offset * (NUM_HEADS * HEAD_DIM)
        at = block * scale_block_stride + offset * scale_token_stride
        scales = scale_ptr + at + heads * scale_head_stride  # [BLOCK_H, 1]
        store_half(key, cache_ptr, row, place, inside, scales, heads, NUM_HEADS, SCALING)
        row += BLOCK_SIZE * NUM_HEADS * HEAD_DIM
        store_half(value, cache_ptr, row, place, inside, scales + scale_half_stride, heads, NUM_HEADS, SCALING)


def store_kv_launch(key: Any, value: Any, cache: KVView, slot_mapping: Any) -> Launch | None:
    """The launch that `store_kv` runs; None for no tokens."""
    num_tokens = cache.check_new_tokens(key, value, slot_mapping)
    if num_tokens == 0:
        return None
    _, _, block_size, num_heads, head_dim = cache.kv.shape
    block_h, block_d = next_power_of_2(num_heads), next_power_of_2(head_dim)
    scales, strides = cache.scale_arguments()
    return Launch(
        kernel=store_kv_kernel,
        grid=(num_tokens,),
        arguments=(
            key,
            value,
            cache.bits,
            scales,
            slot_mapping,
            key.stride(0),
            value.stride(0),
            cache.kv.stride(0),
            *strides,
        ),
        constants={
            "NUM_HEADS": num_heads,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": block_size,
            "BLOCK_H": block_h,
            "BLOCK_D": block_d,
            "SCALING": cache.scaling_code,
        },
        num_warps=warps_for(block_h * block_d),
    )


def store_kv(key: Any, value: Any, cache: KVView, slot_mapping: Any) -> None:
    """Write `key` and `value` into their slots of `cache`. Changes the cache (and its scales), nothing else.

    Args:
        key: `[num_tokens, num_kv_heads, head_dim]`; tokens may be strided (a slice of a fused projection).
        value: like `key`.
        cache: one layer of the pool.
        slot_mapping: `[num_tokens]` int64; slots below `block_size` are padding.
    """
    launch = store_kv_launch(key, value, cache, slot_mapping)
    if launch is not None:
        launch.run()
