"""Quarantine: which blocks of a pool wait, and behind which fence, until the last who reads them is done (I9).

A block waits because it was released behind a fence, or because a copy reads it and nobody holds it. A fence is a number that the
pool's user makes up; it passes once.
"""

from __future__ import annotations

from collections.abc import Sequence


class Quarantine:
    """Blocks that nobody may be given yet, and blocks that copies read."""

    __slots__ = ("blocks", "read_by", "_fences", "_reads")

    def __init__(self) -> None:
        self.blocks: set[int] = set()
        """Those that wait."""
        self.read_by: dict[int, int] = {}
        """Blocks that a copy reads, held ones too, and the fence behind which it has read them."""
        self._fences: dict[int, list[tuple[list[int], float]]] = {}
        self._reads: dict[int, tuple[list[int], list[int]]] = {}

    @property
    def num_set_aside(self) -> int:
        """Free blocks that wait for a copy to read them."""
        return sum(len(aside) for _, aside in self._reads.values())

    def wait(self, block_ids: list[int], fence: int, worth: float) -> None:
        """Released blocks wait for a fence; `worth` is told again when it has passed."""
        if block_ids:
            self._fences.setdefault(fence, []).append((block_ids, worth))
            self.blocks.update(block_ids)

    def read(self, block_ids: Sequence[int], aside: list[int], fence: int) -> None:
        """A copy reads these blocks until a fence has passed; those of them that are free, `aside`, wait for it."""
        self.read_by.update(dict.fromkeys(block_ids, fence))
        self._reads[fence] = (list(block_ids), aside)
        self.blocks.update(aside)

    def passed(self, fence: int) -> tuple[list[int], list[tuple[list[int], float]]]:
        """A fence has passed: what had been set aside behind it, and what was released behind it with its worth. Nothing for an
        unknown fence.
        """
        read, aside = self._reads.pop(fence, ([], []))
        for block_id in read:
            del self.read_by[block_id]
        released = self._fences.pop(fence, [])
        self.blocks.difference_update(aside, *[blocks for blocks, _ in released])
        return aside, released
