"""Rules on memory curves: slope against the ledger's KV bytes per token, base lines, lags, and what only the allocator holds."""

from __future__ import annotations

from collections.abc import Iterator

from .case import Candidate, Case, Excluded, Verdict
from .curve import Curve
from .curve_facts import CurveFacts, Line
from .curve_fit import beams_of, fit_dimensions
from .diagnosis import Cause, Phase
from .sizes import GIB, MIB, show

_WORDS_OF_PHASES = {
    "load": Phase.LOADING,
    "profil": Phase.PROFILING,
    "capture": Phase.GRAPH_CAPTURE,
    "graph": Phase.GRAPH_CAPTURE,
    "warm": Phase.SAMPLER_WARM_UP,
    "prefill": Phase.PREFILL,
    "decod": Phase.DECODE,
    "sampl": Phase.SAMPLING,
    "commun": Phase.COMMUNICATION,
    "start": Phase.START_UP,
    "release": Phase.AFTER_RELEASE,
    "idle": Phase.AFTER_RELEASE,
}


def phase_word(word: str) -> Phase:
    """The phase a curve's own word stands for."""
    lowered = word.lower()
    return next((phase for stem, phase in _WORDS_OF_PHASES.items() if stem in lowered), Phase.UNKNOWN)


def curve_rules(case: Case) -> Iterator[Verdict]:
    """Everything a curve can say."""
    curve, facts = case.curve, case.curve_facts
    if curve is None or facts is None:
        return
    yield from _base_line(curve, facts)
    yield from _beams(curve) if beams_of(curve) is not None else _slope(case, facts)
    yield from _lag(facts)
    yield from _allocator(curve, facts)
    yield from _full(case, curve, facts)


def _base_line(curve: Curve, facts: CurveFacts) -> Iterator[Verdict]:
    """After work the memory should come back to where it was."""
    first, last, start = facts.idle_first, facts.idle_last, facts.idle_start
    if last is None or first is None:
        return
    # The first work of all makes things that stay (workspaces, caches): a leak rises again after it.
    rise = last - first if facts.idle_stretches >= 2 else (last - start if start is not None else 0.0)
    span = float(curve.allocated.max() - curve.allocated.min()) or 1.0
    least = max(3 * facts.idle_noise, 0.01 * span, 1 * MIB)
    stretches = (
        f"idle base line over {facts.idle_stretches} stretches after work: {show(first)} first, {show(last)} last"
    )
    if rise > least:
        sure = 0.88 if facts.idle_stretches >= 3 else 0.7 if facts.idle_stretches == 2 else 0.45
        pace = f"{show(rise / max(1, facts.idle_stretches - 1))} more after each"
        yield Candidate(
            cause=Cause.LEAK,
            score=sure,
            evidence=(stretches, pace),
            effect_bytes=rise,
            phase=Phase.AFTER_RELEASE,
            record=("a memory snapshot in two idle moments: group what is new by its stack",),
        )
        yield Excluded(cause=Cause.DOUBLE_RELEASE, why=f"the base line rises by {show(rise)}; it would fall")
    elif start is not None and start - last > max(least, 0.02 * span):
        sentence = f"idle memory fell below where it began: {show(start)} before any work, {show(last)} last"
        yield Candidate(cause=Cause.DOUBLE_RELEASE, score=0.7, evidence=(sentence,), phase=Phase.AFTER_RELEASE)
    else:
        yield Excluded(cause=Cause.LEAK, why=f"{stretches}: it does not rise")


def _slope(case: Case, facts: CurveFacts) -> Iterator[Verdict]:
    """Bytes a token against the ledger's."""
    line, expected = facts.line, case.known.kv_bytes_per_token
    if line is None or line.r2 < 0.5 or line.per_unit <= 0 or line.unit != "token" or not expected:
        return
    ratio = line.per_unit / expected
    shown = (
        f"allocated = {show(line.base)} + {line.per_unit:,.0f} ± {2 * line.error:,.0f} B a token"
        f"{_per_sequence(line)} (R² {line.r2:.3f}); the ledger has {expected:,} B: ratio {ratio:.2f}"
    )
    whole = round(ratio)
    waste = line.per_sequence / expected
    block = case.known.block_size or 16
    if whole >= 2 and abs(ratio - whole) <= 0.1 * whole:
        yield Candidate(
            cause=Cause.KV_DUPLICATION,
            score=0.85,
            detail=f"{whole} copies",
            evidence=(shown, f"{whole} times the KV of a token is held"),
            phase=Phase.DECODE,
        )
    elif waste > 4 * block:
        sentence = (
            f"each sequence costs {show(line.per_sequence)} beside its tokens, the KV of {waste:,.0f} tokens; a "
            f"last block of {block} wastes half of {block}"
        )
        yield Candidate(cause=Cause.BLOCK_USE, score=0.75, evidence=(shown, sentence), phase=Phase.DECODE)
    elif ratio > 1.1:
        yield Candidate(
            cause=Cause.BLOCK_USE,
            score=0.6,
            evidence=(shown, f"{(1 - 1 / ratio):.0%} of the KV memory holds no token"),
            phase=Phase.DECODE,
        )
    elif ratio >= 0.9:
        for cause in (Cause.KV_DUPLICATION, Cause.BLOCK_USE):
            yield Excluded(cause=cause, why=shown)


