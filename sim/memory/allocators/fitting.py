"""Allocators that look for one hole large enough: contiguous reservation (first fit) and best fit with coalescing."""

from __future__ import annotations

from .arena import ArenaAllocator
from .base import NoRoom, Placement, round_up
from .events import DEFAULT_POOL, PoolId
from .holes import Holes

GRAIN_BYTES = 512
"""Alignment of an allocation, as GPU allocators have it."""


class Contiguous(ArenaAllocator):
    """One contiguous range an allocation, at the lowest address where it fits.

    With `reserve_bytes` every allocation gets that much, whatever it asks for: the worst case is reserved, as engines did
    before paging. Source: Orca and FasterTransformer as the vLLM paper (SOSP 2023, §3.1) describes them.
    """

    name = "contiguous"

    def __init__(self, capacity_bytes: int, *, reserve_bytes: int = 0, grain_bytes: int = GRAIN_BYTES) -> None:
        super().__init__(capacity_bytes)
        self.reserve_bytes = reserve_bytes
        self.grain_bytes = grain_bytes
        self._holes = Holes(capacity_bytes)

    def allocate(
        self, allocation_id: str, size_bytes: int, *, stream: int = 0, pool: PoolId = DEFAULT_POOL, tag: str = ""
    ) -> Placement | NoRoom:
        """Set memory aside. Raises ValueError for a request above `reserve_bytes`: the reservation would not be a worst case."""
        if self.reserve_bytes and size_bytes > self.reserve_bytes:
            raise ValueError(
                f"allocation {allocation_id!r} asks for {size_bytes} B, more than the worst case of {self.reserve_bytes} B "
                "that is reserved for each"
            )
        return super().allocate(allocation_id, size_bytes, stream=stream, pool=pool, tag=tag)

    def _size_for(self, size_bytes: int) -> int:
        return round_up(max(size_bytes, self.reserve_bytes), self.grain_bytes)

    def _find(self, size_bytes: int) -> int | None:
        return self._holes.first_fit(size_bytes)

    def _take(self, size_bytes: int, allocation_id: str) -> int | None:
        start = self._find(size_bytes)
        if start is not None:
            self._holes.take(start, size_bytes)
        return start

    def _give_back(self, placement: Placement, allocation_id: str) -> None:
        self._holes.give_back(placement.address, placement.size_bytes)

    def _largest_free_bytes(self) -> int:
        return self._holes.largest

    def holes(self) -> list[tuple[int, int]]:
        """`(address, size in bytes)` of each free interval, by address."""
        return list(self._holes)


class BestFit(Contiguous):
    """One contiguous range an allocation, in the smallest hole that holds it; freed neighbours are joined at once.

    Source: the textbook algorithm (Knuth, The Art of Computer Programming, vol. 1, §2.5).
    """

    name = "best fit"

    def __init__(self, capacity_bytes: int, *, grain_bytes: int = GRAIN_BYTES) -> None:
        super().__init__(capacity_bytes, grain_bytes=grain_bytes)

    def _find(self, size_bytes: int) -> int | None:
        return self._holes.best_fit(size_bytes)
