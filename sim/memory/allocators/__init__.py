"""Allocators a paged pool is compared with, one log format for all of them, and PyTorch memory snapshots replayed."""

from .base import Allocator, DuplicateAllocationError, MemoryState, NoRoom, Placement, UnknownAllocationError
from .buddy import Buddy
from .caching import CachingAllocator
from .caching_blocks import DeviceMemory
from .caching_settings import AllocatorConfError, CachingSettings, parse_alloc_conf
from .events import AllocationEvent, AllocationLogError, check_log, peak_requested_bytes
from .fitting import BestFit, Contiguous
from .kv_log import KV_SCHEMES, KvSpan, kv_log
from .paged import PagedPool
from .replay import Failure, Replay, Sample, replay
from .snapshot import Snapshot, parse_snapshot, read_snapshot
from .snapshot_pickle import SnapshotError
from .snapshot_replay import SnapshotReplay, Totals, replay_snapshot, settings_of, what_if
from .why_paged import Holding, compare_holdings

__all__ = [
    "KV_SCHEMES",
    "AllocationEvent",
    "AllocationLogError",
    "Allocator",
    "AllocatorConfError",
    "BestFit",
    "Buddy",
    "CachingAllocator",
    "CachingSettings",
    "Contiguous",
    "DeviceMemory",
    "DuplicateAllocationError",
    "Failure",
    "Holding",
    "KvSpan",
    "MemoryState",
    "NoRoom",
    "PagedPool",
    "Placement",
    "Replay",
    "Sample",
    "Snapshot",
    "SnapshotError",
    "SnapshotReplay",
    "Totals",
    "UnknownAllocationError",
    "check_log",
    "compare_holdings",
    "kv_log",
    "parse_alloc_conf",
    "parse_snapshot",
    "peak_requested_bytes",
    "read_snapshot",
    "replay",
    "replay_snapshot",
    "settings_of",
    "what_if",
]
