"""Block tables of a model whose layers keep different tokens: one table a group of layers, all from one pool.

A request takes blocks in every group as it grows; a group with a sliding window gives them back behind it. What is done, is done in
all groups or in none (I6). Wherever blocks of several groups are listed in one row, they stand group by group.
**Source:** vLLM V1 hybrid KV cache manager (engine-policies §1.1.7).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .blocks import NO_BLOCK, BlockPool
from .cached import Cached, served
from .config import EngineConfig
from .tables import Allocation, BlockTable, BlockTables


class GroupTable(BlockTable):
    """The tables of one sequence, one a group."""

    __slots__ = ("_groups",)

    def __init__(self, owner: str, groups: Sequence[BlockTable]) -> None:
        self.owner = owner
        self._groups = tuple(groups)

    @property
    def blocks(self) -> list[int]:  # type: ignore[override]  # made anew: nobody may write to it
        """The blocks of all tables, group by group."""
        return [block_id for table in self._groups for block_id in table.blocks]

    @property
    def groups(self) -> tuple[BlockTable, ...]:
        """One table for each group."""
        return self._groups

    def __len__(self) -> int:
        return sum(map(len, self._groups))


class GroupTables(BlockTables):
    """`BlockTables` of several groups: the tables it is given are those that it made."""

    def __init__(self, pool: BlockPool, config: EngineConfig) -> None:
        super().__init__(pool, config.block_size)
        self._groups = tuple(BlockTables(pool, group.block_size, group.window) for group in config.kv_groups)
        self._config = config
        self._slots_per_block = config.slots_per_block
        self._slots_per_token = config.slots_per_token

    @property
    def groups(self) -> Sequence[BlockTables]:
        """One for each group, with its own block size and window."""
        return self._groups

    def on(self, pool: BlockPool) -> GroupTables:
        """The same for another pool."""
        return GroupTables(pool, self._config)

    def new(self, owner: str) -> GroupTable:
        """Empty tables."""
        return GroupTable(owner, [group.new(owner) for group in self.groups])

    # -- prefix hits ----------------------------------------------------------------------------------------------

    def keys(self, keys: list[int], first: int = 0) -> list[int]:
        """The keys of all groups' blocks, group by group, for `keys` of the smallest blocks, `first` and after."""
        return [key for own in self._keys_by_group(keys, first) for key in own]

    def _keys_by_group(self, keys: list[int], first: int = 0) -> list[list[int]]:
        """A block of a group has the key of the last of the smallest blocks that it covers, and the group's number: equal keys mean
        the same tokens in the same group (I7).
        """
        number = len(self.groups)
        ratios = [group.block_size // self.block_size for group in self.groups]
        return [
            [key * number + index for key in keys[(ratio - 1 - first) % ratio :: ratio]]
            for index, ratio in enumerate(ratios)
        ]

    def between(self, table: BlockTable, start: int, stop: int) -> list[int]:
        """The entries of all groups for the tokens of blocks `[start, stop)`, in the smallest blocks; group by group."""
        return [
            block_id
            for group, own in self._pairs(table)
            for block_id in own.blocks[
                start * self.block_size // group.block_size : stop * self.block_size // group.block_size
            ]
        ]

    def find(self, keys: list[int]) -> list[int]:
        """The longest prefix that every group can serve: full attention needs all its blocks, a window the last ones that it covers.

        NO_BLOCK stands for what is out of a window. Each group can only shorten what the others found, until all agree.
        Source: vLLM V1 `HybridKVCacheCoordinator.find_longest_cache_hit`.
        """
        hits: list[int] = []
        for passed, seen in self.seen(keys, self.longest(keys, self.on_device)):
            hits += [NO_BLOCK] * passed
            hits += self.pool.find(seen)
        return hits

    def longest(self, keys: list[int], cached: Cached) -> int:
        """Tokens of the longest prefix that every group could serve if all that is `cached` were on the device."""
        by_group = self._keys_by_group(keys)
        tokens = len(keys) * self.block_size
        for group, own in zip(self.groups, by_group, strict=True):
            if group.window is None:
                tokens = min(tokens, cached.run(own[: tokens // group.block_size]) * group.block_size)
        before = -1
        while tokens != before:
            before = tokens
            for group, own in zip(self.groups, by_group, strict=True):
                if group.window is not None:
                    tokens = served(
                        own, self._aligned(tokens), self._slots_per_block, cached, group.block_size, group.window
                    )
            tokens = self._aligned(tokens)
        return tokens

    def seen(self, keys: list[int], tokens: int) -> list[tuple[int, list[int]]]:
        """For each group, of a prefix of `tokens` tokens: how many leading blocks are out of its window, and the keys of the others."""
        parts = zip(self.groups, self._keys_by_group(keys), strict=True)
        return [group.seen(own, tokens)[0] for group, own in parts]

    def _aligned(self, tokens: int) -> int:
        """Whole blocks of every group."""
        return tokens - tokens % self._slots_per_block

    def tokens_in(self, hits: Sequence[int]) -> int:
        """Tokens that `hits` of all groups hold."""
        return len(hits) * self._slots_per_block // self._slots_per_token

    def split(self, hits: Sequence[int]) -> list[Sequence[int]]:
        """The hits of each group."""
        tokens, start, parts = self.tokens_in(hits), 0, []
        for group in self.groups:
            stop = start + tokens // group.block_size
            parts.append(hits[start:stop])
            start = stop
        return parts

    def tokens_before(self, table: BlockTable, tokens: int, void: Collection[int]) -> int:
        """The longest prefix that is void in no group, and whole in the window of each."""
        valid = min(group.tokens_before(own, tokens, void) for group, own in self._pairs(table))
        if valid == tokens:
            return tokens
        valid = self._aligned(valid)
        return valid if all(group.sees_all(own, valid) for group, own in self._pairs(table)) else 0

    # -- growing and giving back ----------------------------------------------------------------------------------

    def need(self, table: BlockTable, computed_tokens: int, new_tokens: int, hits: Sequence[int] = ()) -> int:
        """Blocks that would leave the free queue if `grow` were called with the same arguments."""
        return sum(
            group.need(own, computed_tokens, new_tokens, found)
            for (group, own), found in zip(self._pairs(table), self.split(hits), strict=True)
        )

    def need_for_whole(self, whole: Sequence[int], hits: Sequence[int]) -> int:
        """The same in every group: what one has found does not make up for what another lacks."""
        parts = zip(self.groups, whole, self.split(hits), strict=True)
        return sum(group.need_for_whole((blocks,), found) for group, blocks, found in parts)

    def grow(
        self, table: BlockTable, computed_tokens: int, new_tokens: int, hits: Sequence[int] = ()
    ) -> Allocation | None:
        """`BlockTables.grow` in every group, or in none. All hits are taken before any block is: or one group could get, as new,
        a block that holds what another has found.
        """
        self.slide(table, computed_tokens)
        if self.need(table, computed_tokens, new_tokens, hits) > self.pool.num_free:
            return None
        start = computed_tokens + self.tokens_in(hits)
        written = [group.written(own, computed_tokens, new_tokens) for group, own in self._pairs(table)]
        for (group, own), found in zip(self._pairs(table), self.split(hits), strict=True):
            group.take(own, found)
        blocks: list[int] = []
        copies: list[tuple[int, int]] = []
        for (group, own), places in zip(self._pairs(table), written, strict=True):
            allocation = group.fill(own, start + new_tokens, places)
            blocks += allocation.new_blocks
            copies += allocation.copies
        return Allocation(blocks, tuple(copies))

    def fork(self, table: BlockTable, owner: str) -> BlockTable:
        """A second set of tables over the same blocks."""
        return GroupTable(owner, [group.fork(own, owner) for group, own in self._pairs(table)])

    def truncate(
        self, table: BlockTable, tokens: int, by: str, fence: int | None = None, worth: float = 0.0
    ) -> list[int]:
        """Give back the blocks beyond the first `tokens` tokens, group by group; returns them."""
        return [
            block_id for group, own in self._pairs(table) for block_id in group.truncate(own, tokens, by, fence, worth)
        ]

    def slide(self, table: BlockTable, computed_tokens: int) -> list[int]:
        """Give back what slid out of each group's window."""
        slid: list[int] = []
        for group, own in self._pairs(table):
            if group.window is not None:
                slid += group.slide(own, computed_tokens)
        return slid

    def computed(self, table: BlockTable, computed_tokens: int) -> list[int]:
        """The blocks with the KV of the first `computed_tokens` tokens, group by group, without NO_BLOCK entries."""
        return [block_id for group, own in self._pairs(table) for block_id in group.computed(own, computed_tokens)]

    def _pairs(self, table: BlockTable) -> list[tuple[BlockTables, BlockTable]]:
        return list(zip(self.groups, table.groups, strict=True))


def tables_of(pool: BlockPool, config: EngineConfig) -> BlockTables:
    """The tables that a configuration asks for."""
    if config.kv_groups:
        return GroupTables(pool, config)
    return BlockTables(pool, config.block_size, config.sliding_window)
