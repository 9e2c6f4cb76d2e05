"""Let every rule speak on a case, weigh what they say, and state what was ruled out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from . import (
    rules_account,
    rules_budget,
    rules_curve,
    rules_headroom,
    rules_message,
    rules_pool,
    rules_scheduler,
    rules_size,
    rules_snapshot,
    rules_text,
)
from .case import Candidate, Case, Excluded, Verdict
from .curve_fit import fit_dimensions
from .diagnosis import Cause, Diagnosis, FileVerdict, Phase
from .fixes import fixes_for
from .sizes import show

RULES: tuple[Callable[[Case], Iterator[Verdict]], ...] = (
    rules_message.fragmentation,
    rules_snapshot.by_replay,
    rules_snapshot.snapshot_state,
    rules_message.private_pools,
    rules_message.outside_torch,
    rules_message.other_process,
    rules_size.transient,
    rules_size.encoder,
    rules_size.weights,
    rules_pool.kv_pool,
    rules_size.graphs,
    rules_size.communication,
    rules_pool.released,
    rules_pool.said_to_grow,
    rules_text.failure_texts,
    rules_text.fixed_size,
    rules_text.fallback_names,
    rules_account.account,
    rules_account.ordered_pool,
    rules_scheduler.scheduler_lines,
    rules_scheduler.held_beyond_need,
    rules_scheduler.request_log,
    rules_curve.curve_rules,
    rules_headroom.headroom,
    rules_budget.works_below,
    rules_budget.budget,
)
"""In the order of thought; of equal scores the earlier rule is believed."""

_MOST_FILES = 20
LEAST_SCORE = 0.25
"""Below this nothing is claimed."""
_RECORD_MORE = (
    "the whole out-of-memory message: tried, total, free, in use, allocated, unallocated",
    "the log from start-up to the failure, with its traceback",
)


def judge(
    case: Case,
    notes: Sequence[str] = (),
    *,
    further: Sequence[tuple[str, Case]] = (),
    by_file: Sequence[tuple[str, Case]] = (),
) -> Diagnosis:
    """Weigh all verdicts on `case`, and on `further` files of kinds that it has one of already; `by_file` are judged alone too."""
    said = [(verdict, case) for rule in RULES for verdict in rule(case)]
    for name, more in further:
        spoken = (verdict for rule in RULES for verdict in rule(more))
        said += [(_from_file(verdict, name), more) for verdict in spoken if isinstance(verdict, Candidate)]
    said.sort(key=lambda pair: -pair[0].score if isinstance(pair[0], Candidate) else 1.0)
    candidates = [verdict for verdict, _ in said if isinstance(verdict, Candidate)]
    excluded = [verdict for verdict, _ in said if isinstance(verdict, Excluded)]
    alone = tuple(_alone(name, judge(one)) for name, one in by_file[:_MOST_FILES])
    if len(by_file) > _MOST_FILES:
        notes = (*notes, f"of {len(by_file)} files each alone the first {_MOST_FILES} are listed")
    if not candidates or candidates[0].score < LEAST_SCORE:
        return replace(_cannot_tell(case, candidates, excluded, notes), by_file=alone)
    best, owner = candidates[0], said[0][1]
    rivals = [other for other in candidates[1:] if other.cause is not best.cause]
    phase, phase_sentences = _phase(case, candidates)
    evidence = [*_facts(case), *best.evidence, *phase_sentences, *_measured(case)]
    for other in candidates[1:]:
        if other.cause is best.cause:
            evidence += [sentence for sentence in other.evidence if other.score >= 0.6]
    return Diagnosis(
        phase=phase,
        cause=best.cause,
        detail=best.detail,
        confidence=_confidence(best, rivals),
        evidence=tuple(dict.fromkeys(evidence)),
        ruled_out=_ruled_out(best, rivals, excluded),
        fixes=fixes_for(owner, best),
        next_to_record=_record(case, best, rivals),
        by_file=alone,
        notes=tuple(notes),
    )


def _from_file(verdict: Candidate, name: str) -> Candidate:
    """An explanation whose sentences name the file it rests on."""
    return replace(verdict, evidence=tuple(f"{name}: {sentence}" for sentence in verdict.evidence))


def _alone(name: str, found: Diagnosis) -> FileVerdict:
    return FileVerdict(file=name, phase=found.phase, cause=found.headline, confidence=found.confidence)


def _confidence(best: Candidate, rivals: Sequence[Candidate]) -> float:
    """The best score, less where another explanation is nearly as good."""
    rival = rivals[0].score if rivals else 0.0
    return best.score if rival < 0.6 * best.score else best.score * (1.0 - 0.3 * rival / best.score)


def _phase(case: Case, candidates: Sequence[Candidate]) -> tuple[Phase, tuple[str, ...]]:
    """What the text says, made finer by the cause; where it says nothing, what the best explanations with a phase suggest."""
    best = candidates[0]
    said = (case.mark.sentence,) if case.mark is not None and case.mark.phase is case.phase else ()
    if case.phase is Phase.UNKNOWN:
        telling = next((c for c in candidates if c.phase is not Phase.UNKNOWN and (c is best or c.score >= 0.4)), None)
        if telling is None:
            return Phase.UNKNOWN, ()
        return telling.phase, (
            f"phase {telling.phase}: nothing in the text says; a guess from the figures",
            *((telling.phase_why,) if telling.phase_why else telling.evidence[:1]),
        )
    finer = case.phase in (Phase.SERVING, Phase.START_UP) and best.phase.is_start_up == case.phase.is_start_up
    if finer and best.phase is not Phase.UNKNOWN and best.phase is not case.phase:
        return best.phase, (*said, f"phase {best.phase}: by the cause")
    return case.phase, said


def _facts(case: Case) -> list[str]:
    """The figures that every reader wants to see first."""
    facts = []
    oom = case.oom
    if oom is not None:
        where = (
            f"{oom.device} out-of-memory message, line {oom.line}"
            if oom.line
            else "the failure in the snapshot's history"
        )
        parts = (
            ("tried", oom.tried),
            ("total", oom.total),
            ("free", oom.free),
            ("in use", oom.in_use),
            ("allocated", oom.allocated),
            ("private pools", oom.private_pools),
            ("unallocated", oom.unallocated),
        )
        facts.append(f"{where}: " + ", ".join(f"{name} {size}" for name, size in parts if size))
        if case.num_messages > 1:
            facts.append(f"{case.num_messages} such messages; the first is judged, later ones usually follow from it")
    if case.log is not None and case.log.sentence:
        facts.append(case.log.sentence)
    return facts


def _measured(case: Case) -> list[str]:
    """What was read or computed beside that: the load, which dimension memory follows, and other settings of the allocator."""
    facts, oom = [], case.oom
    if case.load is not None and (oom is not None or case.failures):
        facts.append(case.load.sentence)
    if case.curve is not None:
        facts += [fit.sentence for fit in fit_dimensions(case.curve)]
    if case.allocator is not None:
        facts += case.allocator.sentences if case.allocator.tried_bytes is not None else (case.allocator.check,)
    return facts


def _ruled_out(best: Candidate, rivals: Sequence[Candidate], excluded: Sequence[Excluded]) -> tuple[str, ...]:
    out = [f"{verdict.cause}: {verdict.why}" for verdict in excluded if verdict.cause is not best.cause]
    seen = {best.cause}
    for rival in rivals:
        if rival.cause not in seen:
            seen.add(rival.cause)
            why = rival.evidence[-1] if rival.evidence else ""
            out.append(f"{rival.cause}: less likely ({rival.score:.2f}); {why}")
    return tuple(dict.fromkeys(out))


def _record(case: Case, best: Candidate, rivals: Sequence[Candidate]) -> tuple[str, ...]:
    close = [rival for rival in rivals if rival.score >= 0.6 * best.score]
    wanted = [*best.record, *(text for rival in close for text in rival.record)]
    if _confidence(best, rivals) < 0.7 and case.mark is None and case.curve is None:
        wanted.append("the log before the failure and its traceback: they name the phase")
    if case.oom is not None and case.known.shape is None:
        wanted.append("the model's config.json (--model): with its shape the size names the tensor")
    if not wanted and _confidence(best, rivals) < 0.6:
        wanted += _RECORD_MORE
    return tuple(dict.fromkeys(wanted))


def _cannot_tell(
    case: Case, candidates: Sequence[Candidate], excluded: Sequence[Excluded], notes: Sequence[str]
) -> Diagnosis:
    facts = [*_facts(case), *_measured(case)]
    for failure in case.failures:
        facts.append(f"line {failure.line}: “{failure.text}”: {failure.kind.meaning}")
    if case.curve is not None and case.curve_facts is not None and case.curve_facts.line is not None:
        line = case.curve_facts.line
        facts.append(
            f"memory = {show(line.base)} + {line.per_unit:,.0f} B a {line.unit} (R² {line.r2:.3f}); nothing in the "
            f"curve is out of the ordinary"
        )
    if not facts:
        facts.append(
            "memory is said to have run out, but there are no figures"
            if case.speaks_of_oom
            else "there is no memory failure in this that kvtwin knows"
        )
    if case.mark is not None:
        facts.append(case.mark.sentence)
    ruled_out = [f"{verdict.cause}: {verdict.why}" for verdict in excluded]
    return Diagnosis(
        phase=case.phase,
        cause=Cause.UNKNOWN,
        confidence=0.0,
        evidence=tuple(facts),
        ruled_out=tuple(dict.fromkeys(ruled_out)),
        next_to_record=_RECORD_MORE,
        notes=tuple(notes),
    )
