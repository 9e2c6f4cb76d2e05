"""Draws up the ledger of an engine from its configuration: settings resolved and checked, every rank accounted, blocks counted.

**Source:** vLLM V1 start-up profiling (`determine_available_memory`), releases 0.6 to 0.29.
"""

from __future__ import annotations

from sim.catalog.dtypes import kv_cache_dtype_name, weight_format
from sim.catalog.gpus import GIB, Gpu, default_budgets
from sim.catalog.gpus import gpu as gpu_named
from sim.catalog.models import model_shape
from sim.catalog.shape import ModelShape
from sim.core.config import ConfigError

from .account import RankAccount, Settings
from .fit import Fit, poorest_rank
from .ledger import Ledger, LedgerLine, blocks_for_tokens
from .releases import DEFAULT_ENGINE_VERSION, engine_release


def build_ledger(
    model: ModelShape | str,
    gpu: Gpu | str,
    *,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    dtype: str = "auto",
    quantization: str | None = "auto",
    kv_cache_dtype: str = "auto",
    block_size: int = 16,
    gpu_memory_utilization: float = 0.92,
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    num_gpu_blocks_override: int | None = None,
    kv_cache_memory_bytes: int | None = None,
    enable_chunked_prefill: bool = True,
    enforce_eager: bool = False,
    engine_version: str = DEFAULT_ENGINE_VERSION,
) -> Ledger:
    """The ledger of one engine, from its configuration alone. Settings have vLLM's names and meanings.

    `quantization="auto"` is how the model is published, None stores plain numbers. `max_model_len=None` is the model's own
    length, or what fits when that does not (vLLM refuses to start in that case unless it is -1; a warning says so).

    Raises:
        ConfigError: the settings contradict each other, the model does not fit, or a request of `max_model_len` does
            not; the message has the numbers and what would be right.
    """
    shape = model_shape(model) if isinstance(model, str) else model
    device = gpu_named(gpu) if isinstance(gpu, str) else gpu
    warnings = list(shape.notes)
    _check(gpu_memory_utilization)
    _check_counts(
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_gpu_blocks_override=num_gpu_blocks_override,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
    )
    shape.check_parallel(tensor_parallel_size, pipeline_parallel_size)
    if max_model_len is not None and not 1 <= max_model_len <= shape.max_position_embeddings:
        raise ConfigError(
            f"max_model_len is {max_model_len}; {shape.name} takes 1 to {shape.max_position_embeddings} tokens"
        )
    length = max_model_len or shape.max_position_embeddings
    budgets = default_budgets(device)
    batched = max_num_batched_tokens or (
        budgets.max_num_batched_tokens if enable_chunked_prefill else max(length, budgets.max_num_batched_tokens)
    )
    settings = Settings(
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        dtype=device.usable_dtype(shape.dtype, dtype, warnings),
        weight_format=weight_format(shape.quantization if quantization == "auto" else quantization),
        kv_cache_dtype=kv_cache_dtype_name(kv_cache_dtype),
        block_size=block_size,
        gpu_memory_utilization=gpu_memory_utilization,
        max_num_seqs=max_num_seqs or min(budgets.max_num_seqs, batched),
        max_num_batched_tokens=batched,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        enforce_eager=enforce_eager,
        release=engine_release(engine_version),
    )
    fit = Fit(model=shape, gpu=device, settings=settings, account=poorest_rank(shape, device, settings))
    blocks = fit.blocks(num_gpu_blocks_override, length, warnings)
    length = fit.length(blocks, max_model_len, num_gpu_blocks_override is not None, warnings)
    warnings += _cautions(fit)
    account = fit.account
    return Ledger(
        model=shape.name,
        gpu=device.name,
        engine_version=engine_version,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        total_bytes=device.total_bytes,
        budget_bytes=account.budget_bytes,
        lines=_lines(device, settings, account, blocks),
        num_gpu_blocks=blocks,
        block_size=block_size,
        kv_tokens=blocks * block_size,
        kv_bytes_per_token=account.kv_bytes_per_token,
        max_model_len=length,
        max_concurrency=blocks / blocks_for_tokens(length, block_size),
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        warnings=tuple(warnings),
    )


