"""CpuBlockPool: blocks in host memory, for swapped requests and offloaded prefixes.

Block after block, all layers of one together, so that a block is one range to a DMA engine; pinned where there is a CUDA
device, so that the copy needs no staging on the host. A slot that a copy still reads or writes is kept back by a fence.
"""

from __future__ import annotations

import torch

from .fences import Fence
from .kernels.block_rows import BlockRows
from .layout import KVLayout
from .pinned import pinned_zeros


class CpuBlockPool:
    """`num_blocks` slots for blocks of `layout`, each kept under the key of whoever saved it."""

    def __init__(self, layout: KVLayout, num_blocks: int, *, pinned: bool | None = None) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.pinned = torch.cuda.is_available() if pinned is None else pinned
        """Whether the memory is page-locked."""
        num_bytes = num_blocks * layout.block_bytes
        self.buffer = pinned_zeros(num_bytes) if self.pinned else torch.zeros(num_bytes, dtype=torch.uint8)
        """`[num_blocks * block_bytes]` uint8."""
        self.rows = BlockRows.of(layout, self.buffer, num_blocks, dense=True)
        """The buffer as rows of blocks."""
        self._free = list(range(num_blocks - 1, -1, -1))
        self._kept: dict[str, list[int]] = {}
        self._fenced: list[tuple[Fence, list[int]]] = []

    @property
    def num_free(self) -> int:
        """Slots that can be taken now."""
        self._settle()
        return len(self._free)

    @property
    def num_quarantined(self) -> int:
        """Slots that nobody keeps and a copy may still use."""
        self._settle()
        return sum(len(slots) for _, slots in self._fenced)

    def keep(self, key: str, num_blocks: int) -> list[int] | None:
        """Take `num_blocks` slots under `key`, lowest first. None, and nothing changed, when fewer are free.

        Raises:
            KeyError: something is kept under this key already.
        """
        if key in self._kept:
            raise KeyError(f"{key} already keeps {len(self._kept[key])} blocks in the CPU pool")
        if num_blocks > self.num_free:
            return None
        self._free.sort(reverse=True)  # neighbours if possible: a run of slots is one copy
        slots = [self._free.pop() for _ in range(num_blocks)]
        self._kept[key] = slots
        return slots

    def slots(self, key: str) -> list[int]:
        """The slots kept under `key`, in table order.

        Raises:
            KeyError: nothing is.
        """
        if key not in self._kept:
            raise KeyError(f"{key} keeps nothing in the CPU pool")
        return self._kept[key]

    def drop(self, key: str, fence: Fence | None = None) -> None:
        """Give back what is kept under `key`; with a `fence`, its slots are free once that has passed.

        Raises:
            KeyError: nothing is kept under it (or it was dropped before).
        """
        slots = self.slots(key)
        del self._kept[key]
        if fence is None or fence.passed():
            self._free += slots
        else:
            self._fenced.append((fence, slots))

    def wait(self) -> bool:
        """Wait on the host until every slot that nobody keeps is free; False when none had to be waited for."""
        waiting = self._fenced
        for fence, _ in waiting:
            fence.wait()
        self._settle()
        return bool(waiting)

    def _settle(self) -> None:
        waiting: list[tuple[Fence, list[int]]] = []
        for fence, slots in self._fenced:
            if fence.passed():
                self._free += slots
            else:
                waiting.append((fence, slots))
        self._fenced = waiting


def runs(slots: list[int]) -> list[tuple[int, int, int]]:
    """Consecutive slots as `(place in the list, first slot, length)`: what one copy each can move.

    >>> runs([4, 5, 6, 9, 2, 3])
    [(0, 4, 3), (3, 9, 1), (4, 2, 2)]
    """
    found: list[tuple[int, int, int]] = []
    for place, slot in enumerate(slots):
        if found and slot == found[-1][1] + found[-1][2]:
            start, first, length = found[-1]
            found[-1] = (start, first, length + 1)
        else:
            found.append((place, slot, 1))
    return found
