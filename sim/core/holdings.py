"""Holdings: what each request holds of the pool, and what of it others may find.

The scheduler decides who gets and who gives; here the tables, the prefix index and the accounts are kept in step with that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from .blocks import NO_BLOCK
from .config import EngineConfig
from .draft import Draft
from .ladder import Knobs
from .request import Request
from .retention import Retention, courses
from .sharing import SharingMeter
from .tables import BlockTables

if TYPE_CHECKING:
    from .offload import Offload


class Holdings:
    """The block tables of one engine's requests, with the prefix index and the time integrals that go with them."""

    def __init__(
        self, config: EngineConfig, tables: BlockTables, knobs: Knobs, running: Callable[[], Iterable[Request]]
    ) -> None:
        self.config = config
        self.tables = tables
        self.pool = tables.pool
        self.knobs = knobs
        self.sharing = SharingMeter(tables.pool, running)
        self.windows = any(group.window is not None for group in config.groups)
        """Whether requests give blocks back while they run."""
        self.table_blocks = 0
        """Entries in all block tables; a shared block counts once a holder."""
        self.retention: tuple[Retention, ...] | None = None
        """What of every request is to be kept; None if the eviction order does not ask."""
        self.offload: Offload | None = None
        """The CPU prefix tier, if there is one."""

    def hold(self, request: Request, change: int, now_fs: int) -> None:
        """Account for `change` blocks added to a request's table (or, when negative, given back)."""
        self.table_blocks += change
        request.hold(change, now_fs)

    def slide(self, request: Request, computed_tokens: int, draft: Draft, now_fs: int) -> None:
        """Give back the blocks that left the attention window."""
        slid = self.tables.slide(request.table, computed_tokens)
        if slid:
            self.gave_back(request, slid, now_fs)
            draft.released.append((request.request_id, slid))

    def gave_back(self, request: Request, blocks: list[int], now_fs: int) -> None:
        """Account for blocks that a request which goes on has given back."""
        self.sharing.leave_some(request, blocks, now_fs)
        self.hold(request, -len(blocks), now_fs)

    def shorten(self, request: Request, tokens: int, now_fs: int) -> None:
        """Give back the blocks beyond the first `tokens` tokens: the step that took them computed nothing."""
        dropped = self.tables.truncate(request.table, tokens, f"{request.request_id} (step ran out of memory)")
        self.sharing.leave_some(request, dropped, now_fs)
        self.hold(request, -sum(1 for block_id in dropped if block_id != NO_BLOCK), now_fs)

    def release(self, request: Request, why: str, now_fs: int, *, reusable: bool) -> list[int]:
        """Give back all blocks of a running request that is not in the decode set.

        What others may share stays findable. Private blocks do only if `reusable`: nobody but the request itself could find them.
        """
        computed_blocks = request.num_computed_tokens // self.config.block_size
        # Registered for a step that will not be computed:
        self.pool.forget(self.tables.between(request.table, computed_blocks, request.num_registered))
        if self.reuses(request) and not request.dropped_tokens:
            self._register_upto(request, computed_blocks if reusable else min(computed_blocks, request.keys.num_shared))
        self.sharing.leave(request, now_fs)
        self.hold(request, -request.held_blocks, now_fs)
        request.num_registered = 0
        if self.retention is not None:
            self._retain(request, self.retention, now_fs)
        return self.tables.release(request.table, f"{request.request_id} ({why})", worth=-float(request.spec.priority))

    def _retain(self, request: Request, retention: tuple[Retention, ...], now_fs: int) -> None:
        """Say how long the blocks that a request gives back are to be kept."""
        self.pool.tick(now_fs)
        ranges = (*request.spec.retention, *retention)
        for group, table in zip(self.config.groups, request.table.groups, strict=True):
            kept = courses(ranges, request.spec.input_tokens, len(table), group.block_size, now_fs)
            self.pool.retain(table.blocks, kept)

    def release_unwritten(self, request: Request, why: str, fence: int | None, now_fs: int) -> list[int]:
        """Give back all blocks of a request that loads, and has computed nothing; returns them. What it did not find on the device waits
        for the `fence`, if a copy still writes.
        """
        by, worth = f"{request.request_id} ({why})", -float(request.spec.priority)
        self.sharing.leave(request, now_fs)
        self.hold(request, -request.held_blocks, now_fs)
        request.num_registered = 0
        blocks = [block_id for block_id in request.table.blocks if block_id != NO_BLOCK]
        for table in request.table.groups:
            table.blocks = []
        known = [block_id for block_id in blocks if block_id in self.pool.index]
        self.pool.release([block_id for block_id in blocks if block_id not in self.pool.index], by, fence)
        self.pool.release(known, by, worth=worth)
        return blocks

    def find(self, request: Request) -> list[int]:
        """Blocks with the longest cached prefix of a waiting request.

        The last token is always computed: something must be sampled from it.
        """
        if not self.reuses(request):
            return []
        return self.tables.find(request.keys.keys(0, self.findable_blocks(request)))

    def findable_blocks(self, request: Request) -> int:
        """Leading blocks of a waiting request that may have been computed before, without the last token's."""
        stop = (request.num_tokens - 1) // self.config.block_size
        if not request.num_preemptions and not request.computed_high:
            stop = min(stop, request.keys.num_shared)  # its private blocks have never been computed
        return stop

    def reuses(self, request: Request) -> bool:
        """Whether a request takes part in the prefix cache."""
        if not self.config.enable_prefix_caching:
            return False
        if self.knobs.reuse or self.knobs.spares(request.spec.priority):
            return True
        request.degrade("no_reuse")
        return False

    def register(self, request: Request, computed_tokens: int) -> None:
        """Make blocks that will be full after this step findable at once: whoever finds them is computed after them."""
        if self.reuses(request):
            self._register_upto(request, self._findable_by_others(request, computed_tokens))

    def has_to_register(self, request: Request, computed_tokens: int) -> bool:
        """Whether `register` may find something to do."""
        return (
            self.config.enable_prefix_caching
            and self._findable_by_others(request, computed_tokens) > request.num_registered
        )

    def _findable_by_others(self, request: Request, computed_tokens: int) -> int:
        findable = request.keys.num_shared
        if request.spec.forking is not None and request.num_preemptions:  # its copies come back after it
            findable = max(findable, request.computed_high // self.config.block_size)
        return min(computed_tokens // self.config.block_size, findable)

    def publish(self, request: Request, computed_tokens: int) -> None:
        """Make all full blocks of a running request findable: for one that has gone on as a copy of it, and waits."""
        if self.reuses(request) and not request.dropped_tokens:
            self._register_upto(request, computed_tokens // self.config.block_size)

    def _register_upto(self, request: Request, stop: int) -> None:
        start = request.num_registered
        if start < stop:
            keys = self.tables.keys(request.keys.keys(start, stop), start)
            blocks = self.tables.between(request.table, start, stop)
            self.pool.index.add(blocks, keys)
            request.num_registered = stop
            if self.offload is not None:
                self.offload.saves.note(blocks, keys)

    def forget_private(self, request: Request, copies: Iterable[Request]) -> None:
        """A request that was preempted has ended: what it left in the prefix index for itself, nobody will ever look for, but for its
        `copies`, if any are left.
        """
        if request.num_preemptions:
            stop = request.computed_high // self.config.block_size
            first = min(request.keys.num_shared, stop)
            theirs = {key for copy in copies for key in self.tables.keys(copy.keys.keys(first, stop), first)}
            mine = self.tables.keys(request.keys.keys(first, stop), first)
            private = [key for key in mine if key not in theirs]
            self.pool.forget(block_id for key in private for block_id in self.pool.index.find([key]))
            if self.offload is not None:
                self.offload.forget(request, private)

    def prompt_blocks(self, request: Request, hits: list[int]) -> int:
        """Blocks that the whole of a waiting request takes from the free queue, beyond its hits."""
        return min(self.tables.need_for_whole(self._whole_by_group(request), hits), self.pool.num_blocks)

    def whole_blocks(self, request: Request) -> int:
        """Blocks that all known tokens of a request come to hold at once, at most.

        With a window that is an upper bound: it does not speak against a request that has run in this pool before.
        """
        whole = sum(self._whole_by_group(request))
        return min(whole, self.pool.num_blocks) if self.windows and request.num_preemptions else whole

    def _whole_by_group(self, request: Request) -> list[int]:
        by_group = self.config.most_blocks_by_group(request.num_tokens)
        if self.windows and request.num_preemptions:
            return [min(whole, self.pool.num_blocks) for whole in by_group]
        return by_group

    def fitting(self, computed_tokens: int, wanted: int) -> int:
        """How many of `wanted` tokens a request could compute at once if the whole pool were free: with a sliding window, computing
        a few at a time needs less than computing all. At least 1.
        """
        if not self.windows or self.config.blocks_at(computed_tokens, computed_tokens + wanted) <= self.pool.num_blocks:
            return wanted
        low, high = 1, wanted
        while low < high:
            middle = (low + high + 1) // 2
            if self.config.blocks_at(computed_tokens, computed_tokens + middle) <= self.pool.num_blocks:
                low = middle
            else:
                high = middle - 1
        return low
