"""Rules on the headroom of kvtwin's own memory curve: what grew until a step did not fit, or what the step itself needed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .case import Candidate, Case, Verdict
from .curve import Curve, Floats
from .diagnosis import Cause, Phase
from .fix_effects import ledger_with, line_bytes
from .sizes import MIB, show

_OPERATIONS = {
    "prefill": (Phase.PREFILL, "activations"),
    "decode": (Phase.DECODE, "activations"),
    "logits": (Phase.SAMPLING, "logits"),
    "sampler": (Phase.SAMPLING, "sampler"),
    "verification": (Phase.SAMPLING, "sampler: verification of drafts"),
    "prompt_logprobs": (Phase.SAMPLING, "prompt log-probabilities"),
}
"""By phase of the step: the phase of the failure, and the operation."""
_FALLBACK = 3.0
"""A prefill that needs so many times what the account has for its tokens writes out its scores."""
_ORDERED = 1.02
"""A pool of so many times the account's was ordered, not left over."""
_FULL = 0.02
"""Less of the pool free than this is a full pool."""


def headroom(case: Case) -> Iterator[Verdict]:
    """A step that did not fit: by what grew before it, by a pool beyond the budget, or by its own temporary tensors."""
    curve = case.curve
    left = None if curve is None else curve.lines.get("headroom")
    if curve is None or left is None:
        return
    if float(left.min()) >= 0:
        yield from _full_pool(curve)
        return
    at = int(np.argmin(left))
    missing = -float(left[at])
    step = curve.workspace_phases[at] if curve.workspace_phases else ""
    phase, operation = _OPERATIONS.get(step, (Phase.SERVING, step or "temporary tensors"))
    need = 0.0 if curve.workspace is None else float(curve.workspace[at])
    when, wanted = f"a step at {curve.time_s[at]:.3f} s", f"{show(need)} for temporary tensors ({operation})"
    missed = f"{when} needed {wanted}, {show(missing)} more than was left"
    grown = _grown(curve, at)
    cause, size = max(grown, key=lambda pair: pair[1], default=(Cause.UNKNOWN, 0.0))
    if size >= max(missing, MIB):
        sentence = f"until then {_WORDS[cause]} grew by {show(size)}"
        where = Phase.AFTER_RELEASE if cause is Cause.LEAK else phase
        yield Candidate(cause=cause, score=0.78, evidence=(missed, sentence), phase=where, effect_bytes=size)
        return
    yield from _from_the_start(case, curve, missing, missed, phase)
    yield from _by_account(case, curve, at, missed, phase)
    yield Candidate(
        cause=Cause.TRANSIENT_PEAK,
        score=0.66,
        detail=operation,
        evidence=(missed, "nothing else of the device had grown until then"),
        phase=phase,
    )


_WORDS = {
    Cause.OTHER_PROCESS: "other processes",
    Cause.NON_TORCH: "things of this process beside PyTorch",
    Cause.CUDA_GRAPHS: "the memory of CUDA graphs",
    Cause.FRAGMENTATION: "what is reserved and in no tensor",
    Cause.LEAK: "tensors beside the KV cache",
}


def _grown(curve: Curve, at: int) -> list[tuple[Cause, float]]:
    """By how much each line grew from the beginning to row `at`, in bytes."""
    lines = curve.lines

    def rise(values: Floats | None) -> float:
        return 0.0 if values is None else float(values[at] - values[0])

    graphs = rise(lines.get("cuda_graphs"))
    found = [
        (Cause.OTHER_PROCESS, rise(lines.get("other_processes"))),
        (Cause.NON_TORCH, rise(lines.get("non_torch"))),
        (Cause.CUDA_GRAPHS, graphs),
    ]
    if curve.reserved is not None:
        kept = np.maximum.accumulate(curve.workspace) if curve.workspace is not None else np.zeros_like(curve.allocated)
        found.append((Cause.FRAGMENTATION, rise(curve.reserved - curve.allocated - kept)))
    if "kv_used" in lines:
        found.append((Cause.LEAK, rise(curve.allocated - lines["kv_used"]) - graphs))
    return found


