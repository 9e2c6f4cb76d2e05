"""Rules on failure texts that are not PyTorch's."""

from __future__ import annotations

from collections.abc import Iterator

from .case import Candidate, Case, Excluded, Verdict
from .diagnosis import Cause, Phase
from .failures import Failure
from .sizes import GIB, show


def failure_texts(case: Case) -> Iterator[Verdict]:
    """Each known failure text, with its numbers."""
    for failure in case.failures:
        quote = f"line {failure.line}: “{failure.text}”: {failure.kind.meaning}"
        special = _SPECIAL.get(failure.kind.name)
        if special is not None:
            yield from special(case, failure, quote)
        elif failure.kind.cause is not Cause.UNKNOWN:
            kind = failure.kind
            cause, detail, score = kind.cause, kind.detail, kind.score
            if kind.name == "CUDA error" and case.phase is Phase.GRAPH_CAPTURE:
                cause, detail, score = Cause.CUDA_GRAPHS, "", 0.75
            yield Candidate(
                cause=cause, score=score, detail=detail, evidence=(quote, *_numbers(failure)), phase=kind.phase
            )


def _numbers(failure: Failure) -> tuple[str, ...]:
    numbers = failure.numbers
    if failure.kind.name == "workspace overflow":
        gap = numbers["needed"] - numbers["available"]
        return (f"{show(numbers['needed'])} needed, {show(numbers['available'])} there: {show(gap)} missing",)
    if failure.kind.name == "one request does not fit" and "needed" in numbers:
        gap = numbers["needed"] - numbers["available"]
        fits = f"; {numbers['fits']:.0f} tokens would fit" if "fits" in numbers else ""
        return (
            f"{numbers['length']:.0f} tokens need {numbers['needed']:g} GiB, the pool has {numbers['available']:g}: "
            f"{gap:.2f} GiB missing{fits}",
        )
    return ()


def _books(case: Case, failure: Failure, quote: str) -> Iterator[Verdict]:
    """Total against available + evictable + protected, while nothing runs."""
    numbers = failure.numbers
    if "available" not in numbers:
        yield Candidate(cause=Cause.LEAK, score=0.5, evidence=(quote,), phase=Phase.AFTER_RELEASE)
        return
    parts = {
        name: numbers.get(name, 0.0) for name in ("available", "evictable", "protected", "held") if name in numbers
    }
    missing = int(numbers["total"] - sum(parts.values()))
    sum_ = " + ".join(f"{value:.0f} {name}" for name, value in parts.items())
    if missing > 0:
        sentence = (
            f"{sum_} = {sum(parts.values()):.0f}, {missing} less than the total of {numbers['total']:.0f}: "
            f"{missing} slots are missing"
        )
        yield Candidate(
            cause=Cause.LEAK,
            score=0.95,
            detail=f"{missing} slots missing",
            evidence=(quote, sentence),
            phase=Phase.AFTER_RELEASE,
            record=("which request held the missing slots last: log allocations and releases with their request",),
        )
        yield Excluded(cause=Cause.DOUBLE_RELEASE, why="a double release makes a surplus, here slots are missing")
    elif missing < 0:
        sentence = (
            f"{sum_} = {sum(parts.values()):.0f}, {-missing} more than the total of {numbers['total']:.0f}: "
            f"{-missing} slots were released twice"
        )
        yield Candidate(
            cause=Cause.DOUBLE_RELEASE,
            score=0.95,
            detail=f"{-missing} slots surplus",
            evidence=(quote, sentence),
            phase=Phase.AFTER_RELEASE,
            record=("both releases of a surplus slot: log releases with their request",),
        )
        yield Excluded(cause=Cause.LEAK, why="a leak loses slots, here there is a surplus")
    else:
        yield Excluded(cause=Cause.LEAK, why=f"{sum_} is exactly the total")


def _start_up_memory(case: Case, failure: Failure, quote: str) -> Iterator[Verdict]:
    """Free memory at start against the share asked for."""
    numbers = failure.numbers
    taken = numbers["total"] - numbers["free"]
    highest = numbers["free"] / numbers["total"]
    sentence = f"{taken:.2f} of {numbers['total']:.2f} GiB were taken before the engine began; utilisation up to {highest:.2f} would start"
    if taken >= max(1.5, 0.05 * numbers["total"]):
        yield Candidate(cause=Cause.OTHER_PROCESS, score=0.88, evidence=(quote, sentence), phase=Phase.START_UP)
    else:
        why = "about what a CUDA context or a desktop takes"
        yield Candidate(cause=Cause.BUDGET, score=0.85, evidence=(quote, f"{sentence}; {why}"), phase=Phase.START_UP)
        yield Excluded(cause=Cause.OTHER_PROCESS, why=f"only {taken:.2f} GiB are taken, {why}")


