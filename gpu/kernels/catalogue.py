"""The kernels as real models launch them: what is compiled for a target, measured on a GPU, and held to a budget.

Shapes are those of Llama-3.1-8B (32 query heads, 8 KV heads of 128, hidden 4096, MLP 14336, vocabulary 128,256) where
nothing else is said: the launches are made on `meta` tensors, which have no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from gpu.compile_check import Budget
from gpu.layout import KVLayout

from .attention import DecodeCall, PrefillCall
from .block_checksum import block_checksum_launch
from .block_rows import BlockRows
from .decode_attention import decode_attention_launch
from .launch import KVView, Launch
from .merge_splits import merge_splits_launch
from .move_blocks import move_blocks_launch
from .prefill_attention import prefill_attention_launch
from .rms_norm import rms_norm_launch
from .rope import rope_launch
from .sample import sample_launch
from .sampling import SampleCall
from .silu_mul import silu_mul_launch
from .store_kv import store_kv_launch

BLOCKS = 1024
Q_HEADS, KV_HEADS, HEAD_DIM, HIDDEN, MLP, VOCAB = 32, 8, 128, 4096, 14_336, 128_256


def _meta(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    return torch.empty(shape, dtype=dtype, device="meta")


def _cache(scaling: str, heads: int, head_dim: int, dtype: Any) -> KVView:
    """One layer: `none` in `dtype`, or fp8 with `static` or `per_token_head` scales."""
    shape = (BLOCKS + 1, 2, 16, heads, head_dim)
    if scaling == "none":
        return KVView.of(_meta(*shape, dtype=dtype))
    scale = _meta(1, 2, 1, 1, dtype=torch.float32).expand(shape[:4])
    if scaling == "per_token_head":
        scale = _meta(*shape[:4], dtype=torch.float32)
    return KVView.of(_meta(*shape, dtype=torch.float8_e4m3fn), scale, dynamic=scaling == "per_token_head")


def _attention(rows: int, seqs: int, heads: tuple[int, int], head_dim: int, scaling: str, dtype: Any) -> dict[str, Any]:
    return {
        "query": _meta(rows, heads[0], head_dim, dtype=dtype),
        "cache": _cache(scaling, heads[1], head_dim, dtype),
        "block_table": _meta(seqs, 512, dtype=torch.int32),
        "seq_lens": _meta(seqs, dtype=torch.int32),
        "out": _meta(rows, heads[0], head_dim, dtype=dtype),
        "softmax_scale": head_dim**-0.5,
    }


def _decode(
    splits: int = 1, heads: tuple[int, int] = (Q_HEADS, KV_HEADS), head_dim: int = HEAD_DIM, scaling: str = "none",
    dtype: Any = torch.bfloat16, **options: Any,
) -> Launch | None:  # fmt: skip
    part = {
        "partial_out": _meta(64, heads[0], splits, head_dim, dtype=torch.float32),
        "partial_lse": _meta(64, heads[0], splits, dtype=torch.float32),
    }
    call = _attention(64, 64, heads, head_dim, scaling, dtype)
    return decode_attention_launch(DecodeCall(**call, num_splits=splits, **part, **options))


def _prefill(
    heads: tuple[int, int] = (Q_HEADS, KV_HEADS), head_dim: int = HEAD_DIM, scaling: str = "none",
    dtype: Any = torch.bfloat16, **options: Any,
) -> Launch | None:  # fmt: skip
    call = _attention(8192, 4, heads, head_dim, scaling, dtype)
    return prefill_attention_launch(PrefillCall(**call, query_starts=_meta(5, dtype=torch.int32), **options))


def _store(scaling: str, dtype: Any = torch.bfloat16) -> Launch | None:
    new = _meta(256, KV_HEADS, HEAD_DIM, dtype=dtype)
    return store_kv_launch(new, new, _cache(scaling, KV_HEADS, HEAD_DIM, dtype), _meta(256, dtype=torch.int64))


def _rows() -> BlockRows:
    layout = KVLayout(num_layers=32, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_size=16)
    return BlockRows.of(layout, _meta(BLOCKS * layout.block_bytes, dtype=torch.uint8), BLOCKS)


def _move() -> Launch | None:
    ids = _meta(32, dtype=torch.int64)
    return move_blocks_launch(_rows(), _rows(), ids, ids)


def _sample(dtype: Any) -> Launch | None:
    number, index = _meta(64, dtype=torch.float32), _meta(64, dtype=torch.int32)
    return sample_launch(
        SampleCall(
            logits=_meta(64, VOCAB, dtype=dtype), temperature=number, top_k=index, top_p=number, uniform=number,
            tokens=_meta(64, dtype=torch.int64),
        )
    )  # fmt: skip


def _norm(size: int, residual: bool) -> Launch | None:
    x = _meta(256, size)
    return rms_norm_launch(x, _meta(size), 1e-5, _meta(256, size), _meta(256, size) if residual else None)


def _rope() -> Launch | None:
    query, key = _meta(256, Q_HEADS, HEAD_DIM), _meta(256, KV_HEADS, HEAD_DIM)
    return rope_launch(query, key, _meta(131_072, HEAD_DIM, dtype=torch.float32), _meta(256, dtype=torch.int64))


def _merge() -> Launch:
    part, lse = _meta(64, Q_HEADS, 8, HEAD_DIM, dtype=torch.float32), _meta(64, Q_HEADS, 8, dtype=torch.float32)
    return merge_splits_launch(part, lse, _meta(64, Q_HEADS, HEAD_DIM))


def _checksum() -> Launch | None:
    return block_checksum_launch(_rows(), _meta(32, dtype=torch.int64), _meta(32, dtype=torch.int32))


# Held with triton 3.7.1 on sm_80, sm_90 and sm_100, by attention on sm_89 and sm_120 too, and with 3.6 on sm_90. They leave no
# room for a spill, which is never allowed. Narrow reads are those of block ids (with 3.6 every thread reads its own) and of
# scales: K or V read four bytes at a time would make more than a hundred.
# Decode: five programs a multiprocessor. Prefill: one, in the 99 KiB of shared memory of sm_89 and sm_120.
# What must be hidden is three assumed latencies, because a program's own work comes on top: of the cards the B200 asks most.
DECODE = Budget(
    registers=96, shared_bytes=49_152, narrow_loads=28, copies_in_flight=3, hidden_ns=3000, issued_share=1.0
)
DECODE_SINKS = replace(DECODE, registers=112)  # on sm_80, whose shared memory has no room for a fifth program
DECODE_WIDE = replace(DECODE, registers=136, hidden_ns=1800)  # heads of 256: three programs
DECODE_FP32 = replace(DECODE, issued_share=0.6)  # products of float32 are made of single multiplications
# Scales are read four bytes at a time. As many instructions a position as with 16 bits, and those that widen bytes, for half the
# bytes: an fp8 cache halves the memory it takes, but not the time. What is held is what was reached.
DECODE_FP8 = replace(DECODE, registers=200, narrow_loads=44, hidden_ns=900, issued_share=0.33)
PREFILL = Budget(registers=208, shared_bytes=101_376, narrow_loads=28, copies_in_flight=3)
PREFILL_FP8 = replace(PREFILL, registers=240, narrow_loads=64)
SAMPLE = Budget(registers=128, shared_bytes=4_096)
ROW = Budget(registers=64, shared_bytes=4_096, hidden_ns=1200)
STORE = replace(ROW, hidden_ns=500)  # the slot first, then the vector; a step stores little
MERGE = replace(ROW, hidden_ns=400)  # a few MiB, just written

CATALOGUE: dict[str, tuple[Callable[[], Launch | None], Budget]] = {
    "store_kv[bf16]": (lambda: _store("none"), STORE),
    "store_kv[fp8]": (lambda: _store("static"), STORE),
    "store_kv[fp8_per_token_head]": (lambda: _store("per_token_head"), STORE),
    "decode_attention[bf16,128,4]": (_decode, DECODE),
    "decode_attention[bf16,128,4,split]": (lambda: _decode(splits=8), DECODE),
    "decode_attention[bf16,128,4,window,sinks]": (
        lambda: _decode(window=4096, num_sink_tokens=4, sinks=_meta(Q_HEADS, dtype=torch.float32)), DECODE_SINKS),
    "decode_attention[fp16,64,8]": (lambda: _decode(heads=(64, 8), head_dim=64, dtype=torch.float16), DECODE),
    "decode_attention[bf16,256,8]": (lambda: _decode(heads=(16, 2), head_dim=256), DECODE_WIDE),
    "decode_attention[fp8,128,4]": (lambda: _decode(scaling="static"), DECODE_FP8),
    "decode_attention[fp8,256,8]": (lambda: _decode(heads=(16, 2), head_dim=256, scaling="static"), DECODE_FP8),
    "decode_attention[fp8_per_token_head,128,4,split]": (lambda: _decode(splits=8, scaling="per_token_head"), DECODE_FP8),
    "decode_attention[fp32,128,4]": (lambda: _decode(dtype=torch.float32), DECODE_FP32),
    "merge_splits[bf16,128]": (_merge, MERGE),
    "prefill_attention[bf16,128,4]": (_prefill, PREFILL),
    "prefill_attention[bf16,128,4,window,sinks]": (
        lambda: _prefill(window=4096, num_sink_tokens=4, sinks=_meta(Q_HEADS, dtype=torch.float32)), PREFILL),
    "prefill_attention[fp16,64,8]": (lambda: _prefill(heads=(64, 8), head_dim=64, dtype=torch.float16), PREFILL),
    "prefill_attention[bf16,256,8]": (lambda: _prefill(heads=(16, 2), head_dim=256), PREFILL),
    "prefill_attention[fp8_per_token_head,128,4]": (lambda: _prefill(scaling="per_token_head"), PREFILL_FP8),
    "prefill_attention[fp8,256,8]": (lambda: _prefill(heads=(16, 2), head_dim=256, scaling="static"), PREFILL_FP8),
    "prefill_attention[fp32,128,4]": (lambda: _prefill(dtype=torch.float32), PREFILL),
    "move_blocks": (_move, ROW),
    "block_checksum": (_checksum, ROW),
    "rms_norm[bf16,4096]": (lambda: _norm(HIDDEN, False), ROW),
    "rms_norm[bf16,4096,residual]": (lambda: _norm(HIDDEN, True), ROW),
    "rms_norm[bf16,128]": (lambda: _norm(HEAD_DIM, False), ROW),
    "rope[bf16,128]": (_rope, ROW),
    "silu_mul[bf16]": (lambda: silu_mul_launch(_meta(256, 2 * MLP), _meta(256, MLP)), ROW),
    "sample[bf16]": (lambda: _sample(torch.bfloat16), SAMPLE),
    "sample[fp32]": (lambda: _sample(torch.float32), SAMPLE),
}  # fmt: skip
"""By name: how to make the launch, and what it may take."""
