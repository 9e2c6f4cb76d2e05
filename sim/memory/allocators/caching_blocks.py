"""PyTorch's caching allocator, data: blocks, the pools of free ones, and the device they come from.

**Source:** `Block`, `BlockPool` and `ExpandableSegment` of c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.5 to 2.13.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

from .caching_sizes import SMALL_SEGMENT_BYTES
from .events import PoolId


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The device an allocator takes its memory from, and what others hold of it. All sizes in bytes."""

    total_bytes: int
    """Capacity as CUDA reports it."""
    non_torch_bytes: int = 0
    """Held by this process outside the allocator: context, libraries, communication buffers."""
    other_processes: tuple[tuple[int, int], ...] = ()
    """`(process id, bytes)` of other processes on the device."""
    index: int = 0
    """Number of the device, for messages."""
    shows_processes: bool = True
    """Whether the driver says who holds memory (NVML is there): a part of the out-of-memory message."""

    @property
    def available_bytes(self) -> int:
        """What the allocator can reserve at most."""
        return self.total_bytes - self.non_torch_bytes - sum(held for _, held in self.other_processes)


class Block:
    """A piece of a segment: `[address, address + size)`. Neighbours of one segment are linked."""

    __slots__ = (
        "address", "size", "requested", "stream", "pool", "allocated", "mapped", "prev", "next",
        "event_count", "stream_uses", "virtual", "gc_base", "allocation_id", "tag",
    )  # fmt: skip

    def __init__(
        self, *, address: int, size: int, stream: int, pool: BlockPool, virtual: VirtualRange | None = None
    ) -> None:
        self.address = address
        self.size = size
        self.requested = 0
        self.stream = stream
        self.pool = pool
        self.allocated = False
        self.mapped = True
        """Backed by memory; False only for a part of a virtual range."""
        self.prev: Block | None = None
        self.next: Block | None = None
        self.event_count = 0
        """Events of other streams that have to pass before the block is free."""
        self.stream_uses: set[int] = set()
        self.virtual = virtual
        self.gc_base = 0
        self.allocation_id = ""
        self.tag = ""

    @property
    def is_split(self) -> bool:
        """Whether it shares its segment with other blocks."""
        return self.prev is not None or self.next is not None

    @property
    def is_active(self) -> bool:
        """In use: allocated, or given back and waiting for a stream."""
        return self.allocated or self.event_count > 0 or bool(self.stream_uses)

    def insert_after(self, before: Block | None, after: Block | None) -> None:
        """Link the block in between two neighbours."""
        self.prev, self.next = before, after
        if before is not None:
            before.next = self
        if after is not None:
            after.prev = self


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualRange:
    """The address range of an expandable segment, backed by memory page by page."""

    address: int
    """First byte."""
    size: int
    """Bytes of address space: 1 1/8 of the device, in whole pages."""
    page_bytes: int
    """2 MiB for the small pool, the large segment size (20 MiB) for the large one."""


class BlockPool:
    """Free blocks of one kind (small or large) of one memory pool, each stream for itself, ordered by size and address."""

    def __init__(self, pool_id: PoolId, *, small: bool, page_bytes: int) -> None:
        self.pool_id = pool_id
        self.small = small
        self.page_bytes = SMALL_SEGMENT_BYTES if small else page_bytes
        self.searches = 0
        """Searches so far, counted for garbage collection."""
        self.free_bytes = 0
        """Σ of the free blocks."""
        self._free: dict[int, list[tuple[int, int, Block]]] = {}
        self._unmapped: dict[int, list[tuple[int, Block]]] = {}

    def __iter__(self) -> Iterator[Block]:
        """Free blocks by stream, size and address."""
        for stream in sorted(self._free):
            for _, _, block in list(self._free[stream]):
                yield block

    def insert(self, block: Block) -> None:
        """A block becomes free."""
        block.gc_base = self.searches
        self.free_bytes += block.size
        insort(self._free.setdefault(block.stream, []), (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        """A free block is taken. Its size must be the one it was inserted with."""
        self.free_bytes -= block.size
        blocks = self._free[block.stream]
        del blocks[bisect_left(blocks, (block.size, block.address))]

    def fitting(self, stream: int, size: int) -> list[Block]:
        """The free blocks of a stream that hold `size`, the best fit first."""
        blocks = self._free.get(stream, [])
        return [block for _, _, block in blocks[bisect_left(blocks, (size, 0)) :]]

    def best_fit(self, stream: int, size: int) -> Block | None:
        """The smallest free block of a stream that holds `size`; of equals the one with the lowest address."""
        blocks = self._free.get(stream, [])
        index = bisect_left(blocks, (size, 0))
        return blocks[index][2] if index < len(blocks) else None

    def descending(self, stream: int) -> list[Block]:
        """The free blocks of a stream, the largest first."""
        return [block for _, _, block in reversed(self._free.get(stream, []))]

    @property
    def largest_bytes(self) -> int:
        """Size of the largest free block of any stream, 0 if there is none."""
        return max((blocks[-1][0] for blocks in self._free.values() if blocks), default=0)

    # -- address space that nothing backs (expandable segments) ---------------------------------------------------

    def insert_unmapped(self, block: Block) -> None:
        """A part of a virtual range that nothing backs."""
        insort(self._unmapped.setdefault(block.stream, []), (block.address, block))

    def remove_unmapped(self, block: Block) -> None:
        """It is backed now, or joined with another."""
        blocks = self._unmapped[block.stream]
        del blocks[bisect_left(blocks, (block.address,))]

    def unmapped(self, stream: int) -> list[Block]:
        """Unbacked parts of a stream's ranges, by address."""
        return [block for _, block in self._unmapped.get(stream, [])]
