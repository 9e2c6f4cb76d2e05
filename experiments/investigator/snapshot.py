"""The seam to PyTorch memory snapshots: what the investigator asks of one, whoever read it.

Reading a snapshot is not done here: it is a pickle, and takes a reader that runs no code. Accepted is anything with `segments`,
be they mappings with PyTorch's own names or objects with the names of `sim.memory.allocators.snapshot`.

**Source:** torch/cuda/_memory_viz.py; docs "Understanding CUDA Memory Usage".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .oom_message import OomMessage
from .sizes import Size

_PENDING = ("active_pending_free", "active_awaiting_free")
_NO_POOL = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFacts:
    """Bytes of one snapshot, over all its segments."""

    reserved: int
    allocated: int
    pending: int
    """Freed by the program, and kept until another stream is done."""
    inactive: int
    """Cached and free, in ordinary pools."""
    largest_inactive: int
    """The largest free block that an ordinary request could have."""
    private_free: int
    """Free blocks inside private pools (CUDA graphs): no ordinary request can have them."""
    private_reserved: int
    """Segments of private pools."""
    oom_bytes: int | None = None
    """What was tried in the last failure of the recorded history; None when there is none."""
    oom_free: int | None = None
    """Free on the device at that moment."""
    oom_frame: str = ""
    """Where it was asked for, as a frame of a traceback; empty when that was not recorded."""

    @property
    def oom_message(self) -> OomMessage | None:
        """The recorded failure as a message would have told it; None when none was recorded."""
        if self.oom_bytes is None:
            return None
        return OomMessage(
            line=0,
            tried=Size(self.oom_bytes, 0.0),
            free=None if self.oom_free is None else Size(self.oom_free, 0.0),
            allocated=Size(self.allocated, 0.0),
            unallocated=Size(self.inactive + self.pending, 0.0),
            private_pools=Size(self.private_free, 0.0) if self.private_reserved else None,
        )


def snapshot_facts(snapshot: Any) -> SnapshotFacts:
    """Add up `snapshot`.

    Raises TypeError for anything without a list of segments.
    """
    segments = _get(snapshot, "segments")
    if not isinstance(segments, Iterable):
        raise TypeError(f"a snapshot has a list of segments; {type(snapshot).__name__} has none")
    total: dict[str, int] = dict.fromkeys(
        ("reserved", "allocated", "pending", "inactive", "private_free", "private_reserved"), 0
    )
    largest = 0
    for segment in segments:
        size = int(_get(segment, "total_size", "total_bytes") or 0)
        private = tuple(_get(segment, "segment_pool_id", "pool_id") or _NO_POOL) != _NO_POOL
        total["reserved"] += size
        total["private_reserved"] += size if private else 0
        for block in _get(segment, "blocks") or ():
            held = int(_get(block, "size", "size_bytes") or 0)
            kind = _kind(str(_get(block, "state")), private)
            total[kind] += held
            largest = max(largest, held if kind == "inactive" else 0)
    tried, free, frame = _last_oom(snapshot)
    return SnapshotFacts(largest_inactive=largest, oom_bytes=tried, oom_free=free, oom_frame=frame, **total)


def _kind(state: str, private: bool) -> str:
    if state == "active_allocated":
        return "allocated"
    if state in _PENDING:
        return "pending"
    return "private_free" if private else "inactive"


def _last_oom(snapshot: Any) -> tuple[int | None, int | None, str]:
    """Size, free memory and place of the last `oom` entry of the history."""
    for trace in _get(snapshot, "device_traces", "traces") or ():
        for entry in reversed(list(trace)):
            if _get(entry, "action") == "oom":
                free = _get(entry, "device_free", "device_free_bytes", "addr")
                return int(_get(entry, "size", "size_bytes") or 0), None if free is None else int(free), _frames(entry)
    return None, None, ""


def _frames(entry: Any) -> str:
    """The stack of an entry as a traceback has it, outermost first; its reader may have kept the innermost frame only."""
    frames = _get(entry, "frames")
    if frames:
        return "\n".join(
            f'  File "{_get(frame, "filename")}", line {_get(frame, "line") or 0}, in {_get(frame, "name")}'
            for frame in reversed(list(frames))
        )
    match = re.fullmatch(r"(?P<file>.+):(?P<line>\d+) (?P<name>\S+)", str(_get(entry, "tag") or ""))
    return f'  File "{match["file"]}", line {match["line"]}, in {match["name"]}' if match else ""


def _get(item: Any, *names: str) -> Any:
    """The first of `names` that the item has, as a mapping or an object; None without any."""
    for name in names:
        value = item.get(name) if isinstance(item, Mapping) else getattr(item, name, None)
        if value is not None:
            return value
    return None
