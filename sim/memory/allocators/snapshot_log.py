"""A recorded history as an allocation log: what the program asked for, without what PyTorch's allocator made of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from .events import DEFAULT_POOL, AllocationEvent, EventKind, PoolId
from .snapshot import SnapshotEntry, SnapshotSegment
from .snapshot_releases import Circumstances, ReleaseRun, makes_room, release_run
from .snapshot_restore import start_id
from .snapshot_start import StartState

AT_ONCE_US = 20
"""A free that waits for nobody is completed in the same call, within microseconds; a wait ends in a later call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotLog:
    """The log of one device's history."""

    events: tuple[AllocationEvent, ...]
    """What the program did; time starts at 0 s."""
    contradictions: tuple[str, ...]
    """Entries that do not fit together; they were left out."""


def log_of(
    trace: Sequence[SnapshotEntry],
    start: StartState,
    segments: Sequence[SnapshotSegment],
    *,
    circumstances: Circumstances,
) -> SnapshotLog:
    """Turn a history into a log.

    Cached memory that was returned to the device becomes `empty_cache`, unless the allocator did it to make room
    (`snapshot_releases`). Then the replay makes room by its own rules, and blocks whose wait ended in the course of that become
    free after the allocation, as they were not looked for before it. An allocation that failed becomes an `attempt`.
    """
    return _Writer(trace, start, segments, circumstances).write()


def start_events(start: StartState) -> list[AllocationEvent]:
    """The state at the beginning as allocations made anew, by address: for settings other than the recorded ones."""
    events = []
    for segment in start.segments:
        for block in segment.blocks:
            name = start_id(block)
            events.append(
                AllocationEvent(
                    time_s=0.0, kind="alloc", id=name, size_bytes=max(1, block.requested_bytes), stream=segment.stream,
                    pool=segment.pool_id, tag=block.tag,
                )
            )  # fmt: skip
            if block.pending:
                events.append(AllocationEvent(time_s=0.0, kind="free_requested", id=name))
    return events


class _Writer:
    def __init__(
        self,
        trace: Sequence[SnapshotEntry],
        start: StartState,
        segments: Sequence[SnapshotSegment],
        circumstances: Circumstances,
    ) -> None:
        self.trace = trace
        self.segments = segments  # by address
        self.addresses = [segment.address for segment in segments]
        self.circumstances = circumstances
        self.reserved_bytes = sum(segment.size_bytes for segment in start.segments)
        blocks = [block for segment in start.segments for block in segment.blocks]
        self.live = {block.address: start_id(block) for block in blocks if not block.pending}
        self.closing = {block.address: start_id(block) for block in blocks if block.pending}
        self.events: list[AllocationEvent] = []
        self.contradictions: list[str] = []
        self.time_s = 0.0

    def write(self) -> SnapshotLog:
        origin = next((entry.time_us for entry in self.trace if entry.time_us is not None), 0)
        late: list[int] = []  # entries to carry out after the allocation they belong to
        index = 0
        while index < len(self.trace):
            entry = self.trace[index]
            if entry.time_us is not None:
                self.time_s = max(self.time_s, (entry.time_us - origin) / 1e6)
            run = release_run(self.trace, index)
            if run is not None:
                late += self._return_memory(run)
                index = run.end
                continue
            index += self._one(index)
            if late and entry.action in ("alloc", "oom"):
                self._complete(late)
                late = []
        self._complete(late)
        return SnapshotLog(events=tuple(self.events), contradictions=tuple(self.contradictions))

    def _return_memory(self, run: ReleaseRun) -> list[int]:
        """Carry over memory that was returned to the device; the waits to be carried over after the next allocation."""
        completed = list(range(run.start, run.released))
        own_doing = makes_room(self.trace, run, self.reserved_bytes, self.circumstances)
        self.reserved_bytes -= sum(entry.size_bytes for entry in self.trace[run.released : run.end])
        if own_doing:
            return completed
        self._complete(completed)
        self._put("empty_cache")
        return []

    def _one(self, index: int) -> int:
        """Carry one entry over; the number of entries it took."""
        entry = self.trace[index]
        match entry.action:
            case "alloc":
                if entry.address in self.live:
                    self._contradict(index, "of an address that is in use")
                    self._put("free", self.live.pop(entry.address))
                name = f"{entry.address:#x}#{index}"
                self.live[entry.address] = name
                self._put("alloc", name, entry, max(1, entry.size_bytes))
            case "free_requested":
                known = self.live.pop(entry.address, None)
                if known is None:
                    self._contradict(index, "of an address that is not in use")
                elif self._is_free_at_once(index):
                    self._put("free", known)
                    return 2
                else:
                    self.closing[entry.address] = known
                    self._put("free_requested", known)
            case "free_completed":
                self._complete([index])
            case "oom":
                self._put("attempt", f"oom#{index}", entry, max(1, entry.size_bytes))
            case "segment_alloc" | "segment_map":
                self.reserved_bytes += entry.size_bytes
        return 1

    def _is_free_at_once(self, index: int) -> bool:
        """A block nobody else uses is free at once: the next entry says so.

        If what follows is memory being returned or a failure, the next entry may instead be the end of a wait; then the time
        between the two tells.
        """
        entry = self.trace[index]
        following = self.trace[index + 1] if index + 1 < len(self.trace) else None
        if following is None or (following.action, following.address) != ("free_completed", entry.address):
            return False
        if release_run(self.trace, index + 1) is None or entry.time_us is None or following.time_us is None:
            return True
        return following.time_us - entry.time_us <= AT_ONCE_US

    def _complete(self, indices: Sequence[int]) -> None:
        for index in indices:
            name = self.closing.pop(self.trace[index].address, None)
            if name is None:
                self._contradict(index, "of a block that does not wait")
            else:
                self._put("free_completed", name)

    def _put(self, kind: EventKind, name: str = "", entry: SnapshotEntry | None = None, size_bytes: int = 0) -> None:
        self.events.append(
            AllocationEvent(
                time_s=self.time_s, kind=kind, id=name, size_bytes=size_bytes, stream=entry.stream if entry else 0,
                pool=self._pool_of(entry) if entry else DEFAULT_POOL, tag=entry.tag if entry else "",
            )
        )  # fmt: skip

    def _pool_of(self, entry: SnapshotEntry) -> PoolId:
        """Older histories do not say which pool was asked; the segment that holds the address does, if it still exists."""
        if entry.pool_id is not None:
            return entry.pool_id
        index = bisect_right(self.addresses, entry.address) - 1
        if index >= 0 and entry.address < self.segments[index].address + self.segments[index].total_bytes:
            return self.segments[index].pool_id
        return DEFAULT_POOL

    def _contradict(self, index: int, what: str) -> None:
        entry = self.trace[index]
        self.contradictions.append(
            f"entry {index}: {entry.action} of {entry.size_bytes} B at {entry.address:#x}, {what}"
        )
