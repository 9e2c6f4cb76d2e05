"""Rules on what the scheduler did: its state line by line, and how requests ended."""

from __future__ import annotations

from collections.abc import Iterator

from .case import Candidate, Case, Excluded, Verdict
from .diagnosis import Cause, Phase


def scheduler_lines(case: Case) -> Iterator[Verdict]:
    """Lines of running and waiting requests, when no failure is in the text: work that does not proceed."""
    if case.log is None or not case.log.stats or case.oom or case.failures:
        return
    last = case.log.stats[-5:]
    state = ", ".join(f"{line.running}/{line.waiting}/{line.usage:.0%}" for line in last)
    shown = f"the last {len(last)} scheduler lines (running/waiting/KV use): {state}"
    if len(last) < 2 or not all(line.waiting > 0 for line in last):
        return
    low = max(line.usage for line in last) < 0.5
    if all(line.running == 0 for line in last):
        yield Candidate(
            cause=Cause.BLOCKED,
            score=0.8,
            evidence=(
                shown,
                "nothing runs and requests wait: the head of the queue can never be admitted, or what it waits for "
                "never comes",
            ),
            phase=Phase.SERVING,
            record=(
                "the prompt length and max_tokens of the first waiting request, against the pool's tokens",
                "the state of each waiting request (grammar, remote KV, LoRA slot)",
            ),
        )
        yield Excluded(cause=Cause.KV_CAPACITY, why=f"KV use is {last[-1].usage:.0%}: the pool is not full")
    elif case.known.max_num_seqs and all(line.running >= case.known.max_num_seqs for line in last):
        sentence = f"max_num_seqs {case.known.max_num_seqs} sequences run: the slots are the limit, not memory"
        yield Candidate(
            cause=Cause.RESERVATION, score=0.7, detail="sequence slots", evidence=(shown, sentence), phase=Phase.SERVING
        )
    elif low and max(line.running for line in last) <= 2 * min(line.running for line in last):
        sentence = "few requests run, others wait, and the pool is mostly free: admission reserves for the longest possible output"
        yield Candidate(
            cause=Cause.RESERVATION,
            score=0.6,
            detail="not memory-bound",
            evidence=(shown, sentence),
            phase=Phase.SERVING,
            record=("max_tokens of the requests, and the scheduler policy",),
        )
        yield Excluded(cause=Cause.KV_CAPACITY, why=f"KV use is at most {max(line.usage for line in last):.0%}")
    elif min(line.usage for line in last) > 0.85:
        extra = (f"{case.log.preemptions} lines report preemptions",) if case.log.preemptions else ()
        yield Candidate(
            cause=Cause.KV_CAPACITY,
            score=0.75,
            evidence=(shown, "the pool is full and requests wait", *extra),
            phase=Phase.DECODE,
        )


def held_beyond_need(case: Case) -> Iterator[Verdict]:
    """The pool's use by the scheduler's lines, against what the requests of the log can need."""
    log, requests, known = case.log, case.requests, case.known
    if log is None or requests is None or not requests.largest_use:
        return
    pool = log.account.get("kv_tokens") or (known.num_gpu_blocks or 0) * (known.block_size or 16)
    lines = [line for line in log.stats if line.running > 0 and line.usage > 0]
    if not pool or len(lines) < 5:
        return
    each = sum(line.usage * pool for line in lines) / sum(line.running for line in lines)
    ratio = each / requests.largest_use
    shown = (
        f"{len(lines)} scheduler lines: {each:,.0f} tokens of the pool a running request; the longest request has "
        f"{requests.largest_use:,} tokens in all"
    )
    whole = round(ratio)
    if ratio <= 1.3:
        for cause in (Cause.KV_DUPLICATION, Cause.LATE_RELEASE):
            yield Excluded(cause=cause, why=shown)
    elif whole >= 2 and abs(ratio - whole) <= 0.1 * whole:
        detail = f"{whole} copies"
        yield Candidate(
            cause=Cause.KV_DUPLICATION, score=0.6, detail=detail, evidence=(shown,), phase=Phase.DECODE, record=_OWNERS
        )
    else:
        yield Candidate(
            cause=Cause.LATE_RELEASE, score=0.6, evidence=(shown,), phase=Phase.AFTER_RELEASE, record=_OWNERS
        )


_OWNERS = ("who owns each block of the pool while requests run: those of requests that ended, and copies",)


_WHO_HAS_IT = ("the out-of-memory message or the memory curve of the same run: they say who has the memory",)


def request_log(case: Case) -> Iterator[Verdict]:
    """How requests ended, and what was reserved for them against what they used."""
    log, known = case.requests, case.known
    if log is None or not log.num_requests:
        return
    failed = log.num_requests - log.outcomes.get("finished", 0)
    ended = ", ".join(f"{count} {outcome}" for outcome, count in sorted(log.outcomes.items()))
    shown = f"{log.num_requests} requests: {ended}; at most {log.max_running} ran at once"
    pool = known.num_gpu_blocks * (known.block_size or 16) if known.num_gpu_blocks else None
    wasted = log.requested_tokens and log.output_tokens and log.requested_tokens > 4 * log.output_tokens
    if log.waited > 0.2 * log.num_requests and wasted and log.max_running:
        use = (
            f"{log.requested_tokens} output tokens were asked for and {log.output_tokens} made; the greediest "
            f"request reserves {log.largest_reservation} tokens and the longest used {log.largest_use}"
        )
        score = 0.6
        evidence = [shown, use]
        if pool and log.max_running * log.largest_use < 0.5 * pool:
            score = 0.85
            evidence.append(
                f"{log.max_running} requests of {log.largest_use} tokens are less than half the pool of {pool}: "
                f"reservation-bound, not memory-bound"
            )
        yield Candidate(
            cause=Cause.RESERVATION,
            score=score,
            detail="not memory-bound",
            evidence=tuple(evidence),
            phase=Phase.SERVING,
        )
        return
    share = log.recomputed_tokens / max(1, log.input_tokens + log.output_tokens)
    if log.preemptions > 0.05 * log.num_requests:
        sentence = f"{log.preemptions} preemptions, {log.recomputed_tokens} tokens recomputed ({share:.0%} of all)"
        yield Candidate(
            cause=Cause.KV_CAPACITY,
            score=min(0.85, 0.55 + share),
            detail="preemption",
            evidence=(shown, sentence),
            phase=Phase.DECODE,
        )
    elif failed and log.reasons:
        reason, count = max(log.reasons.items(), key=lambda item: item[1])
        step = reason.lower().startswith("out of memory in ")
        memory = not step and any(word in reason.lower() for word in ("block", "kv", "token", "memory", "pool"))
        sentence = f"{count} of {failed} that did not finish: “{reason}”"
        if step:
            # A step did not fit. What holds the memory it lacked, only a message, a log or a curve can say.
            yield Candidate(cause=Cause.TRANSIENT_PEAK, score=0.4, evidence=(shown, sentence), record=_WHO_HAS_IT)
            return
        yield Candidate(
            cause=Cause.KV_CAPACITY if memory else Cause.UNKNOWN,
            score=0.6 if memory else 0.0,
            evidence=(shown, sentence),
            phase=Phase.SERVING,
        )