def _from_the_start(case: Case, curve: Curve, missing: float, missed: str, phase: Phase) -> Iterator[Verdict]:
    """Memory that was there when the curve begins, that the account of this engine does not have, and without which the step had fitted."""
    ledger = ledger_with(case)
    if ledger is None:
        return

    def beyond(held: float, *lines: str) -> float:
        return held - sum(line_bytes(ledger, line) or 0 for line in lines)

    found = []
    if (outside := curve.lines.get("non_torch")) is not None:
        found.append((Cause.NON_TORCH, beyond(float(outside[0]), "context", "non_torch", "communication")))
    if (used := curve.lines.get("kv_used")) is not None:
        needed = 0.0 if curve.workspace is None else float(curve.workspace[0])
        tensors = float(curve.allocated[0] - used[0]) - needed
        found.append((Cause.LEAK, beyond(tensors, *_LASTING)))
    for cause, size in found:
        if size >= max(missing, _SURELY_BEYOND):
            sentence = (
                f"{_WORDS[cause]} have {show(size)} more than the account does, from the beginning of the curve on"
            )
            yield Candidate(cause=cause, score=0.72, evidence=(missed, sentence), phase=phase, effect_bytes=size)


_LASTING = ("weights", "draft_weights", "lora", "cuda_graphs", "input_buffers", "fragmentation")
"""Lines of the account that are tensors which stay, beside the KV pool."""
_SURELY_BEYOND = 512 * MIB
"""More than the account errs by, line by line."""


def _by_account(case: Case, curve: Curve, at: int, missed: str, phase: Phase) -> Iterator[Verdict]:
    """What the account of this engine says of the pool, and of a prefill of so many tokens."""
    ledger = ledger_with(case)
    if ledger is None:
        return
    pool, ordered = line_bytes(ledger, "kv_pool"), curve.lines.get("kv_used")
    budgeted = case.known.gpu_memory_utilization is not None  # by a default the budget would only be guessed
    if budgeted and pool and ordered is not None and "kv_free" in curve.lines:
        held = float(ordered[at] + curve.lines["kv_free"][at])
        if held > _ORDERED * pool:
            sentence = (
                f"the pool has {show(held)}, the budget {show(pool)} by the account: the rest was ordered beyond it"
            )
            yield Candidate(
                cause=Cause.BUDGET, score=0.8, detail="pool ordered beyond it", evidence=(missed, sentence), phase=phase
            )
    tokens = curve.dimensions.get("prefill_tokens")
    if tokens is None or curve.workspace is None or phase is not Phase.PREFILL or tokens[at] <= 0:
        return
    peak = max((peak.bytes for peak in ledger.phases if peak.phase == "prefill"), default=0)
    expected = peak * float(tokens[at]) / ledger.max_num_batched_tokens
    need = float(curve.workspace[at])
    if expected and need > _FALLBACK * expected:
        times = need / expected
        sentence = f"the account has {show(expected)} for a prefill of {tokens[at]:,.0f} tokens; the step needed {times:.0f} times that"
        detail = "attention scores [heads, S, S] in memory"
        yield Candidate(
            cause=Cause.KERNEL_FALLBACK, score=0.75, detail=detail, evidence=(missed, sentence), phase=Phase.PREFILL
        )


def _full_pool(curve: Curve) -> Iterator[Verdict]:
    free, used = curve.lines.get("kv_free"), curve.lines.get("kv_used")
    if free is None or used is None:
        return
    whole = float(free[0] + used[0])
    least = float(free.min())
    if whole and least < _FULL * whole:
        sentence = f"no step missed memory, but the pool of {show(whole)} was full: at the worst {show(max(0.0, least))} of it were free"
        yield Candidate(
            cause=Cause.KV_CAPACITY, score=0.62, detail="preemption", evidence=(sentence,), phase=Phase.DECODE
        )
