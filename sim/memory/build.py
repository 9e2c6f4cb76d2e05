"""Draws up the ledger of an engine from its configuration: settings resolved and checked, every rank accounted, blocks counted.

**Source:** vLLM V1 start-up profiling (`determine_available_memory`), releases 0.6 to 0.29; SGLang's `mem_fraction_static`.
"""

from __future__ import annotations

from sim.catalog.dtypes import kv_cache_dtype_name, weight_format
from sim.catalog.gpus import Gpu
from sim.catalog.gpus import gpu as gpu_named
from sim.catalog.models import model_shape
from sim.catalog.shape import ModelShape
from sim.core.config import ConfigError

from .account import RankAccount
from .cautions import cautions
from .defaults import default_utilization, step_defaults
from .fit import Fit, poorest, stage_accounts
from .ledger import Ledger, Stage
from .lines import ledger_lines
from .measured import MeasuredMemory
from .measured_account import measured_warnings, say_where_from, with_measured
from .ops import total
from .releases import DEFAULT_ENGINE_VERSION, engine_release, newer_than_known
from .settings import Settings


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
    gpu_memory_utilization: float | None = None,
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    num_gpu_blocks_override: int | None = None,
    kv_cache_memory_bytes: int | None = None,
    enable_chunked_prefill: bool | None = None,
    enforce_eager: bool = False,
    engine_version: str = DEFAULT_ENGINE_VERSION,
    speculative_model: ModelShape | str | None = None,
    draft_tensor_parallel_size: int = 1,
    num_speculative_tokens: int = 0,
    max_loras: int = 0,
    max_lora_rank: int = 16,
    encoder_tokens: int = 0,
    plain_attention: bool = False,
    other_processes_bytes: int = 0,
    watermark: float | None = None,
    measured: MeasuredMemory | None = None,
) -> Ledger:
    """The ledger of one engine, from its configuration alone. Settings have vLLM's names and meanings.

    `quantization="auto"` is how the model is published, None stores plain numbers. `max_model_len=None` is the model's own
    length, or what fits when that does not (vLLM refuses to start in that case unless it is -1; a warning says so). None elsewhere
    is the default of the release on that GPU. `num_speculative_tokens` without a `speculative_model` drafts from the prompt. Lines
    that were `measured` take the place of counted ones where they are of this model, device and format; a warning says so, or why not.

    Raises:
        ConfigError: the settings contradict each other, the model does not fit, or a request of `max_model_len` does
            not; the message has the numbers and what would be right.
    """
    shape = model_shape(model) if isinstance(model, str) else model
    device = gpu_named(gpu) if isinstance(gpu, str) else gpu
    draft = model_shape(speculative_model) if isinstance(speculative_model, str) else speculative_model
    release = engine_release(engine_version, device.compute_capability)
    warnings = [*shape.notes, *filter(None, [newer_than_known(engine_version)])]
    _check_shares(gpu_memory_utilization, watermark)
    _check_counts(
        1, block_size=block_size, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
        num_gpu_blocks_override=num_gpu_blocks_override, kv_cache_memory_bytes=kv_cache_memory_bytes, max_lora_rank=max_lora_rank,
    )  # fmt: skip
    _check_counts(
        0, num_speculative_tokens=num_speculative_tokens, max_loras=max_loras, encoder_tokens=encoder_tokens,
        other_processes_bytes=other_processes_bytes,
    )  # fmt: skip
    shape.check_parallel(tensor_parallel_size, pipeline_parallel_size)
    _check_draft(shape, draft, tensor_parallel_size, draft_tensor_parallel_size, num_speculative_tokens)
    if max_model_len is not None and not 1 <= max_model_len <= shape.max_position_embeddings:
        raise ConfigError(
            f"max_model_len is {max_model_len}; {shape.name} takes 1 to {shape.max_position_embeddings} tokens"
        )
    length = max_model_len or shape.max_position_embeddings
    limits = step_defaults(device, release, length, chunked_prefill=enable_chunked_prefill)
    batched = max_num_batched_tokens or limits.max_num_batched_tokens
    ranks = tensor_parallel_size * pipeline_parallel_size
    settings = Settings(
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        dtype=device.usable_dtype(shape.dtype, dtype, warnings),
        weight_format=weight_format(shape.quantization if quantization == "auto" else quantization),
        kv_cache_dtype=kv_cache_dtype_name(kv_cache_dtype),
        block_size=block_size,
        gpu_memory_utilization=gpu_memory_utilization or default_utilization(device, release, ranks, batched),
        max_model_len=length,
        max_num_seqs=max_num_seqs or min(limits.max_num_seqs, batched),
        max_num_batched_tokens=batched,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        enforce_eager=enforce_eager,
        release=release,
        draft=draft,
        draft_tensor_parallel_size=draft_tensor_parallel_size,
        num_speculative_tokens=num_speculative_tokens,
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
        encoder_tokens=encoder_tokens,
        plain_attention=plain_attention,
        other_processes_bytes=other_processes_bytes,
        watermark=release.watermark if watermark is None else watermark,
    )
    accounts = stage_accounts(shape, device, settings)
    unlike = None if measured is None else measured.mismatch(shape, device, settings)
    if measured is not None and unlike is not None:
        warnings.append(
            f"the memory lines of profile {measured.profile} are left out of the account: they were measured with {unlike}"
        )
        measured = None
    if measured is not None:
        accounts = tuple(with_measured(account, measured, settings) for account in accounts)
        warnings += measured_warnings(measured, settings)
    fit = Fit(model=shape, gpu=device, settings=settings, account=poorest(accounts))
    fit.check_free_memory()
    blocks = fit.blocks(num_gpu_blocks_override, length, warnings)
    length = fit.length(blocks, max_model_len, num_gpu_blocks_override is not None, warnings)
    warnings += cautions(fit)
    return _ledger(fit, accounts, engine_version, blocks, length, tuple(warnings), measured)


