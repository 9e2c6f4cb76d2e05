"""Give an allocation log to an allocator and watch what becomes of the memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from .base import Allocator, MemoryState, NoRoom
from .events import AllocationEvent

OnFailure = Literal["stop", "skip", "drop_tag"]
"""What follows when an allocation does not fit.

`stop`: the replay ends there, as a program does that runs out of memory.
`skip`: later events of that allocation are left out, everything else goes on.
`drop_tag`: all that carries the same tag is given back and its later events are left out, as an engine aborts a request.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The memory after one event."""

    time_s: float
    """When the event was."""
    used_bytes: int
    """Bytes that hold something: `use` events narrow it down, otherwise all that was requested."""
    memory: MemoryState
    """The allocator's own account."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An allocation that did not fit."""

    index: int
    """Position of the event in the log."""
    event: AllocationEvent
    """What was asked for."""
    no_room: NoRoom
    """Why it did not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What one allocator made of a log. Times in seconds, sizes in bytes."""

    samples: tuple[Sample, ...]
    """One for each event that was carried out."""
    failures: tuple[Failure, ...]
    """Allocations that did not fit, in order; attempts (which failed when the log was recorded) are not among them."""
    attempts_served: int
    """Attempts that failed when the log was recorded and would fit here."""
    num_events: int
    """Events of the log, carried out or not."""

    @property
    def first_failure(self) -> Failure | None:
        """The first allocation that did not fit, with its numbers."""
        return self.failures[0] if self.failures else None

    @property
    def final(self) -> MemoryState | None:
        """The memory after the last event."""
        return self.samples[-1].memory if self.samples else None

    @property
    def peak_used_bytes(self) -> int:
        """Most bytes that held something."""
        return max((sample.used_bytes for sample in self.samples), default=0)

    @property
    def peak_requested_bytes(self) -> int:
        """Most bytes asked for at one moment."""
        return max((sample.memory.requested_bytes for sample in self.samples), default=0)

    @property
    def peak_allocated_bytes(self) -> int:
        """Most bytes set aside at one moment."""
        return max((sample.memory.allocated_bytes for sample in self.samples), default=0)

    @property
    def peak_reserved_bytes(self) -> int:
        """Most bytes held at one moment."""
        return max((sample.memory.reserved_bytes for sample in self.samples), default=0)

    @property
    def peak_external_fragmentation(self) -> float:
        """The highest share of free bytes that one request could not have."""
        return max((sample.memory.external_fragmentation for sample in self.samples), default=0.0)

    def columns(self) -> dict[str, list[float]]:
        """The time series as columns, ready for a table or a plot; units in the names, shares in [0, 1]."""
        names = ("requested_bytes", "allocated_bytes", "reserved_bytes", "free_bytes", "largest_free_bytes", "pending_bytes",
                 "external_fragmentation", "internal_fragmentation")  # fmt: skip
        columns: dict[str, list[float]] = {
            "time_s": [sample.time_s for sample in self.samples],
            "used_bytes": [sample.used_bytes for sample in self.samples],
        }
        for name in names:
            columns[name] = [getattr(sample.memory, name) for sample in self.samples]
        return columns


def replay(
    events: Iterable[AllocationEvent],
    allocator: Allocator,
    *,
    on_failure: OnFailure = "stop",
    alive: Mapping[str, int] | None = None,
) -> Replay:
    """Carry out a log on an allocator; the allocator is left in the state after the last event.

    `alive` names what the allocator holds already, with its used bytes, for a log that begins in the middle.

    Raises what the allocator raises for misuse: an id given back twice, or allocated while it is alive (`check_log` finds
    such faults beforehand).
    """
    return _Player(allocator, on_failure, alive or {}).play(events)


class _Player:
    """The state of one replay: what is alive, how much of it is used, what was dropped."""

    def __init__(self, allocator: Allocator, on_failure: OnFailure, alive: Mapping[str, int]) -> None:
        self.allocator = allocator
        self.on_failure = on_failure
        self.used = dict(alive)  # alive id -> bytes that hold something
        self.used_bytes = sum(alive.values())
        self.ids_of_tag: dict[str, dict[str, None]] = {"": dict.fromkeys(alive)}
        self.tag_of = dict.fromkeys(alive, "")
        self.dropped_ids: set[str] = set()
        self.dropped_tags: set[str] = set()
        self.failures: list[Failure] = []
        self.attempts_served = 0

    def play(self, events: Iterable[AllocationEvent]) -> Replay:
        samples: list[Sample] = []
        count = 0
        stopped = False
        for index, event in enumerate(events):
            count += 1
            if stopped or self._is_dropped(event):
                continue
            self.allocator.advance(event.time_s)
            no_room = self._carry_out(event)
            if no_room is not None:
                self.failures.append(Failure(index=index, event=event, no_room=no_room))
                stopped = self.on_failure == "stop"
                self._drop(event)
            samples.append(Sample(time_s=event.time_s, used_bytes=self.used_bytes, memory=self.allocator.state()))
        return Replay(
            samples=tuple(samples),
            failures=tuple(self.failures),
            attempts_served=self.attempts_served,
            num_events=count,
        )

    def _carry_out(self, event: AllocationEvent) -> NoRoom | None:
        allocator = self.allocator
        match event.kind:
            case "alloc" | "attempt":
                return self._allocate(event)
            case "use":
                self.used_bytes += event.size_bytes - self.used[event.id]
                self.used[event.id] = event.size_bytes
            case "free":
                allocator.free(event.id)
                self._forget(event.id)
            case "free_requested":
                allocator.request_free(event.id)
                self._forget(event.id)
            case "free_completed":
                allocator.complete_free(event.id)
            case "record_stream":
                allocator.record_stream(event.id, event.stream)
            case "stream_done":
                allocator.stream_done(event.stream)
            case "empty_cache":
                allocator.empty_cache()
        return None

    def _allocate(self, event: AllocationEvent) -> NoRoom | None:
        found = self.allocator.allocate(event.id, event.size_bytes, stream=event.stream, pool=event.pool, tag=event.tag)
        if event.kind == "attempt":
            if not isinstance(found, NoRoom):
                self.attempts_served += 1
                self.allocator.free(event.id)
            return None
        if isinstance(found, NoRoom):
            return found
        self.used[event.id] = event.size_bytes if event.used_bytes is None else event.used_bytes
        self.used_bytes += self.used[event.id]
        self.tag_of[event.id] = event.tag
        self.ids_of_tag.setdefault(event.tag, {})[event.id] = None
        self.dropped_ids.discard(event.id)
        return None

    def _forget(self, allocation_id: str) -> None:
        self.used_bytes -= self.used.pop(allocation_id)
        del self.ids_of_tag[self.tag_of.pop(allocation_id)][allocation_id]

    def _is_dropped(self, event: AllocationEvent) -> bool:
        if event.kind == "alloc":  # an id may be used again after the allocation that failed
            if event.tag and event.tag in self.dropped_tags:
                self.dropped_ids.add(event.id)
                return True
            return False
        return event.id in self.dropped_ids

    def _drop(self, event: AllocationEvent) -> None:
        self.dropped_ids.add(event.id)
        if self.on_failure != "drop_tag" or not event.tag:
            return
        self.dropped_tags.add(event.tag)
        for allocation_id in list(self.ids_of_tag.get(event.tag, ())):
            self.allocator.free(allocation_id)
            self._forget(allocation_id)
            self.dropped_ids.add(allocation_id)
