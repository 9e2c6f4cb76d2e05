"""Scratch memory of kernels: fixed buffers they are given, and what they ask for of it."""

from __future__ import annotations

from sim.catalog.gpus import Gpu
from sim.catalog.layers import AttentionShape
from sim.catalog.shape import ModelShape

from .ops import Op
from .releases import EngineRelease
from .rounding import MIB

FLASHINFER_BUFFER_BYTES = 394 * MIB
"""What vLLM gives FlashInfer. **Source:** VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE, vLLM 0.10 and later."""


CUBLAS = "cuBLAS workspace"


def cublas_workspace(gpu: Gpu) -> Op:
    """Workspace PyTorch keeps for cuBLAS. **Source:** PyTorch 2.x, `CUBLAS_WORKSPACE_CONFIG` defaults: 32 MiB on data-centre
    Hopper and Blackwell, 8.1 MiB elsewhere.
    """
    size = 32 * MIB if gpu.compute_capability in ((9, 0), (10, 0)) else 8 * MIB + (128 << 10)
    return Op(name=CUBLAS, requested_bytes=size, formula=f"{size} B")


def moe_workspace(model: ModelShape, tokens: int, tensor_parallel_size: int, element_bytes: int) -> Op | None:
    """The two buffers of a fused mixture-of-experts kernel; None for a dense model.

    One row for every (token, visited expert). The first buffer holds the activated hidden rows and later the outputs, the
    second the gate and up rows and later the weighted outputs. **Source:** vLLM `TritonExperts.workspace_shapes`.
    """
    if model.moe is None:
        return None
    rows = tokens * model.moe.experts_per_token
    width = -(-model.moe.intermediate_size // tensor_parallel_size)
    first, second = max(width, model.hidden_size), max(2 * width, model.hidden_size)
    return Op(
        name="experts' workspaces",
        requested_bytes=rows * (first + second) * element_bytes,
        formula=f"{tokens} tokens x {model.moe.experts_per_token} experts x ({first} + {second}) x {element_bytes} B",
    )


def split_kv_partials(kind: AttentionShape, gpu: Gpu, rows: int, tensor_parallel_size: int) -> Op | None:
    """Partial outputs and log-sum-exps of decode attention over `rows` sequences, in fp32; None where no sequence is split.

    A kernel splits sequences when there are fewer (sequence, KV head) pairs than multiprocessors, into as many parts as fill them.
    """
    heads = kind.num_heads // tensor_parallel_size
    pairs = rows * (1 if kind.is_mla else kind.kv_heads_per_rank(tensor_parallel_size))
    splits = -(-gpu.sm_count // pairs)
    if splits < 2:
        return None
    width = (kind.kv_lora_rank or kind.head_dim) + 1
    return Op(
        name="split-KV partials",
        requested_bytes=splits * rows * heads * width * 4,
        formula=f"{splits} parts x {rows} rows x {heads} heads x {width} x 4 B",
    )


def flashinfer_request_bytes(
    kind: AttentionShape, gpu: Gpu, rows: int, seqs: int, tensor_parallel_size: int = 1
) -> int:
    """Bytes of `batch_prefill_tmp_v` that FlashInfer's planner asks of its workspace for `rows` query tokens of `seqs` sequences.

    `heads * padded * tile * head_dim * 4`, where `padded` is the larger of two blocks a multiprocessor over the KV heads, and the
    tiles that a captured graph must be able to hold. **Source:** FlashInfer `PrefillSplitQOKVIndptr`; an overflow of 536,346,624 B is
    reported for 512 sequences of a model with 32 query and 2 KV heads of 256 (vLLM issue 40023).
    """
    heads, kv_heads = kind.num_heads // tensor_parallel_size, kind.kv_heads_per_rank(tensor_parallel_size)
    group = heads // kv_heads
    packed = rows * group / seqs
    tile = 128 if packed > 64 and kind.head_dim < 256 else 64 if packed > 16 else 16
    tiles = -(-rows * group // tile) + seqs - 1
    padded = max(2 * gpu.sm_count // kv_heads, tiles)
    return heads * padded * tile * kind.head_dim * 4


def attention_workspace(
    model: ModelShape, gpu: Gpu, release: EngineRelease, seqs: int, tensor_parallel_size: int
) -> tuple[tuple[Op, ...], list[str]]:
    """The fixed workspace of the attention backend that the release chooses for `gpu`, and a warning where it is asked for more.

    FlashInfer is the default on data-centre Blackwell only. **Source:** vLLM `_get_backend_priorities`, 0.19.
    """
    if release.engine != "vllm" or gpu.compute_capability[0] != 10 or any(kind.is_mla for kind in model.attention):
        return (), []
    wanted = max(flashinfer_request_bytes(kind, gpu, seqs, seqs, tensor_parallel_size) for kind in model.attention)
    buffer = Op(
        name="FlashInfer workspace",
        requested_bytes=FLASHINFER_BUFFER_BYTES,
        formula=f"fixed; its planner asks for up to {wanted} B of it with {seqs} sequences",
    )
    if wanted <= FLASHINFER_BUFFER_BYTES:
        return (buffer,), []
    return (buffer,), [
        f"FlashInfer may ask for {wanted} bytes of workspace with {seqs} sequences, more than the {FLASHINFER_BUFFER_BYTES} it is "
        "given: lower max_num_seqs or raise VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE"
    ]
