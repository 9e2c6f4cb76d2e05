"""The buddy allocator: every block is a power of two, and is joined with its twin as soon as both are free."""

from __future__ import annotations

from bisect import bisect_left, insort

from .arena import ArenaAllocator
from .base import Placement


class Buddy(ArenaAllocator):
    """Blocks of `min_block_bytes · 2^k`, each aligned to its own size.

    A request is rounded up to such a block; the smallest free one that is large enough, at the lowest address, is halved
    until it fits. A capacity that is no power of two is cut into the largest aligned blocks from the left; what is left
    over, less than `min_block_bytes`, is not part of the arena. Source: Knowlton (CACM 1965); Knuth, TAOCP vol. 1, §2.5.
    """

    name = "buddy"

    def __init__(self, capacity_bytes: int, *, min_block_bytes: int = 512) -> None:
        if min_block_bytes < 1 or min_block_bytes & (min_block_bytes - 1):
            raise ValueError(f"the smallest block must be a power of two, not {min_block_bytes} bytes")
        if capacity_bytes < min_block_bytes:
            raise ValueError(f"{capacity_bytes} bytes do not hold one block of {min_block_bytes} bytes")
        super().__init__(capacity_bytes // min_block_bytes * min_block_bytes)
        self.min_block_bytes = min_block_bytes
        self._free: dict[int, list[int]] = {}  # block size -> addresses of free blocks, ascending
        address = 0
        size = 1 << (self.capacity_bytes.bit_length() - 1)
        while size >= min_block_bytes:
            if address + size <= self.capacity_bytes:
                self._free.setdefault(size, []).append(address)
                address += size
            size >>= 1

    def free_blocks(self) -> list[tuple[int, int]]:
        """`(address, size in bytes)` of each free block, by address."""
        return sorted((address, size) for size, addresses in self._free.items() for address in addresses)

    def _size_for(self, size_bytes: int) -> int:
        return max(self.min_block_bytes, 1 << (size_bytes - 1).bit_length())

    def _take(self, size_bytes: int, allocation_id: str) -> int | None:
        fitting = [size for size, addresses in self._free.items() if addresses and size >= size_bytes]
        if not fitting:
            return None
        size = min(fitting)
        address = self._free[size].pop(0)
        while size > size_bytes:  # keep the left half, the right one becomes free
            size >>= 1
            insort(self._free.setdefault(size, []), address + size)
        return address

    def _give_back(self, placement: Placement, allocation_id: str) -> None:
        address, size = placement.address, placement.size_bytes
        while True:
            # Blocks are aligned to their size, so twins differ in exactly one bit of the address. The blocks the arena began
            # with have no twin: no two of them have one size.
            twin = address ^ size
            addresses = self._free.get(size, [])
            index = bisect_left(addresses, twin)
            if index == len(addresses) or addresses[index] != twin:
                break
            del addresses[index]
            address = min(address, twin)
            size <<= 1
        insort(self._free.setdefault(size, []), address)

    def _largest_free_bytes(self) -> int:
        return max((size for size, addresses in self._free.items() if addresses), default=0)
