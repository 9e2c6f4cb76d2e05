"""The allocation log: one format in which any allocator can be told what to hold, and until when.

A log is a sequence of `AllocationEvent`, in order of time. It says what a program asked for, never where an allocator put
it, so that the same log can be given to every allocator and only the allocator differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

EventKind = Literal[
    "alloc",
    "use",
    "free",
    "free_requested",
    "free_completed",
    "record_stream",
    "stream_done",
    "attempt",
    "empty_cache",
]
"""What happened.

`alloc`: `size_bytes` are asked for under `id`.
`use`: of the allocation `id`, `size_bytes` hold something from now on (a reservation fills up).
`free`: `id` is given back; on an allocator that knows streams it waits for the streams recorded on it.
`free_requested`, `free_completed`: the two halves of a free whose wait was observed, as a PyTorch memory trace has them.
`record_stream`: the allocation `id` is also used by `stream`, so that a later `free` waits for that stream.
`stream_done`: all work queued on `stream` so far has finished.
`attempt`: `size_bytes` were asked for in vain when the log was recorded: tried, and given back at once if there is room.
`empty_cache`: cached memory that nobody uses is returned to the device.
"""

PoolId = tuple[int, int]
"""PyTorch's name of a memory pool; `(0, 0)` is the common one, others belong to CUDA graphs or to `MemPool` objects."""

DEFAULT_POOL: PoolId = (0, 0)

_NEEDS_ID = frozenset({"alloc", "use", "free", "free_requested", "free_completed", "record_stream", "attempt"})


class AllocationLogError(ValueError):
    """A log contradicts itself. The message names the event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationEvent:
    """One line of an allocation log.

    Raises ValueError if the size does not suit the kind of event or an id is missing.
    """

    time_s: float
    """When, in seconds from any origin."""
    kind: EventKind
    """What happened."""
    id: str = ""
    """Name of the allocation: unique among those alive at the same time."""
    size_bytes: int = 0
    """Bytes asked for (`alloc`, `attempt`) or holding something (`use`); 0 otherwise."""
    used_bytes: int | None = None
    """Of a new allocation (`alloc`), the bytes that hold something at once; None is all of them."""
    stream: int = 0
    """Stream that allocates (`alloc`), uses (`record_stream`) or has finished (`stream_done`)."""
    pool: PoolId = DEFAULT_POOL
    """Memory pool asked (`alloc`, `attempt`)."""
    tag: str = ""
    """Who asks: a request, a tensor, a line of code. Carried along for messages and for `on_failure="drop_tag"`."""

    def __post_init__(self) -> None:
        if self.kind in _NEEDS_ID and not self.id:
            raise ValueError(f"a `{self.kind}` event needs the id of an allocation: {self}")
        smallest = 1 if self.kind in ("alloc", "attempt") else 0
        if self.size_bytes < smallest:
            raise ValueError(f"a `{self.kind}` event needs at least {smallest} bytes, not {self.size_bytes}: {self}")


def check_log(events: Iterable[AllocationEvent]) -> None:
    """Verify that a log makes sense before it is replayed.

    Raises AllocationLogError if time runs backwards, an id is allocated while it is alive, or one that is not alive is used
    or given back.
    """
    alive: dict[str, str] = {}  # id -> the kind of event that it was seen with last
    last = float("-inf")
    for index, event in enumerate(events):
        where = f"event {index} ({event.kind} {event.id!r} at {event.time_s:g} s)"
        if event.time_s < last:
            raise AllocationLogError(f"{where} lies before its predecessor at {last:g} s")
        last = event.time_s
        state = alive.get(event.id)
        if event.kind == "alloc":
            if state is not None:
                raise AllocationLogError(f"{where} names an allocation that is still alive")
            alive[event.id] = event.kind
        elif event.kind == "free_completed":
            if state != "free_requested":
                raise AllocationLogError(f"{where} completes a free that was not requested")
            del alive[event.id]
        elif event.kind in ("use", "record_stream", "free", "free_requested"):
            if state != "alloc":
                raise AllocationLogError(f"{where} names an allocation that is not alive")
            if event.kind == "free":
                del alive[event.id]
            elif event.kind == "free_requested":
                alive[event.id] = event.kind


def peak_requested_bytes(events: Sequence[AllocationEvent]) -> int:
    """The most bytes that are asked for and not given back at one moment: what a perfect allocator would need."""
    sizes: dict[str, int] = {}
    total = peak = 0
    for event in events:
        if event.kind == "alloc":
            sizes[event.id] = event.size_bytes
            total += event.size_bytes
            peak = max(peak, total)
        elif event.kind in ("free", "free_requested"):
            total -= sizes.pop(event.id, 0)
    return peak