def _beams(curve: Curve) -> Iterator[Verdict]:
    """Whether the beams of a request share the keys and values that they have in common, or keep a copy each."""
    fit = next(iter(fit_dimensions(curve)), None)
    token = fit.per_unit("tokens") if fit is not None else None
    if fit is None or token is None or token <= 0:
        return
    copied = (fit.per_unit("tokens of further beams") or 0.0) / token
    if copied >= 0.5:
        sentence = f"each beam beyond the first holds {copied:.0%} of the KV of its request again"
        yield Candidate(
            cause=Cause.KV_DUPLICATION,
            score=0.85,
            detail="a copy for each beam",
            evidence=(fit.sentence, sentence),
            phase=Phase.DECODE,
        )
    else:
        yield Excluded(
            cause=Cause.KV_DUPLICATION,
            why=f"{fit.sentence}: a further beam holds {copied:.0%} of its request's KV again",
        )


def _per_sequence(line: Line) -> str:
    return f" + {show(line.per_sequence)} a sequence" if line.per_sequence else ""


def _lag(facts: CurveFacts) -> Iterator[Verdict]:
    line = facts.line
    if line is None or facts.lag_s <= 0 or facts.lag_gain < 0.6 or line.r2 > 0.995:
        return
    sentence = (
        f"memory follows the highest load of the last {facts.lag_s:g} s, not the load: that explains "
        f"{facts.lag_gain:.0%} of what a line leaves over"
    )
    yield Candidate(
        cause=Cause.LATE_RELEASE,
        score=0.55 + 0.3 * facts.lag_gain,
        detail=f"{facts.lag_s:g} s after the load falls",
        evidence=(sentence,),
        phase=Phase.AFTER_RELEASE,
        record=("the moment each request ends and the moment its blocks come back",),
    )


def _allocator(curve: Curve, facts: CurveFacts) -> Iterator[Verdict]:
    """Reserved and in-use memory beside allocated memory."""
    growth, gap = facts.unallocated_growth, facts.unallocated_last
    if growth is not None and gap is not None:
        size = float(curve.allocated.max())
        if gap > max(0.25 * size, 256 * MIB) and growth > 2 * max(0.0, facts.allocated_growth):
            sentence = (
                f"reserved less allocated grew by {show(growth)} to {show(gap)}, while allocated changed by "
                f"{show(facts.allocated_growth)}: the memory is cached, not used"
            )
            yield Candidate(cause=Cause.RESERVED_ONLY, score=0.72, evidence=(sentence,), phase=Phase.AFTER_RELEASE)
        else:
            yield Excluded(cause=Cause.RESERVED_ONLY, why=f"reserved exceeds allocated by {show(gap)} at the end")
    if facts.non_torch_growth is not None:
        if facts.non_torch_growth > max(256 * MIB, abs(facts.allocated_growth)):
            sentence = f"in use less reserved grew by {show(facts.non_torch_growth)}, allocated by {show(facts.allocated_growth)}"
            yield Candidate(cause=Cause.NON_TORCH, score=0.78, evidence=(sentence,), phase=Phase.SERVING)
        else:
            yield Excluded(cause=Cause.NON_TORCH, why=f"in use less reserved changed by {show(facts.non_torch_growth)}")


def _full(case: Case, curve: Curve, facts: CurveFacts) -> Iterator[Verdict]:
    """The curve reached the end of the GPU: by what its load explains, or by a spike above it."""
    total = case.total_bytes
    held = (
        curve.in_use if curve.in_use is not None else curve.reserved if curve.reserved is not None else curve.allocated
    )
    top = float(held.max())
    if total is None or top < 0.95 * total:
        return
    reached = f"{show(top)} of {show(total)} were held at most"
    span = float(curve.allocated.max() - curve.allocated.min()) or 1.0
    where = phase_word(facts.spike_phase)
    if facts.spike > 0.4 * span and (facts.line is None or facts.line.r2 < 0.9):
        sentence = f"the highest point lies {show(facts.spike)} above what the load explains" + (
            f", in phase {facts.spike_phase}" if facts.spike_phase else ""
        )
        yield Candidate(cause=Cause.TRANSIENT_PEAK, score=0.7, evidence=(reached, sentence), phase=where)
    elif facts.line is not None and facts.line.r2 > 0.8 and facts.line.per_unit > 0:
        sentence = (
            f"memory follows the load ({facts.line.per_unit:,.0f} B a {facts.line.unit}, R² {facts.line.r2:.3f}): "
            f"the load was more than fits"
        )
        yield Candidate(
            cause=Cause.KV_CAPACITY, score=0.72, evidence=(reached, sentence), phase=phase_word(facts.last_phase)
        )
    elif top > 0.97 * total and span < 0.05 * GIB:
        yield Candidate(
            cause=Cause.BUDGET, score=0.5, evidence=(reached, "it was that full all the time"), phase=Phase.SERVING
        )
