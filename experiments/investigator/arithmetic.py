"""Which product explains a size: matches, and how likely each is to be chance.

A free factor always fits: some number of rows times the vocabulary comes close to any size. What counts is whether it comes
to a number that means something — a setting, a default, a power of two. The chance that this happens by accident is the
relative width of the size's interval (2 MiB of segment rounding, half a printed digit) over the room such numbers leave,
added up over everything that was tried. A match is believed as far as it stands out from that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .diagnosis import Cause, Phase
from .hypotheses import Hypothesis, head_counts, hypotheses, of_the_size
from .known import Known
from .sizes import GIB, MIB, Size, show, tensor_interval

_PRIOR = 0.5
"""Of requests for more than 20 MiB, the share that is one of the products tried."""
_DECADES = math.log(8 * GIB / (20 * MIB))
"""Natural logarithm of the range over which such sizes are spread."""
_TRUST_IN_ASSUMED = 0.6
"""Weight of a match whose shape was taken from the catalogue, because the model is not known."""
_TRUST_IN_THE_SIZE = 0.85
"""The same where the text says how many parameters the model has, and the shape is one of so many."""
_NEAR_PROMPT = 0.05
"""A prompt is stated roughly ("about 27k tokens")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A product that comes to the size."""

    cause: Cause
    detail: str
    phase: Phase
    text: str
    """The product with its numbers, e.g. `1024 rows x 201088 vocabulary x 4 B = 785.50 MiB`."""
    believed: float
    """0 to 1: how far it stands out from chance."""
    value: int | None = None
    """The free factor."""


def matches(tried: Size, known: Known, phase: Phase) -> tuple[Match, ...]:
    """The products that explain `tried`, best first. Nothing is said about requests of up to 20 MiB: too many fit."""
    low, high = tensor_interval(tried)
    if high <= 20 * MIB:
        return ()
    width = math.log(high / max(low, 1.0))
    assumed = _TRUST_IN_THE_SIZE if of_the_size(known) else _TRUST_IN_ASSUMED
    found: list[tuple[float, Match]] = []
    chance = 0.0
    for hypothesis in hypotheses(known, phase):
        chance += _accident(hypothesis, width)
        match = _try(hypothesis, low, high)
        if match is not None:
            trust = assumed if hypothesis.assumed_shape else 1.0
            found.append((trust * match[0], match[1]))
    square = _square(low, high, known, phase)
    if square is not None:
        chance += square[2]
        found.append(square[:2])
    judged = [replace(match, believed=min(0.95, weight * _PRIOR / (_PRIOR + chance))) for weight, match in found]
    return tuple(sorted(judged, key=lambda match: -match.believed))


def _accident(hypothesis: Hypothesis, width: float) -> float:
    """Chance that a size unrelated to the hypothesis matches it."""
    targets = len(hypothesis.expected) + 4 if hypothesis.unknown else 1
    return min(1.0, targets * width / _DECADES) * (0.25 if hypothesis.unknown and not hypothesis.expected else 1.0)


def _try(hypothesis: Hypothesis, low: float, high: float) -> tuple[float, Match] | None:
    if not hypothesis.unknown:
        size = hypothesis.unit_bytes
        return (0.95, _match(hypothesis, None, "", size)) if low < size <= high else None
    first, last = low / hypothesis.unit_bytes, high / hypothesis.unit_bytes
    for value, where, weight in sorted(hypothesis.expected, key=lambda entry: -entry[2]):
        if first < value <= last:
            return weight, _match(hypothesis, value, where, value * hypothesis.unit_bytes)
    power = 1 << max(0, math.floor(math.log2(max(last, 1.0))))
    if first < power <= last and power >= 32:
        return 0.6, _match(hypothesis, power, "a power of two", power * hypothesis.unit_bytes)
    return None


def _match(hypothesis: Hypothesis, value: int | None, where: str, size: float) -> Match:
    text = (
        f"{hypothesis.unit_text} = {show(size)}"
        if value is None
        else f"{value} {hypothesis.unknown} x {hypothesis.unit_text} = {show(size)} ({where})"
    )
    return Match(
        cause=hypothesis.cause, detail=hypothesis.detail, phase=hypothesis.phase, text=text, believed=0.0, value=value
    )


def _square(low: float, high: float, known: Known, phase: Phase) -> tuple[float, Match, float] | None:
    """Scores of plain attention, `sequences x heads x S^2 x bytes`, when √ comes to a prompt that is stated."""
    if phase.is_start_up and phase is not Phase.PROFILING:
        return None
    found: list[tuple[float, Match, float]] = []
    lengths = [
        *known.prompt_tokens,
        *([known.max_model_len] if known.max_model_len and phase is Phase.PROFILING else []),
    ]
    for heads in head_counts(known):
        for sequences in dict.fromkeys((known.batch_size or 1, 1)):
            for each in (2, 4):
                side = math.sqrt(high / (heads * sequences * each))
                side_low = math.sqrt(max(low, 1.0) / (heads * sequences * each))
                for length in lengths:
                    exact = side_low < length <= side
                    if not exact and abs(side - length) > _NEAR_PROMPT * length:
                        continue
                    whole = length if exact else math.floor(side)
                    size = heads * sequences * each * whole * whole
                    text = f"{sequences} sequences x {heads} heads x {whole}^2 x {each} B = {show(size)}, the prompt is {length} tokens"
                    detail = "attention scores [heads, S, S] in memory"
                    match = Match(
                        cause=Cause.KERNEL_FALLBACK,
                        detail=detail,
                        phase=Phase.PREFILL,
                        text=text,
                        believed=0.0,
                        value=whole,
                    )
                    found.append((1.0 if exact else 0.8, match, 0.0 if known.shape or known.num_heads else 0.01))
    return max(found, key=lambda entry: entry[0], default=None)
