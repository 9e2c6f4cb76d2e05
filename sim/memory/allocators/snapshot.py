"""A PyTorch memory snapshot: what it says, checked before anybody relies on it.

**Source:** the dictionary that `torch.cuda.memory._snapshot()` returns and `_dump_snapshot` pickles; torch/csrc/cuda/Module.cpp
and torch/cuda/memory.py, PyTorch 2.0 to 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from .events import DEFAULT_POOL, PoolId
from .snapshot_fields import Reader
from .snapshot_pickle import SnapshotError, load_plain

STATES = ("active_allocated", "active_pending_free", "active_awaiting_free", "inactive")
"""States of a block; the second is called by the third name in the documentation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotBlock:
    """A block of a segment. Sizes in bytes."""

    address: int
    """First byte."""
    size_bytes: int
    """Bytes set aside."""
    requested_bytes: int
    """Bytes asked for; 0 for a free block."""
    state: str
    """One of `STATES`."""
    tag: str
    """Where it was allocated, if recorded: `file:line name` of the innermost frame."""

    @property
    def is_active(self) -> bool:
        """Allocated, or given back and waiting for a stream."""
        return self.state != "inactive"


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSegment:
    """A segment, or a contiguous mapped part of an expandable one. Sizes in bytes."""

    device: int
    """Device number."""
    address: int
    """First byte."""
    total_bytes: int
    """Bytes reserved; the blocks fill them exactly."""
    stream: int
    """Stream whose allocations it serves."""
    small: bool
    """Of the small pool."""
    pool_id: PoolId
    """Memory pool."""
    expandable: bool
    """Part of an expandable segment."""
    blocks: tuple[SnapshotBlock, ...]
    """By address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotEntry:
    """One entry of a device's history."""

    action: str
    """alloc, free_requested, free_completed, segment_alloc, segment_free, segment_map, segment_unmap, oom, snapshot, …"""
    address: int
    """First byte; 0 for entries without one."""
    size_bytes: int
    """As PyTorch records it: requested (alloc, free), rounded (oom) or of the segment."""
    stream: int
    """Stream of the block."""
    time_us: int | None
    """Microseconds, if recorded."""
    device_free_bytes: int | None
    """Free bytes of the device (oom)."""
    pool_id: PoolId | None
    """Memory pool, which newer releases record."""
    tag: str
    """Where, if recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All of a memory snapshot that bears on memory."""

    segments: tuple[SnapshotSegment, ...]
    """Segments of all devices, by device and address."""
    traces: tuple[tuple[SnapshotEntry, ...], ...]
    """The history of each device, oldest first; it may have begun long after the process did."""
    allocator_settings: Mapping[str, Any]
    """As recorded; empty if they were not."""

    def segments_of(self, device: int) -> tuple[SnapshotSegment, ...]:
        """The segments of one device, by address."""
        return tuple(segment for segment in self.segments if segment.device == device)

    def trace_of(self, device: int) -> tuple[SnapshotEntry, ...]:
        """The history of one device; empty if none was recorded."""
        return self.traces[device] if device < len(self.traces) else ()


def read_snapshot(source: str | Path | bytes) -> Snapshot:
    """Read a pickled snapshot, running nothing of what it may contain.

    Raises SnapshotError if it is no plain pickle or not a consistent snapshot, and OSError if it cannot be opened.
    """
    return parse_snapshot(load_plain(source if isinstance(source, bytes) else Path(source).read_bytes()))


def parse_snapshot(data: object) -> Snapshot:
    """Check the structure of a snapshot: fields, types, and that blocks fill their segments without gap or overlap.

    Raises SnapshotError that names the place.
    """
    if isinstance(data, list):
        raise SnapshotError(
            "this is a list, as torch.cuda.memory_snapshot() returns: it has no history; use torch.cuda.memory._dump_snapshot"
        )
    top = Reader(data, "snapshot")
    segments = sorted(
        (_segment(segment) for segment in top.items("segments")), key=lambda segment: (segment.device, segment.address)
    )
    for before, after in pairwise(segments):
        if before.device == after.device and before.address + before.total_bytes > after.address:
            raise SnapshotError(
                f"segments overlap: [{before.address:#x}, +{before.total_bytes}) and [{after.address:#x}, +{after.total_bytes})"
            )
    traces = tuple(
        tuple(_entry(entry) for entry in Reader({"entries": trace}, f"device_traces[{device}]").items("entries"))
        for device, trace in enumerate(top.list_of("device_traces"))
    )
    settings = top.get("allocator_settings", dict, {})
    return Snapshot(segments=tuple(segments), traces=traces, allocator_settings=settings)


def _segment(reader: Reader) -> SnapshotSegment:
    address, total = reader.count("address"), reader.count("total_size")
    kind = reader.get("segment_type", str, "large")
    if kind not in ("small", "large"):
        raise SnapshotError(f"{reader.where}: segment_type is small or large, not {kind!r}")
    blocks, position = [], address
    for block in reader.items("blocks"):
        blocks.append(_block(block, position))
        position += blocks[-1].size_bytes
    if position != address + total:
        raise SnapshotError(f"{reader.where}: the blocks add up to {position - address} B, the segment has {total} B")
    return SnapshotSegment(
        device=reader.count("device", 0), address=address, total_bytes=total, stream=reader.whole("stream", 0),
        small=kind == "small", pool_id=reader.pool("segment_pool_id") or DEFAULT_POOL,
        expandable=reader.get("is_expandable", bool, False), blocks=tuple(blocks),
    )  # fmt: skip


def _block(reader: Reader, expected_address: int) -> SnapshotBlock:
    state = reader.get("state", str)
    if state not in STATES:
        raise SnapshotError(f"{reader.where}: state {state!r} is none of {', '.join(STATES)}")
    address, size = reader.count("address", expected_address), reader.count("size")
    if address != expected_address or size == 0:
        raise SnapshotError(f"{reader.where}: expected a block at {expected_address:#x}, not {size} B at {address:#x}")
    requested = reader.count("requested_size", size) if state != "inactive" else 0
    if requested > size:
        raise SnapshotError(f"{reader.where}: {requested} B are requested of a block of {size} B")
    return SnapshotBlock(address=address, size_bytes=size, requested_bytes=requested, state=state, tag=reader.tag())


def _entry(reader: Reader) -> SnapshotEntry:
    return SnapshotEntry(
        action=reader.get("action", str), address=reader.count("addr", 0), size_bytes=reader.count("size", 0),
        stream=reader.whole("stream", 0), time_us=reader.optional_count("time_us"),
        device_free_bytes=reader.optional_count("device_free"),
        pool_id=reader.pool("pool_id") or reader.pool("segment_pool_id"), tag=reader.tag(),
    )  # fmt: skip
