"""The rule that is left: everything is where it belongs, and the budget was too high by what was missing."""

from __future__ import annotations

from collections.abc import Iterator

from .case import Candidate, Case, Excluded, Verdict
from .diagnosis import Cause, Phase
from .sizes import MIB, show

_DRIVER_KEEPS = 256 * MIB
"""More than this free beyond what was tried is not the driver's granularity."""


def budget(case: Case) -> Iterator[Verdict]:
    """Everything is where it belongs and the GPU is simply full: the budget is too high by what was missing."""
    oom, missing, total = case.oom, case.shortage_bytes, case.total_bytes
    if oom is None or missing is None or oom.tried is None or oom.free is None:
        return
    if oom.allowed is not None and missing <= 0:
        sentence = (
            f"{oom.free} are free on the device, but the process may use only {oom.allowed}: a memory fraction is set"
        )
        yield Candidate(cause=Cause.BUDGET, score=0.85, detail="memory fraction", evidence=(sentence,))
        return
    if missing < -_DRIVER_KEEPS:
        sentence = (
            f"{oom.free} are free on the device, more than the {oom.tried} tried: a limit below the device's (a "
            f"private pool, a memory fraction), or memory that was given back just then"
        )
        yield Candidate(
            cause=Cause.BUDGET,
            score=0.4,
            detail="a limit below the device's",
            evidence=(sentence,),
            record=(
                "torch.cuda.get_per_process_memory_fraction, the memory pools in use, and what other processes did at that moment",
            ),
        )
        return
    if total is not None and oom.tried.bytes > total:
        yield Excluded(
            cause=Cause.BUDGET,
            why=f"{oom.tried} were tried, more than the GPU's {show(total)}: no share of it would do",
        )
        return
    rounding = oom.tried.half_bytes + oom.free.half_bytes
    if missing < -rounding:
        sentence = f"{oom.tried} were tried and {oom.free} free: the driver does not give out the last MiB of a device"
    elif missing <= rounding:
        sentence = (
            f"{oom.tried} were tried and {oom.free} free: the same within {show(rounding)} of rounding, a boundary case"
        )
    else:
        sentence = f"{oom.tried} were tried and {oom.free} free: {show(missing)} were missing"
    full = total is not None and (total - oom.free.bytes) / total >= 0.97
    evidence = [sentence]
    score, detail = 0.3, ""
    if full and total is not None:
        score = 0.45
        evidence.append(
            f"{(total - oom.free.bytes) / total:.1%} of {show(total)} is in use: the budget leaves no room for what comes on top of it"
        )
    if case.phase is Phase.LOADING:
        score = 0.15
    in_use = oom.in_use or oom.allocated
    util = case.known.gpu_memory_utilization
    if in_use is not None and total is not None and case.known.speculative:
        over = in_use.bytes - (util or 0.9) * total
        if over > max(0.0, missing):
            score, detail = 0.78, "draft model outside the account"
            share = f"{util:g}" if util else "0.9 (assumed)"
            evidence.append(
                f"speculative decoding is on, and {in_use} in use are {show(over)} above {share} of the GPU: the "
                f"draft model was not in the account"
            )
    phase, why = _when_full(case)
    yield Candidate(
        cause=Cause.BUDGET, score=score, detail=detail, evidence=tuple(evidence), phase=phase, phase_why=why
    )


def works_below(case: Case) -> Iterator[Verdict]:
    """A slightly smaller share works: then it fails at every start, by what is allocated when the pool has its share already.

    That are the CUDA graphs. Whether a step of serving fails depends on its requests, and nobody could say that a share works.
    """
    known, missing, total = case.known, case.shortage_bytes, case.total_bytes
    now, works = known.gpu_memory_utilization, known.works_at_utilization
    if missing is None or total is None or now is None or works is None or not 0 < now - works <= 0.1:
        return
    between = (now - works) * total
    if missing <= 0 or missing > between or case.phase not in (Phase.UNKNOWN, Phase.START_UP, Phase.GRAPH_CAPTURE):
        return
    if case.says(r"enforce[_-]eager(?:\s*=\s*|\s+)?(?:true|on|1)?\b(?! *= *False)"):
        return
    sentence = (
        f"{works:g} works and {now:g} does not: the {show(missing)} that were missing are less than the {show(between)} between "
        "them, at every start; CUDA graphs are captured when the pool has taken its share, and were estimated too small"
    )
    yield Candidate(cause=Cause.CUDA_GRAPHS, score=0.55, evidence=(sentence,), phase=Phase.GRAPH_CAPTURE)


def _when_full(case: Case) -> tuple[Phase, str]:
    """With at least three quarters of the GPU in tensors the KV pool is there: the engine was up. A guess, and said to be one."""
    oom, total = case.oom, case.total_bytes
    if oom is None or oom.allocated is None or total is None or oom.allocated.bytes < 0.75 * total:
        return Phase.UNKNOWN, ""
    return Phase.PREFILL, (
        f"{oom.allocated} of {show(total)} in tensors: the pool is there and the engine was up; of its steps a prefill "
        "needs most beside what start-up made"
    )