def _ledger(
    fit: Fit,
    accounts: tuple[RankAccount, ...],
    engine_version: str,
    blocks: int,
    length: int,
    warnings: tuple[str, ...],
    measured: MeasuredMemory | None,
) -> Ledger:
    """The finished account; every figure that follows from the blocks."""
    shape, device, settings, account = fit.model, fit.gpu, fit.settings, fit.account
    layout, in_flight, release = account.layout, fit.in_flight_tokens, settings.release
    concurrency = blocks / layout.request_blocks(length, in_flight)
    tokens = blocks * settings.block_size
    if layout.is_hybrid:
        smallest = min(group.block_size for group in layout.groups)
        by_groups = blocks // len(layout.groups) * smallest
        tokens = int(concurrency * length) if release.tokens_by_concurrency else by_groups
    lines = ledger_lines(device, settings, account, blocks)
    return Ledger(
        model=shape.name,
        gpu=device.name,
        engine=release.engine,
        engine_version=engine_version,
        tensor_parallel_size=settings.tensor_parallel_size,
        pipeline_parallel_size=settings.pipeline_parallel_size,
        pipeline_rank=account.pipeline_rank,
        total_bytes=device.total_bytes,
        budget_bytes=account.budget_bytes,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        lines=lines if measured is None else say_where_from(lines, measured, settings),
        phases=account.phases,
        stages=tuple(map(_stage, accounts)),
        layout=layout,
        num_gpu_blocks=blocks,
        block_size=settings.block_size,
        block_bytes=layout.block_bytes,
        kv_tokens=tokens,
        kv_bytes_per_token=account.kv_bytes_per_token,
        max_model_len=length,
        max_model_len_that_fits=fit.longest(blocks),
        max_concurrency=concurrency,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        settings=settings,
        in_flight_tokens=in_flight,
        warnings=warnings,
        measured=measured,
    )


def _stage(account: RankAccount) -> Stage:
    return Stage(
        pipeline_rank=account.pipeline_rank,
        weights_bytes=total((*account.weights, *account.draft_weights, *account.adapters)),
        non_torch_bytes=total((*account.libraries, *account.communication)),
        peak_activation_bytes=account.peak.bytes,
        num_blocks=account.num_blocks,
    )


def _check_shares(utilization: float | None, watermark: float | None) -> None:
    if utilization is not None and not 0.0 < utilization <= 1.0:
        raise ConfigError(
            f"gpu_memory_utilization is {utilization}; it is a share of the GPU's memory, above 0 and at most 1"
        )
    if watermark is not None and not 0.0 <= watermark < 1.0:
        raise ConfigError(f"watermark is {watermark}; it is a share of the pool, at least 0 and below 1")


def _check_counts(low: int, **counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and value < low:
            raise ConfigError(f"{name} is {value}; it must be at least {low}")


def _check_draft(shape: ModelShape, draft: ModelShape | None, tp: int, draft_tp: int, tokens: int) -> None:
    if draft is None:
        return
    if tokens < 1:
        raise ConfigError(
            f"speculative_model {draft.name} is given with num_speculative_tokens {tokens}; it must be at least 1"
        )
    if draft_tp not in (1, tp):
        raise ConfigError(
            f"draft_tensor_parallel_size is {draft_tp}; it is 1 or the target's tensor_parallel_size, {tp}"
        )
    draft.check_parallel(draft_tp, 1)
    if draft.vocab_size != shape.vocab_size:
        raise ConfigError(
            f"speculative_model {draft.name} has a vocabulary of {draft.vocab_size} and {shape.name} one of "
            f"{shape.vocab_size}; draft and target must share one"
        )
