"""Block tables: which blocks hold a sequence's tokens, in order.

Every operation either happens whole or, when there is no room, returns None and has changed nothing (I6).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .blocks import NO_BLOCK, BlockPool
from .cached import Cached, OnDevice, served
from .need import blocks_for, new_blocks, new_blocks_for_whole, skipped_blocks


class BlockTable:
    """The blocks of one sequence. `blocks[i]` holds tokens `[i * block_size, (i + 1) * block_size)`."""

    __slots__ = ("blocks", "owner")

    def __init__(self, owner: str) -> None:
        self.owner = owner
        """Who to name when something is wrong."""
        self.blocks: list[int] = []

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def groups(self) -> tuple[BlockTable, ...]:
        """One table for each attention group: this one, of a model with one kind of layer (else see `groups.GroupTable`)."""
        return (self,)


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
        self.on_device = OnDevice(pool)

    @property
    def groups(self) -> Sequence[BlockTables]:
        """One for each attention group: this one, of a model with one kind of layer (else see `groups.GroupTables`)."""
        return (self,)

    def on(self, pool: BlockPool) -> BlockTables:
        """The same for another pool."""
        return BlockTables(pool, self.block_size, self.window)

    def new(self, owner: str) -> BlockTable:
        """An empty table."""
        return BlockTable(owner)

    def keys(self, keys: list[int], first: int = 0) -> list[int]:
        """The keys under which blocks `first` and after, whose content has `keys`, are found; in the order of `between`."""
        return keys

    def between(self, table: BlockTable, start: int, stop: int) -> list[int]:
        """The table's entries for the tokens of blocks `[start, stop)`."""
        return table.blocks[start:stop]

    def find(self, keys: list[int]) -> list[int]:
        """Blocks with the longest prefix of `keys`, of blocks 0 and after, that can be served: every block, or with a window the last that
        it covers. NO_BLOCK stands for those that are out of the window.
        """
        if self.window is None:
            return self.pool.find(keys)
        ((passed, seen),) = self.seen(keys, self.longest(keys, self.on_device))
        return [NO_BLOCK] * passed + self.pool.find(seen)

    def longest(self, keys: list[int], cached: Cached) -> int:
        """Tokens of the longest prefix of `keys` that could be served if all that is `cached` were on the device."""
        if self.window is None:
            return cached.run(keys) * self.block_size
        return served(keys, len(keys) * self.block_size, self.block_size, cached, self.block_size, self.window)

    def seen(self, keys: list[int], tokens: int) -> list[tuple[int, list[int]]]:
        """For each group, of a prefix of `tokens` tokens: how many leading blocks are out of the window, and the keys of the others."""
        passed = skipped_blocks(tokens, self.block_size, self.window)
        return [(passed, keys[passed : tokens // self.block_size])]

    def tokens_in(self, hits: Sequence[int]) -> int:
        """Tokens that `hits` hold."""
        return len(hits) * self.block_size

    def split(self, hits: Sequence[int]) -> list[Sequence[int]]:
        """The hits of each group."""
        return [hits]

    def tokens_before(self, table: BlockTable, tokens: int, void: Collection[int]) -> int:
        """The longest prefix of a table's first `tokens` tokens in no block of `void`, and whose window is whole; `tokens` if none is
        void.
        """
        found = table.blocks[: tokens // self.block_size] if void else []
        stop = next((index for index, block_id in enumerate(found) if block_id in void), None)
        if stop is None:
            return tokens
        return stop * self.block_size if self.sees_all(table, stop * self.block_size) else 0

    def sees_all(self, table: BlockTable, computed_tokens: int) -> bool:
        """Whether the table has every block that the token after `computed_tokens` attends to."""
        stop = blocks_for(computed_tokens, self.block_size)
        return NO_BLOCK not in table.blocks[skipped_blocks(computed_tokens, self.block_size, self.window) : stop]

    def need(self, table: BlockTable, computed_tokens: int, new_tokens: int, hits: Sequence[int] = ()) -> int:
        """Blocks that would leave the free queue if `grow` were called with the same arguments."""
        if new_tokens == 1 and self.window is None and self._is_begun(table, computed_tokens, hits):
            return 0
        start = computed_tokens + len(hits) * self.block_size
        return new_blocks(
            total_tokens=start + new_tokens,
            block_size=self.block_size,
            held=len(table),
            hits=len(hits),
            unreferenced_hits=self.pool.num_unreferenced(hits),
            skipped=skipped_blocks(start, self.block_size, self.window),
            copied=len(self._shared(self.written(table, computed_tokens, new_tokens), table)),
        )

    def _is_begun(self, table: BlockTable, computed_tokens: int, hits: Sequence[int]) -> bool:
        """Whether the next token goes, as in the usual decode, into a block that has some already and that nobody else holds."""
        return (
            not hits
            and computed_tokens % self.block_size > 0
            and len(table.blocks) == computed_tokens // self.block_size + 1
            and self.pool.ref_cnt(table.blocks[-1]) == 1
        )

    def need_for_whole(self, whole: Sequence[int], hits: Sequence[int]) -> int:
        """Blocks that would leave the free queue for a sequence that comes to hold `whole` blocks of each group, `hits` among them."""
        return new_blocks_for_whole(sum(whole), len(hits), self.pool.num_unreferenced(hits))

    def grow(
        self, table: BlockTable, computed_tokens: int, new_tokens: int, hits: Sequence[int] = ()
    ) -> Allocation | None:
        """Make room to write tokens `[start, start + new_tokens)`, where start is `computed_tokens` plus the `hits`' tokens.

        `hits` are blocks found in the prefix index; they are appended, and referenced, first. Blocks that will be
        written into and are shared are replaced by fresh ones, and copies are asked for. Blocks that slid out of the
        window are given back first. None, and nothing else changed, when the pool has too few free blocks.
        """
        if self.window is not None:
            self.slide(table, computed_tokens)
        elif (
            new_tokens == 1
            and self._is_begun(table, computed_tokens, hits)
            and table.blocks[-1] not in self.pool.index  # what it holds is about to change
        ):
            return Allocation([])
        need = self.need(table, computed_tokens, new_tokens, hits)
        if need > self.pool.num_free:
            return None
        written = self.written(table, computed_tokens, new_tokens)
        self.take(table, hits)
        return self.fill(table, computed_tokens + len(hits) * self.block_size + new_tokens, written)

    def take(self, table: BlockTable, hits: Sequence[int]) -> None:
        """Append `hits` to the table; part of `grow`."""
        self.pool.acquire(hits)
        table.blocks.extend(hits)

    def fill(self, table: BlockTable, total_tokens: int, written: range) -> Allocation:
        """Take the blocks that `total_tokens` tokens lack and copies of the shared ones among the `written`; part of `grow`."""
        pool = self.pool
        shared = self._shared(written, table)
        grown = max(blocks_for(total_tokens, self.block_size) - len(table), 0)
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
        return list(filter(None, self.truncate(table, 0, by, fence, worth)))

    def slide(self, table: BlockTable, computed_tokens: int) -> list[int]:
        """Give back blocks that no later token attends to, leaving NO_BLOCK in their place; returns them."""
        blocks = table.blocks
        stop = start = min(skipped_blocks(computed_tokens, self.block_size, self.window), len(blocks))
        while start and blocks[start - 1] != NO_BLOCK:
            start -= 1
        slid = blocks[start:stop]
        if start and blocks[0] != NO_BLOCK:  # the sink of a truncated context: what was behind it is gone
            slid.insert(0, blocks[0])
            blocks[0] = NO_BLOCK
        if slid:
            self.pool.release(slid, f"{table.owner} (slid out of the window)")
            blocks[start:stop] = [NO_BLOCK] * (stop - start)
        return slid

    def computed(self, table: BlockTable, computed_tokens: int) -> list[int]:
        """The blocks with the KV of the first `computed_tokens` tokens, without NO_BLOCK entries: what a swap has to save."""
        stop = blocks_for(computed_tokens, self.block_size)
        return [block_id for block_id in table.blocks[:stop] if block_id != NO_BLOCK]

    def written(self, table: BlockTable, computed_tokens: int, new_tokens: int) -> range:
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
