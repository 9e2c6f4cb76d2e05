"""Rules on the figures of PyTorch's message: who holds the memory, and in what state.

The order of thought: is enough reserved and unused (fragmentation, pending frees)? Is much of the process outside PyTorch?
Is another process there? `rules_budget` speaks last, when nothing of this explains it.
"""

from __future__ import annotations

from collections.abc import Iterator

from .case import Candidate, Case, Excluded, Verdict
from .diagnosis import Cause, Phase
from .fix_effects import ledger_with, line_bytes
from .rules_snapshot import by_snapshot
from .sizes import GIB, MIB, show

_SNAPSHOT = (
    "a PyTorch memory snapshot at the failure (torch.cuda.memory._record_memory_history, _dump_snapshot): free "
    "blocks by size, and frees that wait for another stream"
)
_ORDINARY_SLACK = 0.004
"""Share of the GPU that is always reserved and unused: ends of segments, cached small blocks."""
_MUCH_SLACK = 0.03
"""More than this is not what an ordinary load leaves."""
_OTHERS = (
    r"(?<!used by )(?:another|other|second|two|multiple|several)\W+(?:[\w.]+\W+){0,3}?process(?:es)?|shared GPU|"
    r"co-?locat\w+|other (?:users|jobs)"
)


def fragmentation(case: Case) -> Iterator[Verdict]:
    """Unused reserved memory that would have been enough, in one piece.

    Before it gives up, the allocator returns every segment that is entirely free. What is left over is in pieces between
    live tensors, or waits for a stream. A little of it is always there.
    """
    oom = case.oom
    if oom is None or oom.tried is None or oom.unallocated is None:
        return
    tried, spare = oom.tried, oom.unallocated
    if spare.high < tried.low:
        why = f"{spare} reserved but unallocated is less than the {tried} tried: even in one piece it would not do"
        yield Excluded(cause=Cause.FRAGMENTATION, why=why)
        yield Excluded(cause=Cause.PENDING_FREES, why=f"frees that wait are in those {spare} too")
        return
    facts = case.snapshot
    if facts is not None:
        yield from by_snapshot(tried.bytes, facts.pending, facts.largest_inactive)
        return
    whole = case.total_bytes or oom.reserved_bytes or spare.bytes
    share = spare.bytes / whole
    score = min(0.75, max(0.05, 0.8 * (share - _ORDINARY_SLACK) / 0.016))
    if share > _MUCH_SLACK:
        score = min(0.88, 0.75 + 2 * (share - _MUCH_SLACK))  # no kind of load leaves so much behind
    if tried.bytes <= 20 * MIB and share <= _MUCH_SLACK:
        score *= 0.4  # any small request asks for such a segment once its pool is full
    sentence = f"{spare} are reserved but unallocated, more than the {tried} tried ({share:.1%} of {show(whole)})"
    if score < 0.25:
        yield Excluded(
            cause=Cause.FRAGMENTATION,
            why=f"{spare} unallocated exceed the {tried} tried, but so much ({share:.2%}) always is: ends of segments",
        )
        return
    yield Candidate(
        cause=Cause.FRAGMENTATION, score=score, evidence=(sentence,), phase=Phase.SERVING, record=(_SNAPSHOT,)
    )
    waits = f"{sentence}; without a snapshot, frees that wait for another stream look the same"
    yield Candidate(
        cause=Cause.PENDING_FREES, score=0.4 * score, evidence=(waits,), phase=Phase.SERVING, record=(_SNAPSHOT,)
    )


def private_pools(case: Case) -> Iterator[Verdict]:
    """Free blocks inside the pools of CUDA graphs: no ordinary request can have them while a graph lives."""
    oom, total = case.oom, case.total_bytes
    if oom is None or oom.tried is None or oom.private_pools is None or total is None:
        return
    share = oom.private_pools.bytes / total
    if oom.private_pools.low >= oom.tried.high and share >= 0.03:
        sentence = (
            f"{oom.private_pools} lie free in the pools of CUDA graphs, more than the {oom.tried} tried, and only "
            f"graphs may use them"
        )
        score, evidence = min(0.85, 0.5 + share), [sentence]
        expected = line_bytes(ledger_with(case), "cuda_graphs")
        if expected is not None and oom.private_pools.low > expected + GIB:
            score = 0.8
            evidence.append(f"the account expects {show(expected)} for all graphs")
        yield Candidate(
            cause=Cause.CUDA_GRAPHS,
            score=score,
            evidence=tuple(evidence),
            phase=Phase.SERVING,
            effect_bytes=oom.private_pools.bytes,
        )


