"""A paged pool seen as an allocator: any free block serves any request, so nothing has to be contiguous."""

from __future__ import annotations

from sim.core.blocks import BlockPool

from .arena import ArenaAllocator
from .base import Placement


class PagedPool(ArenaAllocator):
    """Blocks of `block_bytes`, taken from the engine's own `BlockPool`. A request gets as many as it needs, anywhere.

    All that is wasted is the rest of the last block of each allocation, and what the capacity leaves over. The largest
    request that fits is everything that is free, so external fragmentation is 0 by construction.
    Source: PagedAttention (Kwon et al., SOSP 2023, §4).
    """

    name = "paged"

    def __init__(self, capacity_bytes: int, *, block_bytes: int) -> None:
        if block_bytes < 1 or capacity_bytes < block_bytes:
            raise ValueError(f"{capacity_bytes} bytes do not hold one block of {block_bytes} bytes")
        super().__init__(capacity_bytes // block_bytes * block_bytes)
        self.block_bytes = block_bytes
        self._pool = BlockPool(capacity_bytes // block_bytes)
        self._blocks: dict[str, list[int]] = {}

    def blocks_of(self, allocation_id: str) -> list[int]:
        """The ids of the blocks an allocation holds, from 1. Raises KeyError if it is not alive."""
        return list(self._blocks[allocation_id])

    def _size_for(self, size_bytes: int) -> int:
        return -(-size_bytes // self.block_bytes) * self.block_bytes

    def _take(self, size_bytes: int, allocation_id: str) -> int | None:
        blocks = self._pool.allocate(size_bytes // self.block_bytes)
        if blocks is None:
            return None
        self._blocks[allocation_id] = blocks
        return (blocks[0] - 1) * self.block_bytes

    def _give_back(self, placement: Placement, allocation_id: str) -> None:
        self._pool.release(self._blocks.pop(allocation_id), allocation_id)

    def _largest_free_bytes(self) -> int:
        return self._pool.num_free * self.block_bytes
