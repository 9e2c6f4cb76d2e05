"""GroupRows: where the KV of a batch is read and written in one attention group.

A model with one kind of layer has one group. With several, each has its own block tables, and so its own slots and lengths: in a group
with a sliding window the blocks that slid out of it are gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sim.core.blocks import NO_BLOCK

from .packing import Packing


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRows:
    """One group's part of a batch, on the device. Valid until the next batch is made."""

    slots: Any
    """`[num_tokens]` int64: where the new tokens' KV goes."""
    block_table: Any
    """`[num_seqs, max_blocks]` int32, blocks that were given up left out."""
    seq_lens: Any
    """`[num_seqs]` int32: KV that is read, the new tokens included."""


class GroupParts:
    """One group's part of the packing of a batch with block tables of `width` columns."""

    def __init__(self, packing: Packing, *, num_tokens: int, num_seqs: int, width: int) -> None:
        self._num_seqs, self._width = num_seqs, width
        self._slots = packing.part(num_tokens, torch.int64)
        self._seq_lens = packing.part(num_seqs, torch.int32)
        self._tables = packing.part(num_seqs * width, torch.int32)

    def put(self, index: int, row: int, slots: Sequence[int], table: Sequence[int], length: int) -> None:
        """Fill in sequence `index` of `length` tokens, whose new ones begin at `row`. Columns behind its blocks are never read."""
        held = table if NO_BLOCK not in table else [block for block in table if block != NO_BLOCK]
        start = index * self._width
        self._slots.cells[row : row + len(slots)] = slots
        self._tables.cells[start : start + len(held)] = held
        self._seq_lens.cells[index] = length

    def pad(self, first: int) -> None:
        """The rows of a decode batch from `first` on are nobody's: slot 0 of NO_BLOCK, no KV to read."""
        rows = self._num_seqs - first
        self._slots.cells[first:] = [0] * rows
        self._seq_lens.cells[first:] = [0] * rows
        self._tables.cells[first * self._width :] = [NO_BLOCK] * (rows * self._width)

    def on(self, memory: Any) -> GroupRows:
        """What was filled in, on the device, where the packing was sent to `memory`."""
        return GroupRows(
            slots=self._slots.on(memory),
            block_table=self._tables.on(memory).view(self._num_seqs, self._width),
            seq_lens=self._seq_lens.on(memory),
        )


def slots_of(name: str, table: Sequence[int], start: int, stop: int, block_size: int) -> list[int]:
    """Where the KV of tokens `[start, stop)` of a sequence goes, one slot a token.

    Raises:
        ValueError: the table has no block for one of them.
    """
    if stop > len(table) * block_size or any(
        table[index] == NO_BLOCK for index in range(start // block_size, -(-stop // block_size))
    ):
        raise ValueError(f"{name} has no block for one of its tokens [{start}, {stop}): its table is {list(table)}")
    return [table[place // block_size] * block_size + place % block_size for place in range(start, stop)]
