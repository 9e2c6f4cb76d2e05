"""One rank's account: every line computed from the configuration, before the lines are put together."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from sim.catalog.dtypes import DTYPE_BYTES, WeightFormat
from sim.catalog.gpus import GIB, Gpu
from sim.catalog.shape import ModelShape
from sim.catalog.weights import rank_weight_tensors

from .activation import Peak, forward_peak, sampler_peak
from .graphs import ACTUAL_SHARE, estimated_graph_bytes, graph_plan
from .non_torch import non_torch_bytes
from .releases import EngineRelease
from .rounding import allocated_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The engine settings that memory depends on, resolved: no defaults left to fill in."""

    tensor_parallel_size: int
    """Ranks a layer is split over."""
    pipeline_parallel_size: int
    """Stages the layers are split over."""
    dtype: str
    """Format of activations and of weights that are not quantised."""
    weight_format: WeightFormat | None
    """Storage of quantised weights, or None."""
    kv_cache_dtype: str
    """Format of the KV cache; `auto` is `dtype`."""
    block_size: int
    """Tokens a block."""
    gpu_memory_utilization: float
    """Share of the physical total that is budgeted."""
    max_num_seqs: int
    """Most sequences in one step."""
    max_num_batched_tokens: int
    """Most tokens in one step: what start-up profiling runs."""
    kv_cache_memory_bytes: int | None
    """Size of the pool as ordered; overrides what the budget leaves."""
    enforce_eager: bool
    """No compilation and no CUDA graphs."""
    release: EngineRelease
    """The engine release whose behaviour is followed."""

    def with_tensor_parallel(self, tensor_parallel_size: int) -> Settings:
        """The same settings on more GPUs."""
        return replace(self, tensor_parallel_size=tensor_parallel_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAccount:
    """What one rank's memory is spent on. A `*_text` is the figure's formula with its numbers."""

    budget_bytes: int
    """`gpu_memory_utilization` times the total, rounded up."""
    outside_bytes: int
    """Physical total less the budget."""
    weights_bytes: int
    """Weights as allocated, with the rotary table."""
    weights_text: str
    non_torch_bytes: int
    """Memory outside PyTorch's allocator."""
    non_torch_text: str
    activation_bytes: int
    """Peak of temporary tensors."""
    activation_text: str
    graphs_bytes: int
    """CUDA graphs, inside the budget or on top of it as the release has it."""
    graphs_text: str
    used_bytes: int
    """Everything but KV that comes off the budget."""
    kv_bytes_per_token: int
    """Over the layers of the stage."""
    block_bytes: int
    """Bytes of one KV block."""
    num_blocks: int
    """Blocks the budget leaves; negative when the budget is overdrawn."""

    @property
    def summary(self) -> str:
        """The lines other than KV, for messages."""
        graphs = self.used_bytes - self.weights_bytes - self.non_torch_bytes - self.activation_bytes
        return (
            f"weights {self.weights_bytes / GIB:.2f} GiB + non-torch {self.non_torch_bytes / GIB:.2f} GiB + "
            f"peak activation {self.activation_bytes / GIB:.2f} GiB + CUDA graphs {graphs / GIB:.2f} GiB"
        )


def account_rank(model: ModelShape, gpu: Gpu, settings: Settings, pipeline_rank: int) -> RankAccount:
    """The account of the ranks of one pipeline stage (its tensor-parallel ranks are alike)."""
    layers = model.layers_of_rank(pipeline_rank, settings.pipeline_parallel_size)
    budget = math.ceil(gpu.total_bytes * settings.gpu_memory_utilization)
    weights, weights_text = _weights(model, settings, pipeline_rank)
    non_torch, non_torch_text = non_torch_bytes(
        gpu,
        settings.release,
        tensor_parallel_size=settings.tensor_parallel_size,
        pipeline_parallel_size=settings.pipeline_parallel_size,
    )
    last = pipeline_rank == settings.pipeline_parallel_size - 1
    peak = _peak(model, gpu, settings, tokens=settings.max_num_batched_tokens, samples=last, profiling=True)
    graphs, graphs_text = _graphs(model, gpu, settings, len(layers))
    used = weights + non_torch + peak.bytes + (graphs if settings.release.graphs_in_budget else 0)
    per_token = model.kv_bytes_per_token(
        settings.kv_cache_dtype, settings.tensor_parallel_size, layers=layers, dtype=settings.dtype
    )
    block = per_token * settings.block_size
    available = budget - used if settings.kv_cache_memory_bytes is None else settings.kv_cache_memory_bytes
    return RankAccount(
        budget_bytes=budget,
        outside_bytes=gpu.total_bytes - budget,
        weights_bytes=weights,
        weights_text=weights_text,
        non_torch_bytes=non_torch,
        non_torch_text=non_torch_text,
        activation_bytes=peak.bytes,
        activation_text=peak.text,
        graphs_bytes=graphs,
        graphs_text=graphs_text,
        used_bytes=used,
        kv_bytes_per_token=per_token,
        block_bytes=block,
        num_blocks=available // block,
    )


def _weights(model: ModelShape, settings: Settings, pipeline_rank: int) -> tuple[int, str]:
    """Weights as allocated: every tensor rounded as the allocator does, and the table of rotary positions."""
    element = DTYPE_BYTES[settings.dtype]
    tensors = rank_weight_tensors(model, settings.tensor_parallel_size, settings.pipeline_parallel_size, pipeline_rank)
    sizes = [tensor.stored_bytes(element, settings.weight_format) for tensor in tensors]
    allocated = sum(map(allocated_bytes, sizes))
    rotary = model.max_position_embeddings * (model.rotary_dim or model.head_dim) * element
    form = settings.weight_format.name if settings.weight_format else settings.dtype
    text = f"{sum(sizes)} B of {form} in {len(sizes)} tensors + {allocated - sum(sizes)} B rounding + rotary {rotary} B"
    return allocated + rotary, text


def _peak(model: ModelShape, gpu: Gpu, settings: Settings, *, tokens: int, samples: bool, profiling: bool) -> Peak:
    """The larger of the two peaks of a step over `tokens` tokens."""
    forward = forward_peak(
        model, gpu, settings.release, tokens=tokens, tensor_parallel_size=settings.tensor_parallel_size,
        pipeline_parallel_size=settings.pipeline_parallel_size, dtype=settings.dtype, tuned=profiling and not settings.enforce_eager,
    )  # fmt: skip
    if not samples:
        return forward
    sampler = sampler_peak(
        model, gpu, settings.release, tokens=tokens, rows=min(settings.max_num_seqs, tokens),
        tensor_parallel_size=settings.tensor_parallel_size, dtype=settings.dtype,
    )  # fmt: skip
    return max(forward, sampler, key=lambda peak: peak.bytes)


def _graphs(model: ModelShape, gpu: Gpu, settings: Settings, layers: int) -> tuple[int, str]:
    """CUDA graphs: the engine's own estimate where it is budgeted, the actual size where it comes on top."""
    plan = graph_plan(settings.max_num_seqs, settings.max_num_batched_tokens, enforce_eager=settings.enforce_eager)
    if not plan.count:
        return 0, "eager mode captures none"
    largest = _peak(model, gpu, settings, tokens=max(plan.piecewise_sizes), samples=False, profiling=False)
    tensors = sum(term.bytes for term in largest.terms if term.name != "cuBLAS workspace")
    estimate = estimated_graph_bytes(plan, layers, tensors)
    text = f"{plan.count} graphs x {layers} layers x 0.25 MiB + {tensors} B"
    if settings.release.graphs_in_budget:
        return estimate, text
    return round(estimate * ACTUAL_SHARE), f"{ACTUAL_SHARE:g} x ({text}), captured after the pool"
