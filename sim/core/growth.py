"""How the tables of the decode set change while it decodes: what each step takes and gives back, and how many steps that lasts.

`Growth` is for one table a request, which only grows; `sliding_growth` has what slides, and several tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from .decode import DecodeSet
from .holdings import Holdings
from .request import Request

Tables = tuple[tuple[int, ...], ...]
"""The block tables of one request, one a group."""

Change = tuple[int, list[tuple[str, list[int]]], dict[int, list[int]], int]
"""`(step, slid, taken, owned)`: what `slide` and `grow` return for a step, and the blocks that are owned then."""


class Growth:
    """Every member takes a block when its last one is full."""

    slides = False
    """Whether members give blocks back while they decode."""

    def __init__(self, decode: DecodeSet, holdings: Holdings) -> None:
        self.decode = decode
        self.holdings = holdings

    def changing_until(self, stop: int) -> list[int]:
        """The steps from now, in [1, stop), in which tables may change."""
        return self.decode.steps_at(0, stop)

    def through(self, stop: int, start_fs: int, before_fs: Callable[[int], int]) -> Iterator[Change]:
        """Change the tables as steps 1, 2, … from now, before `stop`, change them; step i begins `before_fs(i)` after `start_fs`. Of use
        to the end only: blocks are taken at once where neither time nor what slides comes between.
        """
        pool, steps = self.holdings.pool, self.changing_until(stop)
        if pool.ages or self.slides:
            for step in steps:
                elapsed_fs = before_fs(step)
                pool.tick(start_fs + elapsed_fs)
                slid = self.slide(step, elapsed_fs, start_fs + elapsed_fs)
                yield step, slid, self.grow(step, start_fs + elapsed_fs), pool.num_owned
            return
        owned = pool.num_owned
        blocks = pool.allocate(sum([self.decode.num_needing_block(step) for step in steps]))
        assert blocks is not None  # checked by whoever planned these steps
        stock = iter(blocks)
        for step in steps:
            taken = self._give(self.decode.needing_block(step), stock, start_fs + before_fs(step))
            owned += len(taken)
            yield step, [], taken, owned

    def num_needed(self) -> int:
        """Blocks that the members take in the next step."""
        return self.decode.num_needing_block()

    def owned_change(self, ahead: int) -> int:
        """By how much the number of owned blocks grows in steps 1 to `ahead` from now."""
        return sum(self.decode.num_needing_block(step) for step in range(1, ahead + 1))

    def most_taken(self, steps: int) -> int:
        """Blocks that are taken in so many steps, at most."""
        return len(self.decode) * -(-steps // self.decode.block_size)

    def steps_taking(self, blocks: int, limit: int) -> int:
        """How many of the steps 1, 2, … from now, at most `limit`, take no more than so many blocks in all."""
        return self.decode.steps_that_fit(blocks, 1, limit)

    def steps_that_fit(
        self, free_blocks: int, limit: int, *, emptier_by: int | None = None, before_taking: bool = False
    ) -> int:
        """How many of the steps 1, 2, … from now, at most `limit`, can be given blocks from `free_blocks`, and leave the pool emptier than
        it is now by at most `emptier_by` blocks, if that is given; with `before_taking`, also between what slides and what is taken.
        """
        return self.decode.steps_that_fit(free_blocks, 1, limit)

    def slide(self, ahead: int, elapsed_fs: int, now_fs: int) -> list[tuple[str, list[int]]]:
        """Take back what slides out of the members' windows in the step `ahead` steps from now, `elapsed_fs` after the start of the plan
        that is out; returns `(request_id, block_ids)`.
        """
        return []

    def grow(self, ahead: int, now_fs: int) -> dict[int, list[int]]:
        """Give members the blocks they need in the step `ahead` steps from now, by admission order; there must be enough."""
        needing = self.decode.needing_block(ahead)
        blocks = self.holdings.pool.allocate(len(needing))
        assert blocks is not None  # checked by whoever planned this step
        return self._give(needing, blocks, now_fs)

    def _give(self, needing: list[Request], blocks: Iterable[int], now_fs: int) -> dict[int, list[int]]:
        """A block of `blocks` to each."""
        self.holdings.table_blocks += len(needing)
        grown: dict[int, list[int]] = {}
        for request, block_id in zip(needing, blocks):  # noqa: B905 - what is left is for later steps
            request.table.blocks.append(block_id)
            request.hold(1, now_fs)
            grown[request.order] = [block_id]
        return grown

    def tables_in(self, ahead: int) -> Callable[[Request], Tables]:
        """The tables that running requests will have `ahead` steps from now, if they decode until then. Where the order of eviction depends
        on the time, the blocks taken until then may be others, as many.
        """
        needing = [request.order for step in range(1, ahead + 1) for request in self.decode.needing_block(step)]
        future: dict[int, list[int]] = {}
        for order, block_id in zip(needing, self.holdings.pool.peek(len(needing)), strict=True):
            future.setdefault(order, []).append(block_id)
        return lambda request: ((*request.table.blocks, *future.get(request.order, ())),)
