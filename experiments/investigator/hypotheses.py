"""Every tensor that a request for memory could have been: as a product in which at most one factor is unknown.

Knows shapes and what engines compute with them; `arithmetic` judges which product explains a size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sim.catalog.models import MODELS
from sim.catalog.shape import ModelShape
from sim.catalog.weights import rank_weight_tensors

from .diagnosis import Cause, Phase
from .known import Known

_USUAL_ROWS = (256, 1024)
"""Defaults of max_num_seqs, by GPU."""
_USUAL_TOKENS = (2048, 8192, 16384)
"""Defaults of max_num_batched_tokens and of SGLang's chunk."""
_NAMED_SIZE = 0.06
"""A model called 32B has 31 to 34 billion parameters."""
_USUAL_HEADS = (8, 12, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """A tensor of `unknown` × `unit_bytes`, or of `unit_bytes` exactly."""

    cause: Cause
    """What it would mean."""
    detail: str
    """Name of the operation."""
    phase: Phase
    """Where this operation is, when nothing else says."""
    unit_bytes: float
    """Bytes a unit of the unknown factor."""
    unit_text: str
    """The known factors, for the evidence."""
    unknown: str = ""
    """What the free factor counts (`rows`, `tokens`); empty when nothing is free."""
    expected: tuple[tuple[int, str, float], ...] = ()
    """Values of the free factor that the settings or the engine's defaults name, where they come from, and how usual they are."""
    assumed_shape: bool = False
    """The model is not known: the shape is one of the catalogue."""


def hypotheses(known: Known, phase: Phase) -> Iterator[Hypothesis]:
    """All products worth trying. `phase` leaves out what cannot happen in it."""
    shapes = [known.shape] if known.shape else list(_distinct(known))
    assumed = known.shape is None
    if phase is not Phase.LOADING:
        yield from _logits(known, shapes, phase)
        for shape in shapes if not assumed else ():
            yield from _mlp(shape, known, phase)
    if phase in (Phase.LOADING, Phase.UNKNOWN, Phase.START_UP):
        for shape in shapes:
            yield from _weights(shape, known, assumed)


def of_the_size(known: Known) -> list[ModelShape]:
    """Models of the catalogue with about as many parameters as the text states; none where it states no number."""
    stated = known.num_parameters
    if stated is None:
        return []
    return [shape for shape in MODELS.values() if abs(shape.num_parameters - stated) <= _NAMED_SIZE * stated]


def _distinct(known: Known) -> Iterator[ModelShape]:
    """One shape for each pair of vocabulary and width that models of the catalogue have: of the stated size, if there are any."""
    seen = set()
    for shape in of_the_size(known) or MODELS.values():
        key = (shape.vocab_size, shape.hidden_size)
        if key not in seen and shape.vocab_size > 1000 and known.vocab_size in (None, shape.vocab_size):
            seen.add(key)
            yield shape


def _logits(known: Known, shapes: list[ModelShape], phase: Phase) -> Iterator[Hypothesis]:
    expected: list[tuple[int, str, float]] = []
    if known.max_num_seqs:
        expected.append((known.max_num_seqs, "max_num_seqs", 1.0))
    if known.max_num_batched_tokens:
        expected.append((known.max_num_batched_tokens, "max_num_batched_tokens", 0.9))
    for length in known.prompt_tokens:
        expected.append((length, "a stated prompt", 1.0))
        if known.batch_size:
            expected.append((known.batch_size * length, "batch size x a stated prompt", 1.0))
    if not known.max_num_seqs:
        expected += [(value, "a default of max_num_seqs", 0.85) for value in _USUAL_ROWS]
    if not known.max_num_batched_tokens:
        expected += [(value, "a default of the token budget", 0.7) for value in _USUAL_TOKENS]
    vocabularies = (
        {known.vocab_size} if known.vocab_size and not known.shape else {shape.vocab_size for shape in shapes}
    )
    assumed = known.vocabulary is None
    for vocabulary in sorted(size for size in vocabularies if size):
        for each, what in ((2, "logits in 16 bits"), (4, "logits in float32"), (12, "sampler's sort of the logits")):
            if each == 12 and assumed and not phase.is_start_up and not of_the_size(known):
                continue
            yield Hypothesis(
                cause=Cause.TRANSIENT_PEAK,
                detail=what,
                phase=Phase.SAMPLING,
                unit_bytes=vocabulary * each,
                unit_text=f"{vocabulary} vocabulary x {each} B",
                unknown="rows",
                expected=tuple(expected),
                assumed_shape=assumed,
            )


def _mlp(shape: ModelShape, known: Known, phase: Phase) -> Iterator[Hypothesis]:
    tokens: list[tuple[int, str, float]] = [(length, "a stated prompt", 1.0) for length in known.prompt_tokens]
    if known.max_num_batched_tokens:
        tokens.append((known.max_num_batched_tokens, "max_num_batched_tokens", 1.0))
    else:
        tokens += [(value, "a default of the token budget", 0.8) for value in _USUAL_TOKENS]
    if known.max_model_len and phase in (Phase.PROFILING, Phase.PREFILL):
        tokens.append((known.max_model_len, "max_model_len", 0.9))
    width = -(-shape.intermediate_size // known.tp)
    parts = [(1, "MLP product" if shape.gated_mlp else "MLP intermediate")]
    if shape.gated_mlp:
        parts.append((2, "MLP gate and up"))
    for factor, what in parts:
        yield Hypothesis(
            cause=Cause.TRANSIENT_PEAK,
            detail=what,
            phase=Phase.PREFILL,
            unit_bytes=factor * width * 2,
            unit_text=f"{factor * width} feed-forward x 2 B (TP {known.tp})",
            unknown="tokens",
            expected=tuple(tokens),
        )
    kind = shape.attention[0]
    if kind.is_mla:
        wide = kind.num_heads // known.tp * (kind.qk_head_dim + kind.v_head_dim)
        yield Hypothesis(
            cause=Cause.TRANSIENT_PEAK,
            detail="MLA up-projection",
            phase=Phase.PREFILL,
            unit_bytes=wide * 2,
            unit_text=f"{wide} key and value numbers x 2 B (TP {known.tp})",
            unknown="tokens",
            expected=tuple(tokens),
        )


def _weights(shape: ModelShape, known: Known, assumed: bool) -> Iterator[Hypothesis]:
    """Tensors of a model while it is loaded: fused ones, their unfused parts, and the embedding."""
    table = {"embedding": shape.vocab_size * shape.hidden_size}
    if not assumed:
        for tensor in rank_weight_tensors(shape, known.tp, 1, 0):
            if tensor.elements >= 1 << 20:
                table.setdefault(tensor.name, tensor.elements)
        table["gate or up"] = -(-shape.intermediate_size // known.tp) * shape.hidden_size
    done = set()
    for name, elements in table.items():
        for each in (1, 2, 4) if not assumed else (2, 4):
            if (elements, each) in done:
                continue
            done.add((elements, each))
            rows, rest = elements // shape.hidden_size, elements % shape.hidden_size
            product = f"{rows} x {shape.hidden_size}" if not rest else str(elements)
            yield Hypothesis(
                cause=Cause.WEIGHTS,
                detail=f"{name} of {shape.name}" if not assumed else f"{name} {product}",
                phase=Phase.LOADING,
                unit_bytes=elements * each,
                unit_text=f"{product} x {each} B",
                assumed_shape=assumed,
            )


def head_counts(known: Known) -> tuple[int, ...]:
    """Query heads of one rank: the model's, as stated, or those that models have."""
    if known.shape:
        return (max(1, known.shape.num_attention_heads // known.tp),)
    return (known.num_heads,) if known.num_heads else _USUAL_HEADS
