"""Why cached memory was returned to the device, as far as a history tells: asked for by the program, or to make room.

PyTorch records the same entries for `torch.cuda.empty_cache()` and for the last resort of a failing allocation. Which it was
matters for a replay: the program's call belongs into the log, the allocator's own doing does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .caching_settings import CachingSettings
from .caching_sizes import is_small, round_size
from .snapshot import SnapshotEntry

RELEASES = ("segment_free", "segment_unmap")
RESERVES = ("segment_alloc", "segment_map")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseRun:
    """Waits that ended, then memory that was returned, without anything between: `[start, released)` and `[released, end)`."""

    start: int
    """First entry of a wait that ended."""
    released: int
    """First entry of memory returned."""
    end: int
    """First entry after the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What decides whether an allocation needed room."""

    settings: CachingSettings
    """As recorded."""
    capacity_bytes: int | None
    """What could be reserved; None if it is not known."""


def release_run(trace: Sequence[SnapshotEntry], start: int) -> ReleaseRun | None:
    """The run that begins at `start`; None if no memory is returned there, and no wait ends right before a failure."""
    released = start
    while released < len(trace) and trace[released].action == "free_completed":
        released += 1
    end = released
    while end < len(trace) and trace[end].action in RELEASES:
        end += 1
    fails = end < len(trace) and trace[end].action == "oom"
    if end > released or (fails and released > start):
        return ReleaseRun(start=start, released=released, end=end)
    return None


def makes_room(
    trace: Sequence[SnapshotEntry], run: ReleaseRun, reserved_bytes: int, circumstances: Circumstances
) -> bool:
    """Whether the allocator returned the memory for the allocation that follows, with `reserved_bytes` held before.

    It did if a failure follows, or new memory that would not have fitted otherwise. It did not if what was returned would
    have served that allocation: cached memory is used before it is returned. With an unknown capacity the answer is no.
    """
    following = trace[run.end] if run.end < len(trace) else None
    capacity = circumstances.capacity_bytes
    if following is None or capacity is None or following.action not in (*RESERVES, "oom"):
        return False
    if following.action == "oom":
        return True
    if circumstances.settings.collects_garbage:
        return True
    if reserved_bytes + following.size_bytes <= capacity:
        return False
    asked = next((entry for entry in trace[run.end :] if entry.action in ("alloc", "oom")), None)
    return asked is None or not _would_have_served(trace, run, asked, circumstances.settings)


def _would_have_served(
    trace: Sequence[SnapshotEntry], run: ReleaseRun, asked: SnapshotEntry, settings: CachingSettings
) -> bool:
    size = round_size(asked.size_bytes, settings)
    limit = settings.max_split_size_bytes
    waited = [entry.address for entry in trace[run.start : run.released]]
    for entry in trace[run.released : run.end]:
        end = entry.address + entry.size_bytes
        if any(entry.address <= address < end for address in waited):
            continue  # not available before the wait was over
        alike = entry.stream == asked.stream and entry.pool_id == asked.pool_id
        same_kind = is_small(size) == (entry.size_bytes == 2 << 20)
        oversize = limit is not None and entry.size_bytes >= limit
        if alike and same_kind and entry.size_bytes >= size and not oversize:
            return True
    return False
