"""Memory lines that were measured: what a calibrated profile says of the account, for one engine, model, format and device.

The account counts tensors from shapes and reads the rest off public logs of an engine's releases. A profile fitted to a run of
`kvtwin calibrate measure` knows instead what this executor took on this device. Its lines replace those of the account, each with
where it comes from and how far it may be off; what was not measured stays as the account has it.

    workspace of a step   widest of some phases, each affine in the step's sizes     (`STEP_TERMS`)
    buffers, reservation  widest of some phases, each affine in the engine's limits  (`LIMIT_TERMS`)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sim.catalog.gpus import Gpu
from sim.catalog.shape import ModelShape
from sim.core.batch_shape import BatchShape
from sim.core.need import blocks_for

from .graphs import graph_plan
from .ops import Op, Peak
from .settings import Settings

STEP_TERMS: dict[str, str] = {
    "constant_bytes": "whatever the step",
    "per_token_bytes": "hidden states, QKV, gate and up of a token",
    "per_row_bytes": "logits of a sampled row",
    "per_decode_bytes": "partial results of a decode that several programs share",
    "per_position_bytes": "gathered KV of the longest sequence, a token",
    "per_score_bytes": "a score of one tile of queries",
}
"""What a phase of a step's workspace is a sum of. The last two are what attention without a fused kernel writes out."""
LIMIT_TERMS: dict[str, str] = {
    "constant_bytes": "whatever the limits",
    "per_token_bytes": "max_num_batched_tokens",
    "per_seq_bytes": "max_num_seqs",
    "per_table_entry_bytes": "max_num_seqs x blocks of a sequence",
    "per_position_bytes": "max_model_len",
}
"""What bytes that are taken once, for the largest step that the limits allow, are a sum of."""
TILE = 64
"""Query tokens whose scores exist at once where they are written out."""
LIMITS = ("max_num_batched_tokens", "max_num_seqs", "max_model_len")
Phases = tuple[dict[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLine:
    """One line of the account as it was found."""

    bytes: int
    low_bytes: int | None
    """Lower end of its 95 % interval; None where one reading is all there is."""
    high_bytes: int | None
    how: str
    """How it was found, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMemory:
    """The memory lines of a profile, and what they hold for."""

    profile: str
    """Its name."""
    engine: str
    """What was measured: engine and release."""
    gpu: str
    """Name of the device in the catalogue."""
    model: str
    model_sizes: Mapping[str, Any]
    dtype: str
    kv_cache_dtype: str
    limits: Mapping[str, int]
    """The limits of the engine that was measured: the range of what follows from them."""
    lines: Mapping[str, MeasuredLine]
    """`weights`, `context`, `non_torch`, `cuda_graphs`: what does not follow from limits, as far as it was measured."""
    workspace: Phases
    """Phases of a step's workspace, by `STEP_TERMS`."""
    workspace_interval: tuple[float, float]
    """Where the true workspace of a step lies, 95 %: shares of the fitted one below and above, such as (-0.01, 0.02)."""
    buffers: Phases
    """Step buffers and tables, by `LIMIT_TERMS`."""
    buffers_error: float
    """Largest relative error of the fit to them."""
    reserved: Phases
    """The workspace that the engine reserves, by `LIMIT_TERMS`."""
    reserved_error: float

    def mismatch(self, model: ModelShape, gpu: Gpu, settings: Settings) -> str | None:
        """Why these lines say nothing of such an engine; None when they do."""
        sizes = {**{key: getattr(model, key, None) for key in self.model_sizes}}
        sizes["attention"] = [asdict(kind) for kind in model.attention]
        cache = settings.dtype if settings.kv_cache_dtype == "auto" else settings.kv_cache_dtype
        pairs = [
            ("model", self.model, self.model if sizes == dict(self.model_sizes) and model.moe is None else model.name),
            ("device", self.gpu, gpu.name),
            ("dtype", self.dtype, settings.dtype),
            ("KV cache", self.kv_cache_dtype, cache),
            ("ranks", 1, settings.tensor_parallel_size * settings.pipeline_parallel_size),
            ("weights", "plain", settings.weight_format.name if settings.weight_format else "plain"),
        ]
        found = [f"{what} {measured}, not {here}" for what, measured, here in pairs if measured != here]
        extras = {
            "a draft model": settings.num_speculative_tokens,
            "LoRA adapters": settings.max_loras,
            "a multimodal encoder": settings.encoder_tokens,
            "plain attention": settings.plain_attention,
        }
        found += [f"nothing with {what}" for what, there in extras.items() if there]
        if settings.release.engine != "vllm":
            found.append(f"a budget that is not {settings.release.engine}'s")
        return ", ".join(found) or None

    def beyond(self, settings: Settings) -> list[str]:
        """Limits that lie outside what was measured, in words."""
        return [
            f"{name} {getattr(settings, name):,} (measured up to {self.limits[name]:,})"
            for name in LIMITS
            if getattr(settings, name) > self.limits[name]
        ]

    def phases(self, shape: BatchShape) -> list[Peak]:
        """Every phase of a step, term by term; the widest is what it needs."""
        features = step_features(shape)
        return [
            Peak(
                phase=f"fitted phase {number}",
                profiled=True,
                ops=tuple(
                    Op(
                        name=f"{term.removesuffix('_bytes').replace('_', ' ')}: {STEP_TERMS[term]}",
                        requested_bytes=round(phase[term] * feature),
                        formula=f"{feature:,} x {phase[term]:.1f} B",
                        is_tensor=False,
                    )
                    for term, feature in zip(STEP_TERMS, features, strict=True)
                    if round(phase[term] * feature)
                ),
            )
            for number, phase in enumerate(self.workspace, start=1)
        ]

    def need_bytes(self, shape: BatchShape) -> int:
        """Workspace that a step needs."""
        features = step_features(shape)
        return max(
            sum(round(phase[term] * x) for term, x in zip(STEP_TERMS, features, strict=True))
            for phase in self.workspace
        )

    def interval(self, size: int) -> tuple[int, int]:
        """The 95 % interval of a fitted workspace of `size` bytes."""
        low, high = self.workspace_interval
        return round(size * (1 + low)), round(size * (1 + high))

    def graphs_bytes(self, settings: Settings) -> int | None:
        """What captured graphs take, in proportion to how many are captured; None where that was not measured."""
        line = self.lines.get("cuda_graphs")
        if line is None:
            return None
        count = _graphs(settings.max_num_seqs, settings.max_num_batched_tokens, eager=settings.enforce_eager)
        measured = _graphs(self.limits["max_num_seqs"], self.limits["max_num_batched_tokens"])
        return round(line.bytes * count / measured) if measured else 0


def step_features(shape: BatchShape) -> tuple[int, ...]:
    """What each of `STEP_TERMS` is multiplied with."""
    lengths = [(1, shape.decode_max_context_tokens)] if shape.decode_seqs else []
    lengths += [(min(tokens, TILE), tokens + context) for tokens, context in shape.prefill]
    positions = max((length for _, length in lengths), default=0)
    scores = max((queries * length for queries, length in lengths), default=0)
    return 1, shape.num_tokens, shape.sampled_seqs, shape.decode_seqs, positions, scores


def limit_features(tokens: int, seqs: int, longest: int, block_size: int) -> tuple[int, ...]:
    """What each of `LIMIT_TERMS` is multiplied with."""
    return 1, tokens, seqs, seqs * blocks_for(longest, block_size), longest


def at_limits(phases: Phases, settings: Settings) -> int:
    """Bytes taken once under the limits of `settings`."""
    features = limit_features(
        settings.max_num_batched_tokens,
        min(settings.max_num_seqs, settings.max_num_batched_tokens),
        settings.max_model_len,
        settings.block_size,
    )
    return round(max(sum(phase[term] * x for term, x in zip(LIMIT_TERMS, features, strict=True)) for phase in phases))


def widest_step(settings: Settings) -> BatchShape:
    """The step that needs most within the limits: all tokens, all sequences, every one of them as long as can be and sampled.

    As few sequences as possible compute the tokens that decodes leave, each the last chunk of a longest prompt.
    """
    longest, tokens = settings.max_model_len, settings.max_num_batched_tokens
    seqs = min(settings.max_num_seqs, tokens)
    chunks = max(1, -(-(tokens - seqs) // max(1, longest - 1)))
    decodes = max(0, seqs - chunks)
    left, prefill = tokens - decodes, []
    for _ in range(seqs - decodes):
        chunk = min(left, longest)
        prefill.append((chunk, longest - chunk))
        left -= chunk
    return BatchShape(
        prefill=tuple(prefill),
        decode_seqs=decodes,
        decode_context_tokens=decodes * longest,
        decode_max_context_tokens=longest if decodes else 0,
        sampled_seqs=seqs,
    )


def _graphs(seqs: int, tokens: int, *, eager: bool = False) -> int:
    """Decode batches that the executor captures."""
    return len(graph_plan(seqs, tokens, enforce_eager=eager).full_sizes)
