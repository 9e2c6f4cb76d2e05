"""What-if for the allocator: a snapshot's own history, replayed under the recorded settings and under others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from .caching import CachingAllocator
from .caching_blocks import DeviceMemory
from .caching_settings import CachingSettings, parse_alloc_conf
from .events import DEFAULT_POOL
from .replay import Replay, replay
from .snapshot import Snapshot, SnapshotEntry, SnapshotSegment, parse_snapshot
from .snapshot_log import log_of, start_events
from .snapshot_pickle import SnapshotError
from .snapshot_releases import Circumstances
from .snapshot_restore import restore
from .snapshot_start import StartState, unwind

StartWith = Literal["recorded", "anew"]
"""How the state before the history is set up: with the recorded layout, or by allocating the same blocks afresh."""

UNLIMITED_BYTES = 1 << 47
"""Stands for the capacity when neither the caller nor an out-of-memory entry tells it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The memory of a device at the end of a history, in bytes."""

    reserved_bytes: int
    """Σ of the segments."""
    allocated_bytes: int
    """Σ of the allocated blocks."""
    active_bytes: int
    """The same, with blocks that wait for a stream."""
    largest_free_bytes: int
    """The largest free block."""
    num_segments: int
    """Segments, or contiguous mapped parts of expandable ones."""
    segment_bytes: tuple[int, ...]
    """The size of each, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotReplay:
    """One replay of a snapshot's history, next to what was recorded."""

    settings: CachingSettings
    """What it was replayed under."""
    recorded: Totals
    """The end as the snapshot has it."""
    replayed: Totals
    """The end as the model has it."""
    replay: Replay
    """Reserved, allocated and largest free bytes over time, and what did not fit."""
    started_with: StartWith
    """How the state before the history was set up."""
    start_bytes: int
    """Bytes requested by blocks that lived before the history began."""
    notes: tuple[str, ...]
    """What limits the comparison: unknown capacity, contradictions in the history, …"""

    @property
    def difference(self) -> dict[str, int]:
        """Replayed less recorded, for each total; all 0 when the model reproduces the record."""
        names = ("reserved_bytes", "allocated_bytes", "active_bytes", "largest_free_bytes", "num_segments")
        return {name: getattr(self.replayed, name) - getattr(self.recorded, name) for name in names}

    @property
    def is_exact(self) -> bool:
        """Totals and the size of every segment are as recorded."""
        return not any(self.difference.values()) and self.recorded.segment_bytes == self.replayed.segment_bytes


def settings_of(snapshot: Snapshot) -> CachingSettings:
    """The settings a snapshot was recorded under; PyTorch's defaults where it says nothing.

    Raises SnapshotError if they cannot be followed (another backend, or values that PyTorch would refuse).
    """
    recorded = snapshot.allocator_settings
    conf = recorded.get("PYTORCH_CUDA_ALLOC_CONF") or recorded.get("PYTORCH_ALLOC_CONF") or ""
    try:
        settings = parse_alloc_conf(conf, strict=False)
        if "max_split_size" in recorded:
            limit = int(recorded["max_split_size"])
            # PyTorch keeps "no limit" as the largest size_t, which reads as -1 (or 2^63 - 1 and more).
            settings = replace(settings, max_split_size_bytes=limit if 0 < limit < (1 << 63) - 1 else None)
        if "garbage_collection_threshold" in recorded:
            settings = replace(settings, garbage_collection_threshold=float(recorded["garbage_collection_threshold"]))
        if "expandable_segments" in recorded:
            settings = replace(settings, expandable_segments=bool(recorded["expandable_segments"]))
        divisions = recorded.get("roundup_power2_divisions")
        if divisions:
            by_size = sorted((int(size), int(division)) for size, division in divisions.items())
            settings = replace(settings, roundup_power2_divisions=tuple(division for _, division in by_size))
    except (TypeError, ValueError, AttributeError) as error:
        raise SnapshotError(f"the recorded allocator settings cannot be followed: {error}") from error
    return settings


