"""PyTorch's caching allocator: the order in which it looks for memory, and the face it shows to a replay.

What it knows: sizes, streams, pools, settings, the device's capacity. What it must not know: which engine asks, or time
(it keeps time stamps for its history and decides nothing by them).
**Source:** `DeviceCachingAllocator::malloc` and `free` of c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.5 to 2.13.
"""

from __future__ import annotations

from typing import Any

from .base import DuplicateAllocationError, MemoryState, NoRoom, Placement, UnknownAllocationError
from .caching_blocks import Block, BlockPool, DeviceMemory
from .caching_events import PendingFrees
from .caching_expandable import find_expandable_fit, map_for
from .caching_oom import out_of_memory
from .caching_release import collect_garbage, release_cached, release_oversize
from .caching_settings import CachingSettings
from .caching_sizes import is_small, round_size, segment_size, should_split
from .caching_snapshot import snapshot_of
from .caching_state import CachingState, TraceRecord
from .events import DEFAULT_POOL, PoolId


class CachingAllocator:
    """The allocator behind `torch.empty(..., device="cuda")`, byte for byte, without a device.

    Differences from the real one: addresses are invented (their order is that of reservation), events pass when the log
    says so, allocations into a private pool behave as under CUDA graph capture (no events are processed and no cache is
    released for them), and OOM-prevention callbacks do not exist.
    """

    name = "PyTorch caching allocator"

    def __init__(self, memory: DeviceMemory, settings: CachingSettings | None = None) -> None:
        self.settings = CachingSettings() if settings is None else settings
        self.core = CachingState(self.settings, memory)
        self.pending = PendingFrees(self.core)
        self.alive: dict[str, Block] = {}
        """Blocks handed out, by allocation."""
        self._freeable: set[PoolId] = set()
        self._requested_bytes = 0

    # -- asking ---------------------------------------------------------------------------------------------------

    def allocate(
        self, allocation_id: str, size_bytes: int, *, stream: int = 0, pool: PoolId = DEFAULT_POOL, tag: str = ""
    ) -> Placement | NoRoom:
        """Find a block. When none is found, cached memory has been given back to the device and pending frees waited for,
        as in PyTorch; nothing that is alive has changed.

        Raises ValueError for less than one byte and DuplicateAllocationError for an id that is alive.
        """
        if size_bytes < 1:
            raise ValueError(f"allocation {allocation_id!r} asks for {size_bytes} bytes; at least 1 can be asked for")
        if allocation_id in self.alive or self.pending.is_waiting(allocation_id):
            raise DuplicateAllocationError(allocation_id)
        size = round_size(size_bytes, self.settings)
        blocks = self.core.pool(pool, small=is_small(size))
        block = self._find(blocks, stream, size)
        if block is None:
            return out_of_memory(self.core, stream, size, pool, tag)
        self._hand_out(block, size, size_bytes, allocation_id, tag)
        return Placement(address=self.alive[allocation_id].address, size_bytes=self.alive[allocation_id].size)

    def _find(self, pool: BlockPool, stream: int, size: int) -> Block | None:
        """The order of §5.2: events, pool, garbage, device, oversize blocks, all cached blocks, device again."""
        capturing = pool.pool_id != DEFAULT_POOL
        if not capturing:
            self.pending.process()
        block = self._from_pool(pool, stream, size)
        if block is not None:
            return block
        if self.settings.collects_garbage:
            collect_garbage(self.core)
        block = self._from_device(pool, stream, size)
        if block is None and release_oversize(self.core, pool, stream, size):
            block = self._from_device(pool, stream, size)
        if block is None and not capturing:
            self._release_cached()
            if self.settings.search_again_after_events:
                block = self._from_pool(pool, stream, size)
            if block is None:
                self.core.stats.num_alloc_retries += 1
                block = self._from_device(pool, stream, size)
        return block

    def _from_pool(self, pool: BlockPool, stream: int, size: int) -> Block | None:
        """The best fitting free block of the stream, taken out of the pool, unless it is reserved for larger requests."""
        if self.settings.collects_garbage:
            pool.searches += 1
        if self.settings.expandable_segments:
            block = find_expandable_fit(pool, stream, size)
        else:
            block = pool.best_fit(stream, size)
            if block is not None and block.virtual is not None:  # restored from a time when segments were expandable
                block = next((other for other in pool.fitting(stream, size) if other.virtual is None), None)
        if block is None:
            return None
        limit = self.settings.max_split_size_bytes
        if limit is not None:
            if size < limit <= block.size:
                return None  # oversize blocks are kept for oversize requests
            if size >= limit and block.size >= size + self.settings.max_non_split_rounding_bytes:
                return None  # too much would be wasted, as it may not be split
        pool.remove(block)
        return block

    def _from_device(self, pool: BlockPool, stream: int, size: int) -> Block | None:
        """A new segment, or new pages of an expandable one, within what the memory fraction allows."""
        segment = segment_size(size, self.settings)
        allowed = self.core.allowed_bytes
        if allowed is not None and self.core.reserved_bytes + segment > allowed:
            return None
        if self.settings.expandable_segments:
            return map_for(self.core, pool, stream, size)
        return self.core.malloc_segment(pool, stream, segment)

    def _hand_out(self, block: Block, size: int, requested: int, allocation_id: str, tag: str) -> None:
        was_split = block.is_split
        split = should_split(block.size, size, small=block.pool.small, settings=self.settings)
        if split:
            block = self.core.split(block, size)
        self.core.activate(block, requested, was_split=was_split and not split, allocation_id=allocation_id, tag=tag)
        self.alive[allocation_id] = block
        self._requested_bytes += requested

    # -- giving back ----------------------------------------------------------------------------------------------

    def free(self, allocation_id: str) -> None:
        """Give an allocation back; it waits for the streams recorded on it. Raises UnknownAllocationError."""
        block = self._leave(allocation_id)
        if block.stream_uses:
            self.pending.add(block)
        else:
            self.core.return_block(block)

    def request_free(self, allocation_id: str) -> None:
        """Give an allocation back that waits until `complete_free`, or until the allocator waits for all events."""
        block = self._leave(allocation_id)
        block.stream_uses.clear()
        self.pending.add_observed(allocation_id, block)

    def complete_free(self, allocation_id: str) -> None:
        """The events of an allocation given back by `request_free` have passed and were seen."""
        self.pending.observed(allocation_id)

    def record_stream(self, allocation_id: str, stream: int) -> None:
        """`tensor.record_stream`: the allocation is also used by `stream`. Raises UnknownAllocationError."""
        block = self.alive.get(allocation_id)
        if block is None:
            raise UnknownAllocationError(allocation_id, "used by a stream")
        if stream != block.stream:
            block.stream_uses.add(stream)

    def stream_done(self, stream: int) -> None:
        """All work queued on `stream` so far has finished; seen at the next allocation."""
        self.pending.stream_done(stream)

    def empty_cache(self) -> None:
        """`torch.cuda.empty_cache()`: wait for pending frees, then return all cached memory that can be returned."""
        self._release_cached()

    def release_pool(self, pool: PoolId) -> None:
        """The last CUDA graph that used a private pool is gone: its cached memory may be returned from now on."""
        self._freeable.add(pool)

    def _release_cached(self) -> None:
        self.pending.synchronize()
        for pool_id in (DEFAULT_POOL, *sorted(self._freeable)):
            release_cached(self.core, [self.core.pool(pool_id, small=False), self.core.pool(pool_id, small=True)])

    def _leave(self, allocation_id: str) -> Block:
        block = self.alive.pop(allocation_id, None)
        if block is None:
            raise UnknownAllocationError(allocation_id, "given back")
        self._requested_bytes -= block.requested
        self.core.deactivate(block)
        return block

    # -- looking --------------------------------------------------------------------------------------------------

    def advance(self, time_s: float) -> None:
        """It is now `time_s`: the time stamp of the history."""
        self.core.time_us = round(time_s * 1e6)

    def adopt(self, allocation_id: str, block: Block) -> None:
        """An allocation that was made before (a restored layout); its block is active already."""
        self.alive[allocation_id] = block
        self._requested_bytes += block.requested

    def state(self) -> MemoryState:
        """The memory now."""
        stats = self.core.stats
        allocated = stats.current("allocated_bytes")
        pools = self.core.pools.values()
        return MemoryState(
            requested_bytes=self._requested_bytes,
            allocated_bytes=allocated,
            reserved_bytes=self.core.reserved_bytes,
            free_bytes=sum(pool.free_bytes for pool in pools),
            largest_free_bytes=max((pool.largest_bytes for pool in pools), default=0),
            pending_bytes=stats.current("active_bytes") - allocated,
            device_free_bytes=self.core.device_free_bytes,
        )

    def memory_stats(self) -> dict[str, int]:
        """What `torch.cuda.memory_stats()` returns."""
        return self.core.stats.as_dict()

    def snapshot(self) -> dict[str, Any]:
        """What `torch.cuda.memory._snapshot()` returns: pickle it to open it at pytorch.org/memory_viz."""
        return snapshot_of(self.core)

    @property
    def history(self) -> tuple[TraceRecord, ...]:
        """Everything that happened, as PyTorch's memory history records it."""
        return tuple(self.core.trace)
