"""Rules on memory snapshots: what is free and how it lies, and what the snapshot's own history would have been under other settings."""

from __future__ import annotations

from collections.abc import Iterator

from .case import Candidate, Case, Excluded, Verdict
from .diagnosis import Cause, Phase
from .sizes import MIB, show


def by_snapshot(tried: float, pending: int, largest: int) -> Iterator[Verdict]:
    """Whether what is unused waits for a stream, lies in one piece, or in several; bytes."""
    if pending >= tried:
        sentence = f"{show(pending)} are freed and wait for another stream, at least the {show(tried)} tried: an identical retry succeeds"
        yield Candidate(cause=Cause.PENDING_FREES, score=0.92, evidence=(sentence,), phase=Phase.SERVING)
        yield Excluded(cause=Cause.FRAGMENTATION, why="the memory is not in pieces, it is not given back yet")
    elif largest >= tried:
        yield Excluded(
            cause=Cause.FRAGMENTATION,
            why=f"the largest free block has {show(largest)}, enough for the {show(tried)} tried",
        )
    else:
        sentence = f"the largest free block has {show(largest)}, less than the {show(tried)} tried"
        yield Candidate(cause=Cause.FRAGMENTATION, score=0.9, evidence=(sentence,), phase=Phase.SERVING)
        yield Excluded(cause=Cause.PENDING_FREES, why=f"only {show(pending)} wait for another stream")


def by_replay(case: Case) -> Iterator[Verdict]:
    """The snapshot's own history under other settings of the allocator: had one of them room, memory was there, in pieces."""
    runs = case.allocator
    if runs is None or runs.tried_bytes is None or case.snapshot is None or case.snapshot.pending >= runs.tried_bytes:
        return
    if runs.retry_fits:
        sentence = f"replayed: searched again when frees that waited were done, the pool has room for the {show(runs.tried_bytes)}"
        yield Candidate(cause=Cause.PENDING_FREES, score=0.9, evidence=(sentence,), phase=Phase.SERVING)
        return
    helpful = runs.helpful()
    if not helpful:
        tried = ", ".join(conf for conf, _ in runs.others)
        why = f"replayed: under none of {tried} has the {show(runs.tried_bytes)} room"
        yield Excluded(cause=Cause.FRAGMENTATION, why=why)
        return
    sentence = f"replayed: under {helpful[0][0]} the same program has room for the {show(runs.tried_bytes)}: memory was there, in pieces"
    yield Candidate(cause=Cause.FRAGMENTATION, score=0.88, evidence=(sentence,), phase=Phase.SERVING)


def snapshot_state(case: Case) -> Iterator[Verdict]:
    """A snapshot without a failure: who holds the memory at that moment."""
    facts = case.snapshot
    if facts is None or case.oom is not None or not facts.reserved:
        return
    shown = (
        f"{show(facts.reserved)} reserved: {show(facts.allocated)} allocated, {show(facts.inactive)} free "
        f"(largest block {show(facts.largest_inactive)}), {show(facts.pending)} waiting for a stream, "
        f"{show(facts.private_free)} free in private pools"
    )
    if facts.inactive > max(0.3 * facts.reserved, 256 * MIB):
        yield Candidate(
            cause=Cause.RESERVED_ONLY,
            score=0.6,
            evidence=(shown,),
            phase=Phase.AFTER_RELEASE,
            effect_bytes=facts.inactive,
        )
    else:
        yield Excluded(cause=Cause.RESERVED_ONLY, why=shown)
