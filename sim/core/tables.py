"""Block tables: which blocks hold a sequence's tokens, in order.

Every operation either happens whole or, when there is no room, returns None and has changed nothing (I6).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .blocks import NO_BLOCK, BlockPool
from .need import blocks_for, new_blocks, skipped_blocks


class BlockTable:
    """The blocks of one sequence. `blocks[i]` holds tokens `[i * block_size, (i + 1) * block_size)`."""

    __slots__ = ("blocks", "owner")

    def __init__(self, owner: str) -> None:
        self.owner = owner
        """Who to name when something is wrong."""
        self.blocks: list[int] = []

    def __len__(self) -> int:
        return len(self.blocks)


@dataclass(frozen=True, slots=True)
class Allocation:
    """What a table got."""

    new_blocks: list[int]
    """Blocks appended to the table, in order (hits not included)."""
    copies: tuple[tuple[int, int], ...] = ()
    """Block copies `(source, destination)` to be done before anything is written (copy-on-write)."""


class BlockTables:
    """Grows, shares, shortens and releases block tables of one pool."""

    def __init__(self, pool: BlockPool, block_size: int, window: int | None = None) -> None:
        self.pool = pool
        self.block_size = block_size
        self.window = window
        """Sliding attention window in tokens; None for full attention."""

    def need(self, table: BlockTable, computed_tokens: int, new_tokens: int, hits: Sequence[int] = ()) -> int:
        """Blocks that would leave the free queue if `grow` were called with the same arguments."""
        start = computed_tokens + len(hits) * self.block_size
        return new_blocks(
            total_tokens=start + new_tokens,
            block_size=self.block_size,
            held=len(table),
            hits=len(hits),
            unreferenced_hits=self.pool.num_unreferenced(hits),
            skipped=skipped_blocks(start, self.block_size, self.window),
            copied=len(self._shared(self._written(table, computed_tokens, new_tokens), table)),
        )

    def grow(
        self, table: BlockTable, computed_tokens: int, new_tokens: int, hits: Sequence[int] = ()
    ) -> Allocation | None:
        """Make room to write tokens `[start, start + new_tokens)`, where start is `computed_tokens` plus the `hits`' tokens.

        `hits` are blocks found in the prefix index; they are appended, and referenced, first. Blocks that will be
        written into and are shared are replaced by fresh ones, and copies are asked for. Blocks that slid out of the
        window are given back first. None, and nothing else changed, when the pool has too few free blocks.
        """
        pool = self.pool
        if self.window is not None:
            self.slide(table, computed_tokens)
        need = self.need(table, computed_tokens, new_tokens, hits)
        if need > pool.num_free:
            return None
        written = self._written(table, computed_tokens, new_tokens)
        shared = self._shared(written, table)
        pool.acquire(hits)
        table.blocks.extend(hits)
        grown = max(
            blocks_for(computed_tokens + len(hits) * self.block_size + new_tokens, self.block_size) - len(table), 0
        )
        copies = tuple((table.blocks[index], self._replace(table, index)) for index in shared)
        pool.forget(table.blocks[index] for index in written)  # what they hold is about to change
        blocks = pool.allocate(grown)
        assert blocks is not None  # `need` covers the hits, the copies and these
        table.blocks.extend(blocks)
        return Allocation(blocks, copies)

    def fork(self, table: BlockTable, owner: str) -> BlockTable:
        """A second table over the same blocks; whoever writes first into a shared block gets a copy (`grow`)."""
        self.pool.acquire(table.blocks)
        child = BlockTable(owner)
        child.blocks = table.blocks.copy()
        return child

    def truncate(
        self, table: BlockTable, tokens: int, by: str, fence: int | None = None, worth: float = 0.0
    ) -> list[int]:
        """Give back the blocks beyond the first `tokens` tokens; returns them."""
        keep = blocks_for(tokens, self.block_size)
        dropped = table.blocks[keep:]
        self.pool.release(dropped, by, fence, worth)
        del table.blocks[keep:]
        return dropped

    def release(self, table: BlockTable, by: str, fence: int | None = None, worth: float = 0.0) -> list[int]:
        """Give back everything; returns the blocks, in table order, without NO_BLOCK entries."""
        return [block_id for block_id in self.truncate(table, 0, by, fence, worth) if block_id != NO_BLOCK]

    def slide(self, table: BlockTable, computed_tokens: int) -> list[int]:
        """Give back blocks that no later token attends to, leaving NO_BLOCK in their place; returns them."""
        skipped = min(skipped_blocks(computed_tokens, self.block_size, self.window), len(table))
        slid = [block_id for block_id in table.blocks[:skipped] if block_id != NO_BLOCK]
        if slid:
            self.pool.release(slid, f"{table.owner} (slid out of the window)")
            table.blocks[:skipped] = [NO_BLOCK] * skipped
        return slid

    def _written(self, table: BlockTable, computed_tokens: int, new_tokens: int) -> range:
        """Indexes of the blocks the table has already that tokens `[computed_tokens, computed_tokens + new_tokens)` go to."""
        stop = blocks_for(computed_tokens + new_tokens, self.block_size) if new_tokens > 0 else 0
        return range(computed_tokens // self.block_size, min(stop, len(table)))

    def _shared(self, written: range, table: BlockTable) -> list[int]:
        """Those of them that somebody else holds too."""
        return [index for index in written if self.pool.ref_cnt(table.blocks[index]) > 1]

    def _replace(self, table: BlockTable, index: int) -> int:
        fresh = self.pool.allocate(1)
        assert fresh is not None  # counted by `need`
        self.pool.release([table.blocks[index]], f"{table.owner} (copied on write)")
        table.blocks[index] = fresh[0]
        return fresh[0]