def other_process(case: Case) -> Iterator[Verdict]:
    """Memory that other processes hold: listed by the message, or used and listed by nobody."""
    oom, said = case.oom, case.says(_OTHERS)
    if oom is None:
        if said and case.speaks_of_oom:
            yield Candidate(cause=Cause.OTHER_PROCESS, score=0.5, evidence=(f"the text says “{said}”",))
        return
    total = case.total_bytes
    bonus = 0.2 if said else 0.0
    words: tuple[str, ...] = (f"the text says “{said}”",) if said else ()
    held = sum(size.bytes for _, size in oom.others)
    if held:
        listed = ", ".join(f"process {pid} holds {size}" for pid, size in oom.others)
        share = held / (total or max(held * 4, 1.0))
        util = case.known.gpu_memory_utilization
        if util and total and held > (1.0 - util) * total:
            bonus += 0.2
            words += (f"a budget of {util:g} leaves {show((1.0 - util) * total)} to all others",)
        if held >= max(0.3 * GIB, 0.01 * (total or 0)):
            yield Candidate(
                cause=Cause.OTHER_PROCESS,
                score=min(0.95, 0.45 + 1.5 * share + bonus),
                evidence=(f"{listed}: {share:.0%} of the GPU, which this engine counts as its own", *words),
            )
        else:
            yield Excluded(cause=Cause.OTHER_PROCESS, why=f"{listed}: too little to matter")
        return
    nobody = oom.unattributed_bytes
    if nobody is None or total is None:
        return
    if oom.in_use is not None and not oom.in_use_is_bogus:
        if nobody > max(GIB, 0.02 * total):
            sentence = f"{show(nobody)} are used by no process that the message lists: processes in other containers are not listed"
            yield Candidate(
                cause=Cause.OTHER_PROCESS, score=min(0.85, 0.3 + nobody / total + bonus), evidence=(sentence, *words)
            )
        else:
            yield Excluded(
                cause=Cause.OTHER_PROCESS,
                why=f"this process accounts for all but {show(max(0.0, nobody))} of what is used",
            )
    elif nobody > max(4 * GIB, 0.08 * total) and (oom.allocated is None or oom.allocated.bytes > 0):
        # Without the process's own figure its context and libraries are in here too; they rarely exceed 3 GiB.
        sentence = (
            f"{show(nobody)} of the GPU are outside this process's PyTorch: more than a context and libraries take"
        )
        yield Candidate(
            cause=Cause.OTHER_PROCESS,
            score=min(0.92, 0.3 + nobody / total + bonus),
            evidence=(sentence, *words),
            record=("nvidia-smi (or torch.cuda.mem_get_info before start-up): who holds memory on this GPU",),
        )


def outside_torch(case: Case) -> Iterator[Verdict]:
    """This process's memory that PyTorch does not own: context, libraries, communication, and the bodies of CUDA graphs."""
    oom = case.oom
    if oom is None or oom.tried is None:
        return
    outside, total = oom.non_torch_bytes, case.total_bytes
    if outside is None or total is None:
        if oom.in_use_is_bogus:
            yield Excluded(
                cause=Cause.NON_TORCH,
                why="the driver has no figure for this process (17179869184.00 GiB was printed): cannot be seen here",
            )
        return
    if oom.allocated is not None and oom.allocated.bytes == 0 and outside > 0.3 * total:
        sentence = (
            f"PyTorch owns 0 bytes while this process holds {show(outside)}: engine and KV are allocated by other "
            f"code, PyTorch's counters are blind to it"
        )
        yield Candidate(
            cause=Cause.NON_TORCH,
            score=0.9,
            detail="memory of another allocator",
            evidence=(sentence,),
            phase=Phase.SERVING,
        )
        return
    usual = _usual_outside(case)
    excess, missing = outside - usual, max(0.0, case.shortage_bytes or 0.0)
    if excess <= max(0.4 * GIB, missing):
        yield Excluded(
            cause=Cause.NON_TORCH,
            why=f"{show(outside)} of this process are outside PyTorch, about what context, libraries and communication take",
        )
        return
    sentence = (
        f"{show(outside)} of this process are outside PyTorch (in use less allocated less unallocated); about "
        f"{show(usual)} are usual"
    )
    score = min(0.75, 0.4 + 2 * excess / total)
    graphs = oom.private_pools is not None and oom.private_pools.bytes > 0
    if graphs:
        small = oom.tried.bytes <= 192 * MIB  # a capture runs at most about 512 tokens
        pools = f"{oom.private_pools} lie free in private pools: CUDA graphs exist, and their bodies are among what is outside PyTorch"
        yield Candidate(
            cause=Cause.CUDA_GRAPHS,
            score=score,
            evidence=(sentence, pools),
            phase=Phase.GRAPH_CAPTURE if small else Phase.SERVING,
            record=("the start-up log's lines about graph memory: estimated and actual",),
        )
        score *= 0.7
    yield Candidate(
        cause=Cause.NON_TORCH,
        score=score,
        evidence=(sentence,),
        detail="context, libraries or communication",
        record=(
            "device memory used less torch reserved, at start-up and at the failure (torch.cuda.mem_get_info, memory_reserved)",
        ),
    )


def _usual_outside(case: Case) -> float:
    """Bytes that a process usually has outside PyTorch. Figures of public logs: 0.5 of context, 0.1 to 0.5 of libraries; over
    NVLink about 2 of communication buffers.
    """
    tp = case.known.tensor_parallel_size
    return (1.2 if tp is None else 1.0 if tp == 1 else 3.0) * GIB
