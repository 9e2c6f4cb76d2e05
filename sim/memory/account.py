"""One rank's account: every use of memory computed from the configuration, before the lines are put together."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sim.catalog.dtypes import DTYPE_BYTES
from sim.catalog.gpus import GIB, Gpu
from sim.catalog.shape import ModelShape
from sim.catalog.weights import rank_weight_tensors

from .activation import decode_peak, encoder_peak, forward_peaks
from .adapters import lora_ops
from .graphs import ACTUAL_SHARE, estimated_graph_bytes, graph_plan
from .kv_groups import KvLayout, kv_layout
from .non_torch import communication_ops, context_bytes, context_op, library_ops
from .ops import Op, Peak, total
from .rounding import allocated_bytes
from .sampling import logits_peak, prompt_logprobs_peak, sampler_peak, verification_peak
from .settings import Settings
from .workspaces import attention_workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAccount:
    """What one rank's memory is spent on."""

    pipeline_rank: int
    """The stage."""
    budget_bytes: int
    """What the engine gives itself."""
    weights: tuple[Op, ...]
    """The model's weights."""
    draft_weights: tuple[Op, ...]
    """A draft model's, on the rank that holds it."""
    adapters: tuple[Op, ...]
    """LoRA slots."""
    libraries: tuple[Op, ...]
    """Loaded kernels and their stacks."""
    communication: tuple[Op, ...]
    """Communication buffers."""
    context: tuple[Op, ...]
    """The CUDA context."""
    other_processes: tuple[Op, ...]
    """What is not the engine's."""
    phases: tuple[Peak, ...]
    """Candidates for the peak of temporary memory."""
    graphs_estimate_bytes: int
    """What the engine expects CUDA graphs to take."""
    graphs_bytes: int
    """What they take."""
    graphs_text: str
    """How the estimate comes about."""
    workspaces: tuple[Op, ...]
    """Fixed workspaces of attention backends, made after profiling."""
    buffers: tuple[Op, ...]
    """Input, output and sampling buffers of the model runner."""
    used_bytes: int
    """Everything but KV that comes off the budget."""
    kv_bytes_per_token: int
    """Over the layers of the stage, and the draft's."""
    layout: KvLayout
    """How the pool is laid out."""
    num_blocks: int
    """Blocks the budget leaves; negative when the budget is overdrawn."""
    warnings: tuple[str, ...]
    """What to know about kernels' workspaces."""

    @property
    def peak(self) -> Peak:
        """The largest profiled phase."""
        return max((phase for phase in self.phases if phase.profiled), key=lambda phase: phase.bytes)

    @property
    def summary(self) -> str:
        """The lines other than KV, for messages."""
        weights = total((*self.weights, *self.draft_weights, *self.adapters))
        peak = self.peak.bytes
        rest = total((*self.libraries, *self.communication))
        others = self.used_bytes - weights - peak - rest
        return (
            f"weights {weights / GIB:.2f} GiB + non-torch {rest / GIB:.2f} GiB + "
            f"peak activation {peak / GIB:.2f} GiB + others {max(0, others) / GIB:.2f} GiB"
        )


def account_rank(model: ModelShape, gpu: Gpu, settings: Settings, pipeline_rank: int) -> RankAccount:
    """The account of one pipeline stage's first rank; its other tensor-parallel ranks are alike or better off."""
    layers = model.layers_of_rank(pipeline_rank, settings.pipeline_parallel_size)
    release, tp, pp = settings.release, settings.tensor_parallel_size, settings.pipeline_parallel_size
    last = pipeline_rank == pp - 1
    draft = settings.draft if last else None
    weights = _weights(model, settings, tp, pp, pipeline_rank)
    draft_weights = _weights(draft, settings, settings.draft_tensor_parallel_size, 1, 0) if draft else ()
    adapters = lora_ops(model, settings, layers)
    libraries = library_ops(gpu, release, vocab_size=model.vocab_size, samples=last)
    communication = communication_ops(gpu, release, tp)
    context, others = (context_op(gpu),), _other_processes(settings)
    phases = _phases(model, gpu, settings, last)
    plan = graph_plan(settings.max_num_seqs, settings.max_num_batched_tokens, enforce_eager=settings.enforce_eager)
    estimate, text = _graphs(model, gpu, settings, len(layers), plan_sizes=plan.piecewise_sizes, count=plan.count)
    workspaces, warnings = attention_workspace(model, gpu, release, settings.max_num_seqs, tp)
    layout = kv_layout(model, settings, layers, draft)
    used = total((*weights, *draft_weights, *adapters))
    if release.engine == "sglang":
        # A share of what is free before loading: the context and communication come off first, the rest is left for activations.
        free = gpu.total_bytes - total((*context, *others, *communication))
        budget = math.floor(free * settings.gpu_memory_utilization)
    else:
        budget = math.ceil(gpu.total_bytes * settings.gpu_memory_utilization)
        used += total((*libraries, *communication))
        used += max(phase.bytes for phase in phases if phase.profiled)
        used += estimate if release.graphs_in_budget else 0
        used += total((*context, *others)) if release.context_in_budget else 0
    per_token = model.kv_bytes_per_token(settings.kv_cache_dtype, tp, layers=layers, dtype=settings.dtype)
    if draft is not None:
        per_token += draft.kv_bytes_per_token(
            settings.kv_cache_dtype, settings.draft_tensor_parallel_size, dtype=settings.dtype
        )
    return RankAccount(
        pipeline_rank=pipeline_rank,
        budget_bytes=budget,
        weights=weights,
        draft_weights=draft_weights,
        adapters=adapters,
        libraries=libraries,
        communication=communication,
        context=context,
        other_processes=others,
        phases=phases,
        graphs_estimate_bytes=estimate,
        graphs_bytes=round(estimate * ACTUAL_SHARE),
        graphs_text=text,
        workspaces=workspaces,
        buffers=_buffers(model, settings),
        used_bytes=used,
        kv_bytes_per_token=per_token,
        layout=layout,
        num_blocks=num_blocks(settings, budget - used, layout),
        warnings=tuple(warnings),
    )