def _no_blocks(case: Case, failure: Failure, quote: str) -> Iterator[Verdict]:
    """Nothing left for KV: by the account, because of weights or because of the profiled peak."""
    account = case.log.account if case.log else {}
    weights, peak, total = account.get("weights_gib"), account.get("peak_activation_gib"), case.total_bytes
    if weights is None and case.known.weight_bytes is not None:
        weights = case.known.weight_bytes / GIB
    util = case.known.gpu_memory_utilization or 0.9
    yield Candidate(
        cause=Cause.KV_CAPACITY,
        score=failure.kind.score,
        detail=failure.kind.detail,
        evidence=(quote,),
        phase=Phase.START_UP,
    )
    if weights is not None and total is not None and weights > 0.85 * util * total / GIB:
        sentence = f"weights of {weights:.2f} GiB are {weights * GIB / (util * total):.0%} of the budget {util:g} x {show(total)}"
        yield Candidate(
            cause=Cause.WEIGHTS,
            score=0.8,
            detail="they leave no room for KV",
            evidence=(quote, sentence),
            phase=Phase.START_UP,
        )
    elif peak is not None and total is not None and peak > 0.15 * util * total / GIB:
        sentence = f"the profiled peak of {peak:.2f} GiB is {peak * GIB / (util * total):.0%} of the budget {util:g} x {show(total)}"
        yield Candidate(
            cause=Cause.TRANSIENT_PEAK,
            score=0.75,
            detail="profiled forward pass",
            evidence=(quote, sentence),
            phase=Phase.PROFILING,
        )


_SPECIAL = {
    "pool books": _books,
    "free memory on start-up": _start_up_memory,
    "no cache blocks": _no_blocks,
    "not enough memory for the pool": _no_blocks,
}


_BUFFER = r"symm(?:etric)?[_ ]?mem\w*|prealloc\w*|workspace|buffer size"


def fixed_size(case: Case) -> Iterator[Verdict]:
    """A request of exactly a power of two of GiB is a size that somebody set, not a tensor of a step."""
    oom, total = case.oom, case.total_bytes
    if oom is None or oom.tried is None or case.phase is Phase.LOADING:
        return
    gib = oom.tried.bytes / GIB
    if gib < 1 or gib != int(gib) or int(gib) & (int(gib) - 1):
        return
    sign = case.says(_BUFFER)
    if sign:
        score, why = 0.7, f"{oom.tried} is a configured size (“{sign}”)"
    elif total and oom.free and oom.private_pools is None and oom.free.bytes < 0.03 * total:
        score, why = 0.46, f"{oom.tried}, a round number of GiB, is a size that somebody set rather than a tensor's"
    else:
        return
    yield Candidate(
        cause=Cause.BUDGET,
        score=score,
        detail="preallocated buffer outside the account",
        evidence=(f"{why}, asked for after the static pool took its share",),
        phase=Phase.START_UP,
    )


_FALLBACK = (
    r"_scaled_dot_product_attention_math|sdpa_math|\beager_attention_forward|(?:falls?|falling|fell) back to (?:the )?(?:math|eager|naive|"
    r"plain|native|torch)\w*(?: \w+)? ?(?:SDPA|attention)?|using (?:naive|math|eager) attention|attn_implementation[=:\s'\"]+eager"
)


def fallback_names(case: Case) -> Iterator[Verdict]:
    """Kernels, or words, that say that attention ran without a fused kernel: scores are then written out."""
    sign = case.says(_FALLBACK)
    if not sign or case.phase in (Phase.LOADING, Phase.GRAPH_CAPTURE) or not (case.oom or case.speaks_of_oom):
        return
    sentence = f"“{sign}”: attention without a fused kernel holds [heads, S, S] scores, which grow with the square of the prompt"
    yield Candidate(
        cause=Cause.KERNEL_FALLBACK,
        score=0.7,
        detail="attention scores [heads, S, S] in memory",
        evidence=(sentence,),
        phase=Phase.PREFILL,
    )
