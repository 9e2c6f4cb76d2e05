"""Holes: the free intervals of a range of memory, neighbours always joined."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator


class Holes:
    """The free intervals `[start, start + size)` of `[0, capacity_bytes)`; no two of them touch."""

    def __init__(self, capacity_bytes: int) -> None:
        self._starts: list[int] = [0]
        self._sizes: dict[int, int] = {0: capacity_bytes}  # start -> size
        self._by_size: list[tuple[int, int]] = [(capacity_bytes, 0)]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """`(start, size)` of each hole, by address."""
        return iter([(start, self._sizes[start]) for start in self._starts])

    @property
    def largest(self) -> int:
        """Size of the largest hole, 0 if there is none."""
        return self._by_size[-1][0] if self._by_size else 0

    def first_fit(self, size_bytes: int) -> int | None:
        """Start of the hole with the lowest address that holds `size_bytes`, or None."""
        if size_bytes > self.largest:
            return None
        return next((start for start in self._starts if self._sizes[start] >= size_bytes), None)

    def best_fit(self, size_bytes: int) -> int | None:
        """Start of the smallest hole that holds `size_bytes`, the lowest address among equals, or None."""
        index = bisect_left(self._by_size, (size_bytes, 0))
        return self._by_size[index][1] if index < len(self._by_size) else None

    def take(self, start: int, size_bytes: int) -> None:
        """Take the first `size_bytes` of the hole at `start`; the rest stays a hole."""
        size = self._remove(start)
        if size > size_bytes:
            self._add(start + size_bytes, size - size_bytes)

    def give_back(self, start: int, size_bytes: int) -> None:
        """`[start, start + size_bytes)` becomes free and is joined with the holes on both sides."""
        index = bisect_left(self._starts, start)
        if index < len(self._starts) and self._starts[index] == start + size_bytes:
            size_bytes += self._remove(self._starts[index])
        if index:
            before = self._starts[index - 1]
            if before + self._sizes[before] == start:
                size_bytes += self._remove(before)
                start = before
        self._add(start, size_bytes)

    def _add(self, start: int, size_bytes: int) -> None:
        insort(self._starts, start)
        insort(self._by_size, (size_bytes, start))
        self._sizes[start] = size_bytes

    def _remove(self, start: int) -> int:
        size = self._sizes.pop(start)
        del self._starts[bisect_left(self._starts, start)]
        del self._by_size[bisect_left(self._by_size, (size, start))]
        return size
