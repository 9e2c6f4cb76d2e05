"""Rules on the KV pool while it is allocated, and on memory that should be back after a release."""

from __future__ import annotations

from collections.abc import Iterator

from .case import Candidate, Case, Verdict
from .diagnosis import Cause, Phase
from .sizes import GIB, MIB, show


def kv_pool(case: Case) -> Iterator[Verdict]:
    """The KV pool itself: one of many equal tensors, or a request that no GPU could meet."""
    oom, total = case.oom, case.total_bytes
    if oom is None or oom.tried is None or oom.allocated is None or total is None:
        return
    tried = oom.tried
    if tried.low > total:
        sentence = f"{tried} were tried on a GPU of {show(total)}: a pool sized without looking at the device, not a tensor of a step"
        yield Candidate(
            cause=Cause.KV_CAPACITY,
            score=0.6,
            detail="pool larger than the GPU",
            evidence=(sentence,),
            phase=Phase.START_UP,
        )
        return
    need = case.known.weight_bytes
    unlikely = tried.bytes < 64 * MIB or need is None or need > 0.8 * total
    if unlikely or need is None or case.phase not in (Phase.UNKNOWN, Phase.START_UP):
        return
    held = oom.allocated.bytes - need
    count = round(held / tried.bytes)
    if count < 4 or oom.private_pools is not None or not _may_be_layers(case, count, tried.bytes, need, total):
        return  # graphs are captured when the pool is there
    slack = (count + 1) * (tried.half_bytes + 2 * MIB) + oom.allocated.half_bytes + 0.05 * need
    if abs(held - count * tried.bytes) <= min(slack, 0.06 * tried.bytes):
        sentence = (
            f"{oom.allocated} allocated less about {show(need)} of weights are {count} tensors of {tried}: "
            "the KV pool was being allocated, layer by layer"
        )
        yield Candidate(
            cause=Cause.KV_CAPACITY,
            score=0.6,
            detail="pool while it is allocated",
            evidence=(sentence,),
            phase=Phase.START_UP,
        )


def _may_be_layers(case: Case, count: int, size: float, need: float, total: float) -> bool:
    """Whether a pool of one or two such tensors a layer, beside the weights, is a share of the GPU that somebody would ask for."""
    if case.known.shape is None:
        return True
    layers = case.known.shape.num_layers
    return any(
        count < per_layer * layers and 0.6 * total <= need + per_layer * layers * size <= 1.1 * total
        for per_layer in (1, 2)
    )


def released(case: Case) -> Iterator[Verdict]:
    """After something was released, memory that should be back is not."""
    if case.phase is not Phase.AFTER_RELEASE or case.oom is None or case.oom.allocated is None:
        return
    oom = case.oom
    assert oom.allocated is not None
    if oom.unallocated is not None and oom.unallocated.bytes > max(oom.allocated.bytes, GIB):
        sentence = f"{oom.unallocated} are reserved and in no tensor, {oom.allocated} allocated: released, and kept by the allocator"
        yield Candidate(cause=Cause.RESERVED_ONLY, score=0.75, evidence=(sentence,))
    else:
        sentence = f"after the release {oom.allocated} are still allocated"
        yield Candidate(
            cause=Cause.LEAK,
            score=0.42,
            evidence=(sentence,),
            record=("allocated memory over several rounds of release and use: a leak rises every round",),
        )


_GROWS = (
    r"memory leak(?! detected)|(?:memory|VRAM|usage)(?: \w+){0,3} (?:grow|increas|creep|climb|ris)\w*(?: \w+){0,2} "
    r"(?:over time|steadily|slowly|until|every|each|with (?:each|every|the))|(?:steady|steadily|slow(?:ly)?|constant(?:ly)?)(?: \w+){0,2} "
    r"(?:grow|increas)\w*"
)


def said_to_grow(case: Case) -> Iterator[Verdict]:
    """A report that says in words that memory grows as time passes. Only words: a curve would show it."""
    sign = case.says(_GROWS)
    if not sign or case.curve is not None or not (case.oom or case.speaks_of_oom):
        return
    yield Candidate(
        cause=Cause.LEAK,
        score=0.5,
        evidence=(f"the text says “{sign}”",),
        phase=Phase.AFTER_RELEASE,
        record=("allocated and reserved memory over hours, with idle moments: a leak's base line rises",),
    )
