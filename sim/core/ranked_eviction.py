"""Free queues in which some content ranks above other: the lowest rank goes first, whenever it was released.

A block that holds nothing findable ranks below all. Blocks of equal rank are taken in the order in which they were released.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from heapq import heappop, heappush, nsmallest

from .retention import DEFAULT_PRIORITY, Course


class RankedQueue:
    """Lowest rank first, oldest release among equals; a block with nothing findable ranks below all."""

    def __init__(self, is_findable: Callable[[int], bool]) -> None:
        self._is_findable = is_findable
        self._entry: dict[int, tuple[float, int, int]] = {}
        self._heap: list[tuple[float, int, int]] = []
        self._aside: dict[int, tuple[float, int, int]] = {}
        self._releases = 0

    def rank(self, block_id: int, worth: float) -> float:
        """How late a block is taken; a subclass says."""
        return worth

    def __len__(self) -> int:
        return len(self._entry)

    def add(self, block_ids: Iterable[int], worth: float) -> None:
        """File by rank."""
        for block_id in block_ids:
            rank = self.rank(block_id, worth) if self._is_findable(block_id) else float("-inf")
            self._releases += 1
            entry = (rank, self._releases, block_id)
            self._entry[block_id] = entry
            heappush(self._heap, entry)

    def pop(self, count: int) -> list[int]:
        """The lowest ranks."""
        taken: list[int] = []
        while len(taken) < count:
            entry = heappop(self._heap)
            if self._entry.get(entry[2]) == entry:
                del self._entry[entry[2]]
                taken.append(entry[2])
        return taken

    def remove(self, block_id: int) -> None:
        """Its entry stays in the heap until it comes up."""
        del self._entry[block_id]

    def set_aside(self, block_ids: Iterable[int]) -> None:
        """Their places are remembered."""
        for block_id in block_ids:
            self._aside[block_id] = self._entry.pop(block_id)

    def put_back(self, block_ids: Iterable[int]) -> None:
        """Where they stood; one whose content was forgotten meanwhile before all others."""
        for block_id in block_ids:
            entry = self._aside.pop(block_id)
            if not self._is_findable(block_id):
                entry = (float("-inf"), *entry[1:])
            self._entry[block_id] = entry
            heappush(self._heap, entry)

    def found(self, block_ids: Iterable[int]) -> None:
        """Of interest to subclasses."""

    def tick(self, now_fs: int) -> None:
        """Of interest to subclasses."""

    def forgotten(self, block_ids: Iterable[int]) -> None:
        """Free ones rank below all now, in the order in which they were released."""
        for block_id in block_ids:
            entry = self._entry.get(block_id)
            if entry is not None:
                self._entry[block_id] = (float("-inf"), entry[1], block_id)
                heappush(self._heap, self._entry[block_id])

    def peek(self, count: int) -> list[int]:
        """The lowest ranks."""
        return [block_id for _, _, block_id in nsmallest(count, self._entry.values())]

    def keys(self) -> Set[int]:
        """The blocks."""
        return self._entry.keys()


class WorthQueue(RankedQueue):
    """What important requests left is kept longest (TensorRT-LLM's retention priority, without its durations)."""


class LfuQueue(RankedQueue):
    """Least frequently found first (SGLang's `lfu`)."""

    def __init__(self, is_findable: Callable[[int], bool]) -> None:
        super().__init__(is_findable)
        self._found: dict[int, int] = {}

    def rank(self, block_id: int, worth: float) -> float:
        """How often the block's content was found since it was written."""
        return self._found.get(block_id, 0)

    def pop(self, count: int) -> list[int]:
        """The least found; their counts start again, because their content will be another."""
        taken = super().pop(count)
        for block_id in taken:
            self._found.pop(block_id, None)
        return taken

    def forgotten(self, block_ids: Iterable[int]) -> None:
        """What they will hold next has not been found yet."""
        block_ids = list(block_ids)
        super().forgotten(block_ids)
        for block_id in block_ids:
            self._found.pop(block_id, None)

    def found(self, block_ids: Iterable[int]) -> None:
        """One more find each."""
        for block_id in block_ids:
            self._found[block_id] = self._found.get(block_id, 0) + 1


class RetentionQueue(RankedQueue):
    """By the priority that a block's retention gives it at the time, oldest release among equals (TensorRT-LLM's retention)."""

    def __init__(self, is_findable: Callable[[int], bool]) -> None:
        super().__init__(is_findable)
        self._now_fs = 0
        self._course: dict[int, Course] = {}
        self._ends: list[tuple[int, int, int]] = []  # heap of (time, release, block): a course takes a step then

    def retain(self, block_ids: Iterable[int], courses: Iterable[Course]) -> None:
        """From now on these blocks have these courses, when they are released."""
        self._course.update(zip(block_ids, courses, strict=True))

    def rank(self, block_id: int, worth: float) -> float:
        """What the block's course says now; the default without one."""
        for until, priority in self._course.get(block_id, ()):
            if until is None:
                return priority
            if self._now_fs < until:
                heappush(self._ends, (until, self._releases + 1, block_id))
                return priority
        return DEFAULT_PRIORITY

    def tick(self, now_fs: int) -> None:
        """What has been kept long enough is worth less from now on; it keeps its place among equals."""
        self._now_fs = now_fs
        while self._ends and self._ends[0][0] <= now_fs:
            _, release, block_id = heappop(self._ends)
            for entries in (self._entry, self._aside):
                entry = entries.get(block_id)
                if entry is not None and entry[1] == release:
                    self._file(entries, block_id, release)

    def pop(self, count: int) -> list[int]:
        """The least worth; their courses end with their content."""
        taken = super().pop(count)
        for block_id in taken:
            self._course.pop(block_id, None)
        return taken

    @property
    def num_expiring(self) -> int:
        """At least as many as the free blocks whose place will change with time."""
        return len(self._ends)

    def _file(self, entries: dict[int, tuple[float, int, int]], block_id: int, release: int) -> None:
        until, priority = next(step for step in self._course[block_id] if step[0] is None or self._now_fs < step[0])
        rank = priority if self._is_findable(block_id) else float("-inf")
        entry = entries[block_id] = (rank, release, block_id)
        if entries is self._entry:
            heappush(self._heap, entry)
        if until is not None:
            heappush(self._ends, (until, release, block_id))
