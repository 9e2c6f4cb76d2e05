"""What changed between engine releases in how memory is measured and spent. Ledgers are only right for a release.

**Source:** the engines' own start-up code of the releases named (vLLM `Worker.determine_available_memory`, `memory_profiling`,
`_dummy_sampler_run`, `EngineArgs`; SGLang `ServerArgs`, `ModelRunner.profile_max_num_token`), and public start-up logs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from sim.core.config import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRelease:
    """The memory behaviour of an engine from one release on."""

    engine: str = "vllm"
    """`vllm` or `sglang`."""
    since: tuple[int, int, int]
    """First release, (major, minor, patch)."""
    sampler_bytes_per_logit: int
    """Bytes alive at the sampler's peak for one bfloat16 logit (one row, one vocabulary entry); 0 where no sampler is profiled."""
    sampler_kernel: bool = False
    """Top-k and top-p run in one Triton kernel: a row of fp32 for every multiprocessor, and a stack that the driver keeps."""
    moe_workspace_persists: bool = False
    """The mixture-of-experts workspace stays allocated after the forward pass, under the sampler's peak."""
    graphs_in_budget: bool = False
    """An estimate of CUDA graph memory is taken off the KV pool; else graphs are captured on top of the budget."""
    context_in_budget: bool = False
    """Everything that is in use on the device counts as the engine's: its CUDA context, and other processes."""
    compiled: bool = True
    """The forward pass is compiled: its first run tunes kernels with tensors alive."""
    hybrid_groups: bool = True
    """Sliding-window layers have block tables of their own, that give blocks back; else they keep every token."""
    tokens_by_concurrency: bool = False
    """A hybrid model's "GPU KV cache size" is maximum concurrency times max_model_len; else blocks a group times block size."""
    overlapped_steps: int = 1
    """Steps whose tokens a sliding window must keep at once (asynchronous scheduling plans one ahead)."""
    communication_counted: bool = True
    """Communication buffers are made after the base line, inside the budget; else before it (vLLM pull request 25359)."""
    sorts_below: tuple[int, int] = (0, 0)
    """Compute capability below which the sampler sorts (FlashInfer's sampler, in V0's images, needs 8.0)."""
    utilization: float = 0.9
    """Default of gpu_memory_utilization."""
    share_by_formula: bool = False
    """SGLang: mem_fraction_static follows from what the step's limits need; else from the number of ranks."""
    whole_prompts_up_to: int = 0
    """Chunked prefill is off by default for lengths up to this (V0)."""
    chunk_tokens: int | None = None
    """Default of max_num_batched_tokens with chunked prefill (V0); None is by GPU class."""
    seqs: int | None = None
    """Default of max_num_seqs; None is by GPU class."""
    watermark: float = 0.0
    """Share of the pool that admission keeps free."""


# Bytes a logit, counted tensor by tensor:
#   0.17 and later, a Triton top-k / top-p kernel in place: bf16 logits 2 + fp32 copy 4 + probabilities 4 + exponential
#   noise 4 = 14;
#   V1 before that, by sorting: bf16 logits 2 + fp32 copy 4 + sorted values 4 + sorted indices 8 + index input 8 +
#   radix-sort scratch 12 = 38;
#   V0 from 0.6.5, whose profile did not reach the sort: bf16 logits 2 + fp32 copy 4 = 6; before: bf16 logits only.
# Public figures: Qwen3-14B with 1,024 sequences 5.64 GiB at 0.15 and 0.16, 2.23 at 0.17; Llama-3.1-8B on V0 0.22 GiB at 0.7.3 and
# 0.06 at 0.6.4.
# Where the sampler sorts, V0 takes 38 too: 1.26 GiB (Llama-3-8B, H100 without FlashInfer), 1.45 (Qwen3-8B, RTX 2080 Ti).
# The base line: V0 counted everything in use until 0.6.5 (pull request 10511), V1 until 0.9.2 (18974).
_SORT_BYTES = 38
_V0 = EngineRelease(
    since=(0, 6, 5), sampler_bytes_per_logit=6, compiled=False, hybrid_groups=False, whole_prompts_up_to=32768,
    chunk_tokens=2048, seqs=256, watermark=0.01, sorts_below=(8, 0),
)  # fmt: skip
_V1 = EngineRelease(
    since=(0, 8, 0), sampler_bytes_per_logit=_SORT_BYTES, context_in_budget=True, hybrid_groups=False, seqs=1024
)
_V1_INCREMENTS = replace(_V1, since=(0, 9, 2), context_in_budget=False, seqs=None)
_TRITON = replace(
    _V1_INCREMENTS, since=(0, 17, 0), sampler_bytes_per_logit=14, sampler_kernel=True, moe_workspace_persists=True,
    communication_counted=True, hybrid_groups=True,
)  # fmt: skip
_VLLM = (
    replace(_TRITON, since=(0, 21, 0), graphs_in_budget=True, tokens_by_concurrency=True, overlapped_steps=2, utilization=0.92),
    _TRITON,
    replace(_V1_INCREMENTS, since=(0, 11, 0), hybrid_groups=True, communication_counted=False),
    replace(_V1_INCREMENTS, since=(0, 10, 0), hybrid_groups=True),
    _V1_INCREMENTS,
    replace(_V1, since=(0, 9, 0), seqs=None),
    _V1,
    _V0,
    replace(_V0, since=(0, 6, 0), sampler_bytes_per_logit=2, context_in_budget=True, chunk_tokens=512),
)  # fmt: skip
_LAST_V0 = (0, 10, 99)
"""V0 was removed in 0.11; until then `0.9-v0` names it."""

