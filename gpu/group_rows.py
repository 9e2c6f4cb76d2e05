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

from .step_buffer import StepArena, StepBuffer


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRows:
    """One group's part of a batch, on the device. Views of `GroupBuffers`, valid until the next batch is made."""

    slots: Any
    """`[num_tokens]` int64: where the new tokens' KV goes."""
    block_table: Any
    """`[num_seqs, max_blocks]` int32, blocks that were given up left out."""
    seq_lens: Any
    """`[num_seqs]` int32: KV that is read, the new tokens included."""


class GroupBuffers:
    """Room for one group's part of the largest step."""

    def __init__(self, slots: StepBuffer, seq_lens: StepBuffer, tables: StepBuffer) -> None:
        self._slots, self._seq_lens, self._tables = slots, seq_lens, tables

    @staticmethod
    def rows(max_tokens: int, max_seqs: int, arena: StepArena) -> tuple[StepBuffer, StepBuffer]:
        """Slots and lengths of a group. Apart from the tables, which are long and little used: they come behind those of all groups."""
        return StepBuffer(max_tokens, torch.int64, arena), StepBuffer(max_seqs, torch.int32, arena)

    def put(self, index: int, row: int, slots: Sequence[int], table: Sequence[int], width: int, length: int) -> None:
        """Fill in sequence `index` of `length` tokens, whose new ones begin at `row`. `width` is the number of columns of all tables."""
        held = table if NO_BLOCK not in table else [block for block in table if block != NO_BLOCK]
        self._slots.cells[row : row + len(slots)] = slots
        self._tables.cells[index * width : index * width + len(held)] = held
        self._seq_lens.cells[index] = length

    def pad(self, first: int, end: int, width: int) -> None:
        """Rows `[first, end)` of a decode batch are nobody's: slot 0 of NO_BLOCK, no KV to read."""
        rows = end - first
        self._slots.cells[first:end] = [0] * rows
        self._seq_lens.cells[first:end] = [0] * rows
        self._tables.cells[first * width : end * width] = [NO_BLOCK] * (rows * width)

    def sent(self, num_tokens: int, num_seqs: int, width: int) -> GroupRows:
        """What was filled in, on the device."""
        return GroupRows(
            slots=self._slots.sent(num_tokens),
            block_table=self._tables.sent(num_seqs * width).view(num_seqs, width),
            seq_lens=self._seq_lens.sent(num_seqs),
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
