"""PyTorch's caching allocator, state: segments of one device, cut into blocks, and the elementary changes to them.

Each function here is one step that the allocator takes; the order in which it takes them is in `caching.py`.
**Source:** c10/cuda/CUDACachingAllocator.cpp (`alloc_block`, `alloc_found_block`, `free_block`, `try_merge_blocks`,
`release_block`), PyTorch 2.5 to 2.13.
"""

from __future__ import annotations

from dataclasses import dataclass

from .base import round_up
from .caching_blocks import Block, BlockPool, DeviceMemory
from .caching_settings import CachingSettings
from .caching_sizes import LARGE_GRAIN_BYTES
from .caching_stats import DeviceStats
from .events import PoolId

FIRST_ADDRESS = 0x7F_0000_0000_00
"""Where invented addresses start; only their order means anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRecord:
    """One entry of the allocator's own history, as PyTorch records it."""

    action: str
    """alloc, free_requested, free_completed, segment_alloc, segment_free, segment_map, segment_unmap or oom."""
    address: int
    """First byte; for `oom` the free bytes of the device."""
    size_bytes: int
    """Bytes requested (alloc, free_*), of the segment (segment_*) or rounded (oom)."""
    stream: int
    """The block's stream."""
    time_us: int
    """Microseconds since the allocator's origin of time."""
    pool_id: PoolId
    """The memory pool."""
    tag: str
    """Who asked."""