# SGLang sizes by a share of what is free before loading, and profiles nothing.
_SGLANG = EngineRelease(
    engine="sglang", since=(0, 4, 0), sampler_bytes_per_logit=14, compiled=False, hybrid_groups=False
)
_SGLANG_FORMULA = replace(_SGLANG, since=(0, 5, 0), share_by_formula=True)

DEFAULT_ENGINE_VERSION = "0.29"
"""The vLLM release whose behaviour is assumed unless another is named; nothing is known of later ones."""
_NEWEST_SGLANG = "0.5"
_VERSION = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?([.+a-z-].*)?")


def _engine_and_number(version: str) -> tuple[str, str]:
    text = version.strip().lower()
    engine = "sglang" if text.startswith("sglang") else "vllm"
    return engine, text.removeprefix("sglang").removeprefix("vllm").lstrip("-=@ ")


def newer_than_known(version: str) -> str | None:
    """A warning for a release later than the last one whose accounting is known; None for the others."""
    engine, text = _engine_and_number(version)
    newest = _NEWEST_SGLANG if engine == "sglang" else DEFAULT_ENGINE_VERSION
    match = _VERSION.fullmatch(text)
    major, minor = newest.split(".")
    if match is None or (int(match[1]), int(match[2])) <= (int(major), int(minor)):
        return None
    return f"engine version {version} is newer than {newest}, the last release whose accounting kvtwin knows: that one is followed"


def engine_release(version: str, compute_capability: tuple[int, int] = (9, 0)) -> EngineRelease:
    """The behaviour of a release on a GPU: vLLM as `0.19`, `0.19.1` or, for its first engine, `0.9-v0`; SGLang as `sglang-0.5`.

    From 0.8 to 0.10 vLLM falls back to V0 on GPUs below compute capability 8.0.

    Raises:
        ConfigError: not a version, or older than the first one whose accounting is known.
    """
    engine, text = _engine_and_number(version)
    if engine == "sglang" and not text:
        return _SGLANG_FORMULA
    match = _VERSION.fullmatch(text)
    if not match:
        raise ConfigError(
            f"engine version {version!r} is not a release: vLLM is written as 0.19 or {DEFAULT_ENGINE_VERSION} (its first engine as "
            "0.9-v0), SGLang as sglang-0.5"
        )
    number = (int(match[1]), int(match[2]), int(match[3] or 0))
    if engine == "sglang":
        if number < _SGLANG.since:
            raise ConfigError(
                f"engine version {version} is older than SGLang 0.4, the first whose pool sizing kvtwin knows"
            )
        return _SGLANG if number < _SGLANG_FORMULA.since else _SGLANG_FORMULA
    old = (match[4] or "").endswith("v0")
    if old and not _V0.since <= number <= _LAST_V0:
        raise ConfigError(f"engine version {version}: vLLM has its V0 engine from 0.6.5 to 0.10")
    if old or (compute_capability < (8, 0) and _V1.since <= number <= _LAST_V0):
        number = _V0.since
    for release in _VLLM:
        if number >= release.since:
            sorts = compute_capability < release.sorts_below
            return replace(release, sampler_bytes_per_logit=_SORT_BYTES) if sorts else release
    raise ConfigError(
        f"engine version {version} is older than 0.6, the first release whose memory accounting kvtwin knows"
    )
