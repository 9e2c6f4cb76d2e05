"""Defaults that an engine fills in from its release and the class of GPU.

**Source:** vLLM `EngineArgs`, usage context "API server"; SGLang `ServerArgs` (v0.5.17).
"""

from __future__ import annotations

from dataclasses import dataclass

from sim.catalog.gpus import GIB, Gpu, default_budgets

from .releases import EngineRelease


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDefaults:
    """Limits of a step where the user gave none."""

    max_num_batched_tokens: int
    """Most tokens in one step."""
    max_num_seqs: int
    """Most sequences in one step."""


def step_defaults(
    gpu: Gpu, release: EngineRelease, max_model_len: int, *, chunked_prefill: bool | None
) -> StepDefaults:
    """The limits of a step. `chunked_prefill=None` is the release's own choice for a model of that length.

    V0 runs whole prompts up to 32,768 tokens; a release that chunks takes the GPU class's budget.
    """
    if release.engine == "sglang":
        chunk, decode = _sglang_sizes(gpu)
        return StepDefaults(max_num_batched_tokens=chunk, max_num_seqs=decode)
    budgets = default_budgets(gpu)
    chunk = release.chunk_tokens or budgets.max_num_batched_tokens
    chunks = max_model_len > release.whole_prompts_up_to if chunked_prefill is None else chunked_prefill
    tokens = chunk if chunks else max(max_model_len, chunk if release.chunk_tokens is None else 2048)
    return StepDefaults(max_num_batched_tokens=tokens, max_num_seqs=min(release.seqs or budgets.max_num_seqs, tokens))


def default_utilization(gpu: Gpu, release: EngineRelease, ranks: int, max_num_batched_tokens: int) -> float:
    """vLLM's gpu_memory_utilization, or SGLang's mem_fraction_static.

    SGLang up to 0.4 goes by ranks: 0.88 for one, 0.87 for two, 0.85 for four, less for more. From 0.5 it sets aside, in MB, 512 for the
    context, 1.5 a token of a prefill chunk (at least 2,048), 128 a rank and 2 a captured batch size; at least 10 GiB on GPUs above
    60 GiB; and rounds the share of the rest to three digits.
    """
    if release.engine == "vllm":
        return release.utilization
    if not release.share_by_formula:
        return next(share for least, share in _SGLANG_SHARES if ranks >= least)
    total_mb = gpu.total_bytes / (1 << 20)
    _, decode = _sglang_sizes(gpu)
    reserved = 512 + 1.5 * max(max_num_batched_tokens, 2048) + 1024 * ranks / 8 + 2 * decode
    if total_mb > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    return round((total_mb - reserved) / total_mb, 3)


_SGLANG_SHARES = ((16, 0.79), (8, 0.81), (4, 0.85), (2, 0.87), (1, 0.88))


def _sglang_sizes(gpu: Gpu) -> tuple[int, int]:
    """Prefill chunk and largest captured decode batch by memory class."""
    gib = gpu.total_bytes / GIB
    for below, sizes in ((20, (2048, 8)), (35, (2048, 24)), (60, (4096, 32)), (160, (8192, 256))):
        if gib < below:
            return sizes
    return 16384, 512