class CachingState:
    """The allocator's view of one device. Addresses are invented and never used again after they were given back."""

    def __init__(self, settings: CachingSettings, memory: DeviceMemory) -> None:
        self.settings = settings
        self.memory = memory
        self.stats = DeviceStats(settings.max_split_size_bytes)
        self.reserved_bytes = 0
        self.time_us = 0
        self.trace: list[TraceRecord] = []
        self.heads: dict[int, Block] = {}
        """First block of every segment and of every virtual range, by address."""
        self.pools: dict[tuple[PoolId, bool], BlockPool] = {}
        """Pools by id and whether they are the small one."""
        self._next_address = FIRST_ADDRESS

    # -- the device -----------------------------------------------------------------------------------------------

    @property
    def device_free_bytes(self) -> int:
        """Bytes of the device that nobody holds."""
        return self.memory.available_bytes - self.reserved_bytes

    @property
    def allowed_bytes(self) -> int | None:
        """What a memory fraction allows to reserve; None without one."""
        fraction = self.settings.per_process_memory_fraction
        return None if fraction is None else int(fraction * self.memory.total_bytes)

    def pool(self, pool_id: PoolId, *, small: bool) -> BlockPool:
        """The pool of that id and kind, made on first use."""
        key = (pool_id, small)
        if key not in self.pools:
            self.pools[key] = BlockPool(pool_id, small=small, page_bytes=self.settings.large_segment_size_bytes)
        return self.pools[key]

    def new_address(self, size: int) -> int:
        """Fresh address space of `size` bytes."""
        address = self._next_address
        self._next_address += round_up(size, LARGE_GRAIN_BYTES)
        return address

    def keep_clear_of(self, address: int) -> None:
        """Never give out addresses below `address`: they are taken by a recorded layout."""
        self._next_address = max(self._next_address, round_up(address, LARGE_GRAIN_BYTES))

    def record(
        self, action: str, address: int, size_bytes: int, *, stream: int, pool_id: PoolId, tag: str = ""
    ) -> None:
        """Write one entry of the history."""
        self.trace.append(
            TraceRecord(
                action=action, address=address, size_bytes=size_bytes, stream=stream, time_us=self.time_us, pool_id=pool_id, tag=tag
            )
        )  # fmt: skip

    # -- segments -------------------------------------------------------------------------------------------------

    def is_oversize(self, size: int) -> bool:
        """Whether `max_split_size` forbids to split a block of this size."""
        return self.settings.max_split_size_bytes is not None and size >= self.settings.max_split_size_bytes

    def malloc_segment(self, pool: BlockPool, stream: int, size: int) -> Block | None:
        """cudaMalloc: a new segment as one block, not in the pool; None if the device has no room."""
        if size > self.device_free_bytes:
            return None
        return self.add_segment(pool, stream, size, self.new_address(size))

    def add_segment(self, pool: BlockPool, stream: int, size: int, address: int) -> Block:
        """A new segment at a known address."""
        block = Block(address=address, size=size, stream=stream, pool=pool)
        self.heads[address] = block
        self.count_reserved(pool, size)
        self.stats.add("segment", 1, small=pool.small)
        if self.is_oversize(size):
            self.stats.oversize_segments.add(1)
        self.stats.num_device_alloc += 1
        self.record("segment_alloc", address, size, stream=stream, pool_id=pool.pool_id)
        return block

    def free_segment(self, block: Block) -> None:
        """cudaFree: a segment that is one free block goes back to the device."""
        pool = block.pool
        pool.remove(block)
        del self.heads[block.address]
        self.count_reserved(pool, -block.size)
        self.stats.add("segment", -1, small=pool.small)
        if self.is_oversize(block.size):
            self.stats.oversize_segments.add(-1)
        self.stats.num_device_free += 1
        self.record("segment_free", block.address, block.size, stream=block.stream, pool_id=pool.pool_id)

    def count_reserved(self, pool: BlockPool, amount: int) -> None:
        """Reserved memory grew, or shrank, by `amount`."""
        self.reserved_bytes += amount
        self.stats.reserve(amount, small=pool.small, pool_id=pool.pool_id)

    # -- blocks ---------------------------------------------------------------------------------------------------

    def split(self, block: Block, size: int) -> Block:
        """Cut a block that is in no pool: returns the left part of `size`; the right part becomes free."""
        was_split = block.is_split
        left = Block(address=block.address, size=size, stream=block.stream, pool=block.pool, virtual=block.virtual)
        left.insert_after(block.prev, block)
        if left.address in self.heads:
            self.heads[left.address] = left
        block.address += size
        block.size -= size
        block.pool.insert(block)
        if block.virtual is None:
            small = block.pool.small
            if was_split:
                self.stats.add("inactive_split_bytes", -size, small=small)
            else:
                self.stats.add("inactive_split_bytes", block.size, small=small)
                self.stats.add("inactive_split", 1, small=small)
        return left

    def activate(self, block: Block, requested: int, *, was_split: bool, allocation_id: str, tag: str) -> None:
        """A block that is in no pool is handed out. `was_split`: it is used whole, and was a part before."""
        small = block.pool.small
        if was_split and block.virtual is None:
            self.stats.add("inactive_split_bytes", -block.size, small=small)
            self.stats.add("inactive_split", -1, small=small)
        block.allocated = True
        block.requested, block.allocation_id, block.tag = requested, allocation_id, tag
        self.record("alloc", block.address, requested, stream=block.stream, pool_id=block.pool.pool_id, tag=tag)
        for name, amount in (
            ("allocation", 1), ("allocated_bytes", block.size), ("active", 1), ("active_bytes", block.size), ("requested_bytes", requested)
        ):  # fmt: skip
            self.stats.add(name, amount, small=small)
        if self.is_oversize(block.size):
            self.stats.oversize_allocations.add(1)

    def deactivate(self, block: Block) -> None:
        """The program gave a block back; it stays active until nobody reads it any more."""
        block.allocated = False
        small = block.pool.small
        self.stats.add("allocation", -1, small=small)
        self.stats.add("allocated_bytes", -block.size, small=small)
        self.record(
            "free_requested",
            block.address,
            block.requested,
            stream=block.stream,
            pool_id=block.pool.pool_id,
            tag=block.tag,
        )
        if self.is_oversize(block.size):
            self.stats.oversize_allocations.add(-1)

    def return_block(self, block: Block) -> None:
        """A block nobody reads joins its pool, merged with free neighbours of its segment."""
        pool, original, requested = block.pool, block.size, block.requested
        self.record(
            "free_completed", block.address, requested, stream=block.stream, pool_id=pool.pool_id, tag=block.tag
        )
        split_blocks = split_bytes = 0
        for neighbour in (block.prev, block.next):
            merged = self.merge(block, neighbour)
            if merged:
                split_blocks -= 1
                split_bytes -= merged
        block.requested, block.allocation_id, block.tag = 0, "", ""
        pool.insert(block)
        if block.is_split:
            split_blocks += 1
            split_bytes += block.size
        if block.virtual is None:
            self.stats.add("inactive_split", split_blocks, small=pool.small)
            self.stats.add("inactive_split_bytes", split_bytes, small=pool.small)
        for name, amount in (("active", 1), ("active_bytes", original), ("requested_bytes", requested)):
            self.stats.add(name, -amount, small=pool.small)

    def merge(self, block: Block, neighbour: Block | None) -> int:
        """Join a block that is in no pool with a free neighbour that is alike mapped; the bytes gained, or 0."""
        if neighbour is None or neighbour.is_active or neighbour.mapped != block.mapped:
            return 0
        if neighbour.mapped:
            block.pool.remove(neighbour)
        else:
            block.pool.remove_unmapped(neighbour)
        if block.prev is neighbour:
            block.address = neighbour.address
            block.insert_after(neighbour.prev, block.next)
            if block.address in self.heads:
                self.heads[block.address] = block
        else:
            block.insert_after(block.prev, neighbour.next)
        block.size += neighbour.size
        return neighbour.size


def chain(head: Block) -> list[Block]:
    """All blocks of a segment, or of a virtual range, from its first."""
    blocks: list[Block] = []
    block: Block | None = head
    while block is not None:
        blocks.append(block)
        block = block.next
    return blocks