def replay_snapshot(
    snapshot: Snapshot,
    *,
    device: int = 0,
    settings: CachingSettings | None = None,
    memory: DeviceMemory | None = None,
    start_with: StartWith | None = None,
) -> SnapshotReplay:
    """Replay one device's history, under the recorded settings unless others are given.

    Under the recorded settings the state before the history is restored as it was; under others the same blocks are allocated
    anew, in order of their addresses, unless `start_with` says otherwise. The capacity is `memory`, else what an out-of-memory
    entry tells, else unlimited.

    Raises SnapshotError if the snapshot has no history of that device.
    """
    trace, segments = snapshot.trace_of(device), snapshot.segments_of(device)
    if not trace:
        raise SnapshotError(
            f"the snapshot has no history of device {device}: record one with torch.cuda.memory._record_memory_history"
        )
    start = unwind(segments, trace)
    start_with = start_with or ("recorded" if settings is None else "anew")
    memory, notes = _memory(memory, start, trace, device)
    recorded_settings = settings_of(snapshot)
    log = log_of(
        trace,
        start,
        segments,
        circumstances=Circumstances(settings=recorded_settings, capacity_bytes=_capacity(memory, recorded_settings)),
    )
    used = recorded_settings if settings is None else settings
    if start_with == "anew" and (idle := _private_idle_bytes(start)):
        memory = replace(memory, non_torch_bytes=memory.non_torch_bytes + idle)
        notes.append(f"{idle} B lie free in private pools of the beginning, and stay theirs under other settings")
    allocator = CachingAllocator(memory, used)
    if start_with == "recorded":
        alive = restore(allocator, start)
        result = replay(log.events, allocator, on_failure="skip", alive=alive)
    else:
        result = replay([*start_events(start), *log.events], allocator, on_failure="skip")
    contradictions = dict.fromkeys((*start.contradictions, *log.contradictions))
    if contradictions:
        notes.append(
            f"{len(contradictions)} entries do not fit together and were left out, first: {next(iter(contradictions))}"
        )
    replayed = parse_snapshot(allocator.snapshot()).segments_of(memory.index)
    return SnapshotReplay(
        settings=used, recorded=totals(segments), replayed=totals(replayed), replay=result, started_with=start_with,
        start_bytes=sum(block.requested_bytes for segment in start.segments for block in segment.blocks), notes=tuple(notes),
    )  # fmt: skip


def what_if(
    snapshot: Snapshot, settings: Mapping[str, str], *, device: int = 0, memory: DeviceMemory | None = None
) -> dict[str, SnapshotReplay]:
    """The history under each of several conf strings, by name, and as `recorded`.

    Raises AllocatorConfError for a conf string that PyTorch would refuse.
    """
    results = {"recorded": replay_snapshot(snapshot, device=device, memory=memory)}
    for name, conf in settings.items():
        results[name] = replay_snapshot(snapshot, device=device, settings=parse_alloc_conf(conf), memory=memory)
    return results


def totals(segments: Sequence[SnapshotSegment]) -> Totals:
    """Add up the segments of one device."""
    blocks = [block for segment in segments for block in segment.blocks]
    return Totals(
        reserved_bytes=sum(segment.total_bytes for segment in segments),
        allocated_bytes=sum(block.size_bytes for block in blocks if block.state == "active_allocated"),
        active_bytes=sum(block.size_bytes for block in blocks if block.is_active),
        largest_free_bytes=max((block.size_bytes for block in blocks if not block.is_active), default=0),
        num_segments=len(segments),
        segment_bytes=tuple(sorted(segment.total_bytes for segment in segments)),
    )


def _private_idle_bytes(start: StartState) -> int:
    """What lies free in the private pools of CUDA graphs when the history begins: a pool keeps its size while its graphs live."""
    return sum(
        segment.size_bytes - sum(block.size_bytes or block.requested_bytes for block in segment.blocks)
        for segment in start.segments
        if segment.pool_id != DEFAULT_POOL
    )


def _capacity(memory: DeviceMemory, settings: CachingSettings) -> int | None:
    """What could be reserved when the history was recorded; None if that is not known."""
    if memory.total_bytes == UNLIMITED_BYTES:
        return None
    fraction = settings.per_process_memory_fraction
    allowed = memory.total_bytes if fraction is None else int(fraction * memory.total_bytes)
    return min(allowed, memory.available_bytes)


def _memory(
    memory: DeviceMemory | None, start: StartState, trace: Sequence[SnapshotEntry], device: int
) -> tuple[DeviceMemory, list[str]]:
    """The device: as given, or as the first out-of-memory entry shows it."""
    if memory is not None:
        return replace(memory, index=device), []
    reserved = sum(segment.size_bytes for segment in start.segments)
    for entry in trace:
        if entry.action in ("segment_alloc", "segment_map"):
            reserved += entry.size_bytes
        elif entry.action in ("segment_free", "segment_unmap"):
            reserved -= entry.size_bytes
        elif entry.action == "oom" and entry.device_free_bytes is not None:
            total = reserved + entry.device_free_bytes
            note = (
                f"the capacity, {total} B, is what was reserved and free when memory ran out: without what others held"
            )
            return DeviceMemory(total_bytes=total, index=device), [note]
    note = "the capacity is not known: nothing can fail for lack of it; give it to see retries and failures"
    return DeviceMemory(total_bytes=UNLIMITED_BYTES, index=device), [note]
