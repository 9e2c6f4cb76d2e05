"""In which order free blocks are taken, and with them what the prefix cache forgets.

A block that holds nothing findable is always taken first; the orders differ in which findable content goes next. Blocks of one
release come in tail first, and a hit takes a whole chain from its head, so `lru` takes leaves before their parents. The other orders
do so within one release, and may take a parent first that a less important, or less popular, sharer released last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Set
from itertools import filterfalse, islice
from typing import Protocol

from .ranked_eviction import LfuQueue, RetentionQueue, WorthQueue


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


EVICTIONS: dict[str, Callable[[Callable[[int], bool]], FreeQueue]] = {
    "lru": LruQueue,
    "lfu": LfuQueue,
    "priority": WorthQueue,
    "retention": RetentionQueue,
}
"""Orders by name."""