def _check(utilization: float) -> None:
    if not 0.0 < utilization <= 1.0:
        raise ConfigError(
            f"gpu_memory_utilization is {utilization}; it is a share of the GPU's memory, above 0 and at most 1"
        )


def _check_counts(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")


def _lines(device: Gpu, settings: Settings, account: RankAccount, blocks: int) -> tuple[LedgerLine, ...]:
    """Every line of the account; together exactly the physical total."""
    pool = blocks * account.block_bytes
    graphs_inside = settings.release.graphs_in_budget
    inside = (
        account.weights_bytes
        + account.non_torch_bytes
        + account.activation_bytes
        + pool
        + (account.graphs_bytes if graphs_inside else 0)
    )
    outside = account.outside_bytes - (0 if graphs_inside else account.graphs_bytes)
    spare = account.budget_bytes - inside
    lines = (
        (
            "outside_budget",
            outside,
            "total - ceil(gpu_memory_utilization * total)" + ("" if graphs_inside else " - cuda_graphs"),
            f"{device.total_bytes} B - {settings.gpu_memory_utilization:g} x {device.total_bytes} B",
        ),
        (
            "weights",
            account.weights_bytes,
            "sum over tensors of allocated(numbers * bytes) + rotary table",
            account.weights_text,
        ),
        (
            "non_torch",
            account.non_torch_bytes,
            "loaded kernels, library handles, communication buffers",
            account.non_torch_text,
        ),
        (
            "peak_activation",
            account.activation_bytes,
            "max(forward pass of max_num_batched_tokens, sampler of max_num_seqs)",
            account.activation_text,
        ),
        (
            "cuda_graphs",
            account.graphs_bytes,
            "graphs * layers * bytes a layer + tensors of the largest batch",
            account.graphs_text,
        ),
        (
            "kv_pool",
            pool,
            "blocks * block_size * KV bytes per token",
            f"{blocks} blocks x {settings.block_size} tokens x {account.kv_bytes_per_token} B",
        ),
        ("unused", spare, "budget - everything in it", f"{account.budget_bytes} B - {inside} B"),
    )
    outer = {"outside_budget"} if graphs_inside else {"outside_budget", "cuda_graphs"}
    return tuple(
        LedgerLine(name=name, bytes=size, formula=formula, numbers=numbers, inside_budget=name not in outer)
        for name, size, formula, numbers in lines
    )


def _cautions(fit: Fit) -> list[str]:
    """What a reader must know about the figures."""
    shape, device, settings, account = fit.model, fit.gpu, fit.settings, fit.account
    found = []
    form = settings.weight_format
    if form is not None and form.compute == "fp8" and device.fp8_flops_per_s is None:
        found.append(
            f"{device.name} has no fp8 matrix units: fp8 weights save memory, and are multiplied in {settings.dtype}"
        )
    if shape.has_window:
        every = shape.kv_bytes_per_token(settings.kv_cache_dtype)
        lasting = shape.kv_bytes_per_token(settings.kv_cache_dtype, windowed=False)
        found.append(
            f"{shape.name} has sliding-window layers, sized here as if they kept every token: {every} KV bytes a token "
            f"is an upper bound, in the long run it is {lasting}"
        )
    if account.graphs_bytes > account.outside_bytes and not settings.release.graphs_in_budget:
        found.append(
            f"CUDA graphs (about {account.graphs_bytes / GIB:.2f} GiB) are captured on top of the budget, and only "
            f"{account.outside_bytes / GIB:.2f} GiB lie outside it: capture may run out of memory; "
            "lower gpu_memory_utilization"
        )
    if "total_bytes" in device.unverified:
        found.append(f"the physical memory of {device.name}, {device.total_gib:.2f} GiB, is not confirmed by a log")
    return found
