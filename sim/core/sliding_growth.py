"""How tables that slide, or stand beside others of the same request, change while the decode set decodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from math import lcm

from .decode import DecodeSet
from .growth import Growth, Tables
from .holdings import Holdings
from .need import skipped_blocks
from .request import Request
from .tables import BlockTable, BlockTables


class GroupGrowth(Growth):
    """A member takes a block in each group when the group's last one is full, and gives back what slid out of each window."""

    slides = True

    def __init__(self, decode: DecodeSet, holdings: Holdings, tables: BlockTables) -> None:
        super().__init__(decode, holdings)
        self._tables = tables
        self._sizes = [group.block_size for group in tables.groups]
        self._windows = sorted({group.window for group in tables.groups if group.window is not None})

    def changing_until(self, stop: int) -> list[int]:
        """The steps from now, in [1, stop), in which tables may change: who slides may have nothing to give."""
        steps = set(self.decode.steps_at(0, stop))
        return sorted(steps.union(*(self.decode.steps_at(window - 1, stop) for window in self._windows)))

    def num_needed(self) -> int:
        """Blocks that the members take in the next step."""
        return sum(len(groups) for _, groups in self._needing(0))

    def owned_change(self, ahead: int) -> int:
        """What is taken, less what nobody holds any more. A shared block that slides out of some tables stays owned."""
        taken = sum(len(groups) for step in range(1, ahead + 1) for _, groups in self._needing(step))
        given: dict[int, int] = {}
        private = 0
        for request in self.decode:
            computed = self.decode.computed(request) + ahead
            for group, table in zip(self._tables.groups, request.table.groups, strict=True):
                stop = skipped_blocks(computed, group.block_size, group.window)
                private += max(stop - len(table), 0)  # taken and given back within these steps
                for block_id in _live_before(table, stop):
                    given[block_id] = given.get(block_id, 0) + 1
        ref_cnt = self.holdings.pool.ref_cnt
        return taken - private - sum(times == ref_cnt(block_id) for block_id, times in given.items())

    def most_taken(self, steps: int) -> int:
        """Blocks that are taken in so many steps, at most."""
        return len(self.decode) * sum(-(-steps // size) for size in self._sizes)

    def steps_taking(self, blocks: int, limit: int) -> int:
        """How many of the steps 1, 2, … from now, at most `limit`, take no more than so many blocks in all."""
        if self.most_taken(limit) <= blocks:
            return limit
        taken, _, _ = self._flows(limit, lcm(*self._sizes))
        return _steps_within(blocks, taken, limit)

    def steps_that_fit(
        self, free_blocks: int, limit: int, *, emptier_by: int | None = None, before_taking: bool = False
    ) -> int:
        """At least a prefix of the steps that fit; a stretch may be shorter than it could be, never longer.

        In `slots_per_block` steps, a turn, each member takes the same number of blocks. A window gives one back for each that its
        group takes once it is full, if nobody shares it: only those are counted on.
        """
        if emptier_by is None and self.most_taken(limit) <= free_blocks:
            return limit
        turn = lcm(*self._sizes)
        taken, sure, possible = self._flows(limit, turn)
        if emptier_by is not None:
            balance = emptier_by
            for step in range(min(turn, limit)):  # later turns take no less and give no more than the first
                lowest = balance - possible[step]
                balance = lowest + taken[step]
                if (lowest if before_taking else balance) < 0:
                    limit = step
                    break
        return _steps_within(free_blocks, [more - less for more, less in zip(taken, sure, strict=True)], limit)

    def _flows(self, limit: int, turn: int) -> tuple[list[int], list[int], list[int]]:
        """For steps 1 to `turn` from now: blocks taken, surely given back, and given back at most, if it goes on for `limit` steps."""
        taken, sure, possible = [0] * turn, [0] * turn, [0] * turn
        reading = bool(self.holdings.pool.being_read)  # what a copy reads comes back only when it is done
        for request in self.decode:
            first = self.decode.computed(request) + 1
            alone = not request.shared_runs and not request.dropped_tokens and not reading
            for group in self._tables.groups:
                size, window = group.block_size, group.window
                for step in range(-first % size, turn, size):
                    taken[step] += 1
                if window is None or first + limit - window < size:
                    continue
                for step in range((window - 1 - first) % size, turn, size):
                    possible[step] += 1
                    sure[step] += alone and first >= window
        return taken, sure, possible

    def slide(self, ahead: int, elapsed_fs: int, now_fs: int) -> list[tuple[str, list[int]]]:
        """Members that have just joined give back what slid out of view in their prompts; the others, a block at a time."""
        released = []
        for request, slid in self._slide(ahead, self._tables, lambda request: request.table):
            self.holdings.gave_back(request, slid, now_fs)
            self.decode.empty(request, len(slid), elapsed_fs)
            released.append((request.request_id, slid))
        return released

    def grow(self, ahead: int, now_fs: int) -> dict[int, list[int]]:
        """In running order, for each request group by group."""
        grown: dict[int, list[int]] = {}
        for request, blocks in self._grow(ahead, self._tables, lambda request: request.table):
            self.holdings.hold(request, len(blocks), now_fs)
            grown[request.order] = blocks
        return grown

    def tables_in(self, ahead: int) -> Callable[[Request], Tables]:
        """Found out by doing it, on a copy of the pool: who asks for a later step of a stretch pays for that."""
        copies: dict[int, BlockTable] = {}
        if ahead:
            for request in self.decode:
                own = copies[request.order] = self._tables.new(request.request_id)
                for copy, table in zip(own.groups, request.table.groups, strict=True):
                    copy.blocks = table.blocks.copy()
            tables = self._tables.on(deepcopy(self.holdings.pool))
            for step in range(1, ahead + 1):
                for _ in self._slide(step, tables, lambda request: copies[request.order]):
                    pass
                for _ in self._grow(step, tables, lambda request: copies[request.order]):
                    pass
        return lambda request: tuple(tuple(table.blocks) for table in copies.get(request.order, request.table).groups)

    def _slide(
        self, ahead: int, tables: BlockTables, table_of: Callable[[Request], BlockTable]
    ) -> Iterator[tuple[Request, list[int]]]:
        decode = self.decode
        due = {} if ahead else {request.order: request for request in decode.fresh}
        for window in self._windows:
            due |= decode.at(ahead, window - 1)
        for order in sorted(due):
            request = due[order]
            if slid := tables.slide(table_of(request), decode.computed(request) + ahead):
                yield request, slid

    def _grow(
        self, ahead: int, tables: BlockTables, table_of: Callable[[Request], BlockTable]
    ) -> Iterator[tuple[Request, list[int]]]:
        needing = self._needing(ahead)
        blocks = tables.pool.allocate(sum(len(groups) for _, groups in needing))
        assert blocks is not None  # checked by whoever planned this step
        left = iter(blocks)
        for request, groups in needing:
            own = [next(left) for _ in groups]
            for index, block_id in zip(groups, own, strict=True):
                table_of(request).groups[index].blocks.append(block_id)
            yield request, own

    def _needing(self, ahead: int) -> list[tuple[Request, list[int]]]:
        """Members that need blocks in that step, in running order, with the groups in which they do."""
        decode, sizes = self.decode, self._sizes
        every = list(range(len(sizes)))
        if len(set(sizes)) == 1:
            return [(request, every) for request in decode.needing_block(ahead)]
        found = []
        for request in decode.needing_block(ahead):
            computed = decode.computed(request) + ahead
            found.append((request, [index for index in every if not computed % sizes[index]]))
        return found


def _steps_within(blocks: int, net: list[int], limit: int) -> int:
    """How many steps, at most `limit`, can be had from so many blocks, if every turn of `len(net)` steps takes those in its steps."""
    deepest = used = 0
    for taken in net:
        used += taken
        deepest = max(deepest, used)
    turns = limit // len(net)
    if used:
        turns = min(turns, max((blocks - deepest) // used + 1, 0))
    elif deepest > blocks:
        turns = 0
    blocks -= turns * used
    steps = turns * len(net)
    while steps < limit:
        blocks -= net[steps % len(net)]
        if blocks < 0:
            break
        steps += 1
    return steps


def _live_before(table: BlockTable, stop: int) -> list[int]:
    """The blocks that would slide out if the first `stop` did."""
    start = stop = min(stop, len(table))
    while start and table.blocks[start - 1]:
        start -= 1
    sink = [table.blocks[0]] if start and table.blocks[0] else []
    return sink + table.blocks[start:stop]
