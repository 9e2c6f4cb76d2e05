"""Fixes of what PyTorch's allocator does: its settings, as far as a snapshot's history says what they would have done."""

from __future__ import annotations

from collections.abc import Iterator

from .case import Candidate, Case
from .diagnosis import Cause, Fix
from .fix_effects import less_utilization
from .sizes import GIB

THE_ALLOCATOR_S = (Cause.FRAGMENTATION, Cause.PENDING_FREES, Cause.RESERVED_ONLY)
"""Causes that settings of the allocator can mend."""


def allocator(case: Case) -> Iterator[Fix]:
    """Settings under which the snapshot's own history would have gone better."""
    runs = case.allocator
    if runs is None:
        return
    for conf, run, why in runs.helpful():
        gained = runs.tried_bytes or runs.recorded.replayed.reserved_bytes - run.replayed.reserved_bytes
        yield Fix(change=f"PYTORCH_ALLOC_CONF={conf}", effect_gib=gained / GIB, basis=why)


def fragmentation(case: Case, verdict: Candidate) -> Iterator[Fix]:
    """Memory in pieces: growing ranges, unless a replay has said what those do; and a smaller pool."""
    if case.allocator is not None and case.allocator.tried_bytes is not None:
        yield from less_utilization(case)  # what the settings do was replayed
        return
    spare = case.oom.unallocated if case.oom else None
    yield Fix(
        change="PYTORCH_ALLOC_CONF=expandable_segments:True",
        effect_gib=spare.gib if spare else None,
        basis="at most all that is reserved and unallocated becomes usable",
    )
    yield from less_utilization(case)


def pending(case: Case, verdict: Candidate) -> Iterator[Fix]:
    """Frees that wait for a stream: ask again when they are done."""
    tried = case.oom.tried if case.oom else None
    yield Fix(
        change="retry the allocation once after torch.cuda.synchronize()",
        effect_gib=tried.gib if tried else None,
        basis="replayed: with the pool searched again after the wait it fits"
        if case.allocator is not None and case.allocator.retry_fits
        else "the frees have completed by then",
    )