def num_blocks(settings: Settings, left_bytes: int, layout: KvLayout) -> int:
    """Blocks of a pool that gets what the budget leaves, or what was ordered for it; negative when the budget is overdrawn."""
    ordered = settings.kv_cache_memory_bytes
    return (left_bytes if ordered is None else ordered) // layout.block_bytes


def free_at_start_bytes(gpu: Gpu, settings: Settings) -> int:
    """What the device has free when the engine looks first: all but other processes and the engine's own context."""
    return gpu.total_bytes - settings.other_processes_bytes - context_bytes(gpu)


def _weights(model: ModelShape, settings: Settings, tp: int, pp: int, pipeline_rank: int) -> tuple[Op, ...]:
    """Weights as allocated: every tensor rounded as the allocator does, and the table of rotary positions."""
    element = DTYPE_BYTES[settings.dtype]
    tensors = rank_weight_tensors(model, tp, pp, pipeline_rank)
    sizes = [tensor.stored_bytes(element, settings.weight_format) for tensor in tensors]
    rounding = sum(map(allocated_bytes, sizes)) - sum(sizes)
    form = settings.weight_format.name if settings.weight_format else settings.dtype
    width = model.rotary_dim or model.head_dim
    rotary = model.max_position_embeddings * width * element
    return (
        Op(
            name="matrices and vectors",
            requested_bytes=sum(sizes),
            formula=f"{len(sizes)} tensors of {form}",
            is_tensor=False,
        ),
        Op(name="allocator rounding", requested_bytes=rounding, formula="to 512 B or 2 MiB", is_tensor=False),
        Op(
            name="rotary table",
            requested_bytes=rotary,
            formula=f"{model.max_position_embeddings} positions x {width} x {element} B",
            is_tensor=False,
        ),
    )


def _other_processes(settings: Settings) -> tuple[Op, ...]:
    size = settings.other_processes_bytes
    return (Op(name="as given", requested_bytes=size, formula=f"{size} B", is_tensor=False),) if size else ()


def _phases(model: ModelShape, gpu: Gpu, settings: Settings, last: bool) -> tuple[Peak, ...]:
    tokens = settings.max_num_batched_tokens
    found = list(forward_peaks(model, gpu, settings, tokens=tokens, tuned=not settings.enforce_eager))
    encoder = encoder_peak(model, settings)
    if encoder is not None:
        found.append(encoder)
    found.append(decode_peak(model, gpu, settings))
    if last:
        found.append(logits_peak(model, gpu, settings, tokens=tokens))
        found.append(sampler_peak(model, gpu, settings, tokens=tokens))
        found.append(prompt_logprobs_peak(model, settings, tokens=tokens))
        verification = verification_peak(model, settings)
        if verification is not None:
            found.append(verification)
    return tuple(found)


def _graphs(
    model: ModelShape, gpu: Gpu, settings: Settings, layers: int, *, plan_sizes: tuple[int, ...], count: int
) -> tuple[int, str]:
    """The engine's own estimate of CUDA graphs."""
    if not count:
        return 0, "eager mode captures none"
    peaks = forward_peaks(model, gpu, settings, tokens=max(plan_sizes), tuned=False)
    widest = max(peaks, key=lambda peak: peak.bytes)
    tensors = total(op for op in widest.ops if op.name != "cuBLAS workspace")
    plan = graph_plan(settings.max_num_seqs, settings.max_num_batched_tokens, enforce_eager=False)
    estimate = estimated_graph_bytes(plan, layers, tensors)
    return estimate, f"{count} graphs x {layers} layers x 0.25 MiB + {tensors} B of the largest batch's tensors"


def _buffers(model: ModelShape, settings: Settings) -> tuple[Op, ...]:
    """Buffers made once before profiling, that no line of the engine's own account has. **Source:** vLLM V1 `GPUModelRunner`."""
    tokens, seqs = settings.max_num_batched_tokens, settings.max_num_seqs
    columns = -(-settings.max_model_len // settings.block_size)
    element = DTYPE_BYTES[settings.dtype]
    ops = [
        Op(
            name="block tables",
            requested_bytes=seqs * columns * 4,
            formula=f"{seqs} sequences x {columns} blocks x 4 B",
        ),
        # Token ids 4, positions 8, slot mapping 8.
        Op(name="token inputs", requested_bytes=tokens * 20, formula=f"{tokens} tokens x 20 B"),
        # Temperature, top-p, top-k, min-p, three penalties, lengths, starts and sampled tokens.
        Op(name="sampling parameters and outputs", requested_bytes=seqs * 48, formula=f"{seqs} sequences x 48 B"),
    ]
    if settings.pipeline_parallel_size > 1 or settings.encoder_tokens:
        ops.append(
            Op(
                name="embeddings or stage inputs",
                requested_bytes=tokens * model.hidden_size * element,
                formula=f"{tokens} tokens x {model.hidden_size} x {element} B",
            )
        )
    return tuple(ops)
