"""What was there before a recorded history begins: the snapshot's end, unwound entry by entry.

PyTorch keeps the last so many entries. Blocks are freed in them that were allocated before the first one, and blocks that
live at the end may never be mentioned. Going backwards from the end, each entry is undone, so that what is left is the state
that the first entry met.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .caching_sizes import MIB, SMALL_SEGMENT_BYTES
from .events import DEFAULT_POOL, PoolId
from .snapshot import SnapshotEntry, SnapshotSegment

LARGE_PAGE_BYTES = 20 * MIB
NEARBY_BYTES = 1 << 34
"""Virtual ranges are longer than the device's memory: what is closer than this belongs to one range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartBlock:
    """A block that lives when the history begins. Sizes in bytes."""

    address: int
    """First byte."""
    requested_bytes: int
    """Bytes asked for."""
    size_bytes: int | None
    """Bytes set aside, known only if it lives until the end."""
    pending: bool
    """Given back already, waiting for a stream."""
    tag: str
    """Where it was allocated, if recorded."""


@dataclass(slots=True, kw_only=True)
class StartSegment:
    """A segment, or a mapped part of an expandable one, that exists when the history begins: `[address, address + size)`."""

    address: int
    size_bytes: int
    stream: int
    small: bool
    pool_id: PoolId
    expandable: bool
    blocks: list[StartBlock] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartState:
    """The state that the first entry of a history met."""

    segments: tuple[StartSegment, ...]
    """By address, each with the blocks that live in it."""
    contradictions: tuple[str, ...]
    """Where history and snapshot do not fit together."""


def unwind(segments: Sequence[SnapshotSegment], trace: Sequence[SnapshotEntry]) -> StartState:
    """Undo a history, from the state at its end to that at its beginning."""
    return _Unwinder(segments).run(trace)


class _Unwinder:
    def __init__(self, segments: Sequence[SnapshotSegment]) -> None:
        self.ranges: dict[int, StartSegment] = {}
        self.blocks: dict[int, StartBlock] = {}
        self.contradictions: list[str] = []
        for segment in segments:
            self.ranges[segment.address] = StartSegment(
                address=segment.address, size_bytes=segment.total_bytes, stream=segment.stream, small=segment.small,
                pool_id=segment.pool_id, expandable=segment.expandable,
            )  # fmt: skip
            for block in segment.blocks:
                if block.is_active:
                    self.blocks[block.address] = StartBlock(
                        address=block.address, requested_bytes=block.requested_bytes, size_bytes=block.size_bytes,
                        pending=block.state != "active_allocated", tag=block.tag,
                    )  # fmt: skip

    def run(self, trace: Sequence[SnapshotEntry]) -> StartState:
        for index in range(len(trace) - 1, -1, -1):
            problem = self._undo(trace[index])
            if problem:
                entry = trace[index]
                self.contradictions.append(
                    f"entry {index} ({entry.action} of {entry.size_bytes} B at {entry.address:#x}) {problem}"
                )
        segments = sorted(self.ranges.values(), key=lambda segment: segment.address)
        self._place_blocks(segments)
        return StartState(segments=tuple(segments), contradictions=tuple(reversed(self.contradictions)))

    def _undo(self, entry: SnapshotEntry) -> str:
        """Undo one entry; says what does not fit."""
        block = self.blocks.get(entry.address)
        match entry.action:
            case "alloc":
                if self.blocks.pop(entry.address, None) is None:
                    return "leaves no block behind"
            case "free_completed":
                if block is not None:
                    return "completes the free of a block that lives afterwards"
                self.blocks[entry.address] = _block_of(entry, pending=True)
            case "free_requested":
                if block is None or not block.pending:
                    return "is not completed and its block does not wait"
                self.blocks[entry.address] = StartBlock(
                    address=block.address, requested_bytes=block.requested_bytes, size_bytes=block.size_bytes, pending=False, tag=block.tag
                )  # fmt: skip
            case "segment_alloc" | "segment_map":
                return "" if self._remove_range(entry) else "leaves no such segment behind"
            case "segment_free" | "segment_unmap":
                return "" if self._add_range(entry) else "gives back what exists afterwards"
        return ""

    def _remove_range(self, entry: SnapshotEntry) -> bool:
        """Take `[address, address + size)` out of the ranges that hold it; what is left on either side stays."""
        end = entry.address + entry.size_bytes
        touched = [
            other
            for other in self.ranges.values()
            if other.address < end and entry.address < other.address + other.size_bytes
        ]
        if (
            sum(min(end, other.address + other.size_bytes) - max(entry.address, other.address) for other in touched)
            < end - entry.address
        ):
            return False
        for other in touched:
            del self.ranges[other.address]
            for left, right in ((other.address, entry.address), (end, other.address + other.size_bytes)):
                if left < right:
                    self.ranges[left] = _part(other, left, right)
        return True

    def _add_range(self, entry: SnapshotEntry) -> bool:
        end = entry.address + entry.size_bytes
        if any(start < end and entry.address < start + other.size_bytes for start, other in self.ranges.items()):
            return False
        expandable = entry.action == "segment_unmap"
        small = self._was_small(entry) if expandable else entry.size_bytes == SMALL_SEGMENT_BYTES
        self.ranges[entry.address] = StartSegment(
            address=entry.address, size_bytes=entry.size_bytes, stream=entry.stream, small=small,
            pool_id=entry.pool_id or DEFAULT_POOL, expandable=expandable,
        )  # fmt: skip
        return True

    def _was_small(self, entry: SnapshotEntry) -> bool:
        """Which pool unmapped pages belonged to: that of a range nearby, else as the size of the pages tells."""
        if entry.size_bytes % LARGE_PAGE_BYTES:
            return True
        near = [other for other in self.ranges.values() if other.expandable and other.stream == entry.stream]
        nearest = min(near, key=lambda other: abs(other.address - entry.address), default=None)
        return nearest is not None and nearest.small and abs(nearest.address - entry.address) < NEARBY_BYTES

    def _place_blocks(self, segments: list[StartSegment]) -> None:
        position = 0
        for block in sorted(self.blocks.values(), key=lambda block: block.address):
            while (
                position < len(segments) and segments[position].address + segments[position].size_bytes <= block.address
            ):
                position += 1
            if position == len(segments) or segments[position].address > block.address:
                self.contradictions.append(
                    f"a block of {block.requested_bytes} B at {block.address:#x} lies in no segment"
                )
            else:
                segments[position].blocks.append(block)


def _block_of(entry: SnapshotEntry, *, pending: bool) -> StartBlock:
    return StartBlock(
        address=entry.address, requested_bytes=entry.size_bytes, size_bytes=None, pending=pending, tag=entry.tag
    )


def _part(segment: StartSegment, start: int, end: int) -> StartSegment:
    return StartSegment(
        address=start, size_bytes=end - start, stream=segment.stream, small=segment.small, pool_id=segment.pool_id,
        expandable=segment.expandable,
    )  # fmt: skip
