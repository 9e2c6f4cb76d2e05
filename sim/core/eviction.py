"""In which order free blocks are taken, and with them what the prefix cache forgets.

A block that holds nothing findable is always taken first; the orders differ in which findable content goes next. Blocks of one
release come in tail first, and a hit takes a whole chain from its head, so `lru` takes leaves before their parents. The other orders
do so within one release, and may take a parent first that a less important, or less popular, sharer released last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Set
from heapq import heappop, heappush, nsmallest
from itertools import filterfalse, islice
from typing import Protocol

from .retention import DEFAULT_PRIORITY, Course


class FreeQueue(Protocol):
    """Free blocks that have been used before."""

    def __len__(self) -> int: ...
    def __contains__(self, block_id: object) -> bool: ...
    def add(self, block_ids: Iterable[int], worth: float) -> None:
        """Blocks became free; `worth` is how much the releasing request's content is worth keeping."""
        ...

    def pop(self, count: int) -> list[int]:
        """Take the `count` blocks that are to be reused first."""
        ...

    def remove(self, block_id: int) -> None:
        """A block has a holder again."""
        ...

    def set_aside(self, block_ids: Iterable[int]) -> None:
        """These blocks cannot be taken until they are put back: a copy reads them."""
        ...

    def put_back(self, block_ids: Iterable[int]) -> None:
        """Blocks that were set aside can be taken again, when it is their turn."""
        ...

    def found(self, block_ids: Iterable[int]) -> None:
        """The content of these blocks, free or held, was found by a request."""
        ...

    def forgotten(self, block_ids: Iterable[int]) -> None:
        """The content of these blocks, free or held, can no longer be found."""
        ...

    def tick(self, now_fs: int) -> None:
        """It is this time now."""
        ...

    def peek(self, count: int) -> list[int]:
        """What `pop` would take now."""
        ...

    def keys(self) -> Set[int]:
        """The blocks."""
        ...


class LruQueue:
    """Least recently used first, where a use ends when its last holder releases (vLLM V1)."""

    def __init__(self, is_findable: Callable[[int], bool]) -> None:
        self._queue: OrderedDict[int, None] = OrderedDict()
        self._aside: set[int] = set()  # still in the queue

    def __len__(self) -> int:
        return len(self._queue) - len(self._aside)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._queue and block_id not in self._aside

    def add(self, block_ids: Iterable[int], worth: float) -> None:
        """To the end of the queue."""
        queue = self._queue
        for block_id in block_ids:
            queue[block_id] = None

    def pop(self, count: int) -> list[int]:
        """From its head."""
        if self._aside:
            taken = self.peek(count)
            for block_id in taken:
                del self._queue[block_id]
            return taken
        take = self._queue.popitem
        return [take(last=False)[0] for _ in range(count)]

    def remove(self, block_id: int) -> None:
        """From the middle."""
        del self._queue[block_id]

    def set_aside(self, block_ids: Iterable[int]) -> None:
        """They keep their places and are passed over."""
        self._aside.update(block_ids)

    def put_back(self, block_ids: Iterable[int]) -> None:
        """They are passed over no more."""
        self._aside.difference_update(block_ids)

    def found(self, block_ids: Iterable[int]) -> None:
        """Being found is no use until it ends."""

    def tick(self, now_fs: int) -> None:
        """The order does not depend on the time."""

    def forgotten(self, block_ids: Iterable[int]) -> None:
        """The place in the queue says when a block was released, whatever it holds."""

    def peek(self, count: int) -> list[int]:
        """The head."""
        if self._aside:
            return list(islice(filterfalse(self._aside.__contains__, self._queue), count))
        return list(islice(self._queue, count))

    def keys(self) -> Set[int]:
        """The blocks."""
        return self._queue.keys() - self._aside if self._aside else self._queue.keys()


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

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._entry

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


EVICTIONS: dict[str, Callable[[Callable[[int], bool]], FreeQueue]] = {
    "lru": LruQueue,
    "lfu": LfuQueue,
    "priority": WorthQueue,
    "retention": RetentionQueue,
}
"""Orders by name."""
