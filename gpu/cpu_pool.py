"""CpuBlockPool: blocks in host memory, for swapped requests and offloaded prefixes.

Block after block, all layers of one together, so that a block is one range to a DMA engine; pinned where there is a CUDA
device, so that the copy needs no staging on the host. Whose a slot is, the core decides.
"""

from __future__ import annotations

import torch

from .kernels.block_rows import BlockRows
from .layout import KVLayout
from .pinned import pinned_zeros


class CpuBlockPool:
    """`num_blocks` slots for blocks of `layout`, counted from 0."""

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
