"""In which order free blocks are taken, and with them what the prefix cache forgets.

A block that holds nothing findable is always taken first; the orders differ in which findable content goes next. Blocks of one
release come in tail first, and a hit takes a whole chain from its head, so `lru` takes leaves before their parents. The other orders
do so within one release, and may take a parent first that a less important, or less popular, sharer released last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from itertools import filterfalse, islice
from typing import Protocol

from .ranked_eviction import LfuQueue, RetentionQueue, WorthQueue


class FreeQueue(Protocol):
    """Free blocks that have been used before."""

    def __len__(self) -> int: ...
    def add(self, block_ids: Collection[int], worth: float) -> None:
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
    """Least recently used first, where a use ends when its last holder releases (vLLM V1).

    A block that leaves from the middle, as a prefix hit does, leaves its entry behind. Of a block's entries the first few, as often as
    it left so, count no more; they are dropped at the head of the queue, or all at once when they are more than the others.
    """

    def __init__(self, is_findable: Callable[[int], bool]) -> None:
        self._queue: deque[int] = deque()
        self._num_left = 0
        self._left: dict[int, int] = {}  # how many entries of a block count no more
        self._aside: set[int] = set()  # still in the queue

    def __len__(self) -> int:
        return len(self._queue) - self._num_left - len(self._aside)

    def add(self, block_ids: Collection[int], worth: float) -> None:
        """To the end of the queue."""
        self._queue.extend(block_ids)

    def pop(self, count: int) -> list[int]:
        """From its head."""
        take = self._queue.popleft
        if not self._left and not self._aside:
            return [take() for _ in range(count)]
        taken: list[int] = []
        passed: list[int] = []
        while len(taken) < count:
            block_id = take()
            if left := self._left.pop(block_id, 0):
                self._num_left -= 1
                if left > 1:
                    self._left[block_id] = left - 1
            elif block_id in self._aside:
                passed.append(block_id)
            else:
                taken.append(block_id)
        self._queue.extendleft(reversed(passed))
        return taken

    def remove(self, block_id: int) -> None:
        """From the middle."""
        self._left[block_id] = self._left.get(block_id, 0) + 1
        self._num_left += 1
        if self._num_left > 64 + len(self._queue) // 2:
            self._queue = deque(self._entries())
            self._left.clear()
            self._num_left = 0

    def _entries(self) -> Iterable[int]:
        """Those that count, in order."""
        return self._counting() if self._left else self._queue

    def _counting(self) -> Iterator[int]:
        seen: dict[int, int] = {}
        for block_id in self._queue:
            if seen.get(block_id, 0) < self._left.get(block_id, 0):
                seen[block_id] = seen.get(block_id, 0) + 1
            else:
                yield block_id

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
        return list(islice(filterfalse(self._aside.__contains__, self._entries()), count))

    def keys(self) -> Set[int]:
        """The blocks."""
        return set(self._entries()) - self._aside


EVICTIONS: dict[str, Callable[[Callable[[int], bool]], FreeQueue]] = {
    "lru": LruQueue,
    "lfu": LfuQueue,
    "priority": WorthQueue,
    "retention": RetentionQueue,
}
"""Orders by name."""
