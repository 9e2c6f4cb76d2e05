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
from .need import admission_blocks, new_blocks_for_whole, skipped_blocks
from .request import Request
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
        self.table_blocks = 0
        """Entries in all block tables; a shared block counts once a holder."""
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
            self.sharing.leave_some(request, slid, now_fs)
            self.hold(request, -len(slid), now_fs)
            draft.released.append((request.request_id, slid))

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
        blocks = request.table.blocks
        self.pool.forget(
            blocks[computed_blocks : request.num_registered]
        )  # registered for a step that will not be computed
        if self.reuses(request) and not request.dropped_tokens:
            self._register_upto(request, computed_blocks if reusable else min(computed_blocks, request.keys.num_shared))
        self.sharing.leave(request, now_fs)
        self.hold(request, -request.held_blocks, now_fs)
        request.num_registered = 0
        return self.tables.release(request.table, f"{request.request_id} ({why})", worth=-float(request.spec.priority))

    def release_unwritten(self, request: Request, written: int, why: str, fence: int, now_fs: int) -> None:
        """Give back all blocks of a request, of which a copy still writes those after the first `written`."""
        by, worth = f"{request.request_id} ({why})", -float(request.spec.priority)
        self.sharing.leave(request, now_fs)
        self.hold(request, -request.held_blocks, now_fs)
        request.num_registered = 0
        blocks, request.table.blocks = request.table.blocks, []
        self.pool.release(blocks[written:], by, fence)
        self.pool.release(blocks[:written], by, worth=worth)

    def find(self, request: Request) -> list[int]:
        """Blocks with the longest cached prefix of a waiting request.

        The last token is always computed: something must be sampled from it.
        """
        if not self.reuses(request):
            return []
        hits = self.pool.find(request.keys.keys(0, self.findable_blocks(request)))
        passed = skipped_blocks(len(hits) * self.config.block_size, self.config.block_size, self.config.sliding_window)
        return [NO_BLOCK] * passed + hits[passed:]

    def findable_blocks(self, request: Request) -> int:
        """Leading blocks of a waiting request that may have been computed before, without the last token's."""
        stop = (request.num_tokens - 1) // self.config.block_size
        if not request.num_preemptions:
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
        if not self.reuses(request):
            return
        self._register_upto(request, min(computed_tokens // self.config.block_size, request.keys.num_shared))

    def _register_upto(self, request: Request, stop: int) -> None:
        start = request.num_registered
        if start < stop:
            blocks, keys = request.table.blocks[start:stop], request.keys.keys(start, stop)
            self.pool.index.add(blocks, keys)
            request.num_registered = stop
            if self.offload is not None:
                self.offload.note(blocks, keys)

    def forget_private(self, request: Request) -> None:
        """A request that was preempted has ended: what it left in the prefix index for itself, nobody will ever look for."""
        if request.num_preemptions:
            stop = request.computed_high // self.config.block_size
            private = request.keys.keys(min(request.keys.num_shared, stop), stop)
            self.pool.forget(block_id for key in private for block_id in self.pool.index.find([key]))
            if self.offload is not None:
                self.offload.forget(request, private)

    def prompt_blocks(self, request: Request, hits: list[int]) -> int:
        """Blocks that the whole of a waiting request takes from the free queue, beyond its hits."""
        return new_blocks_for_whole(self.whole_blocks(request), len(hits), self.pool.num_unreferenced(hits))

    def whole_blocks(self, request: Request) -> int:
        """Blocks that all known tokens of a request come to hold at once, at most.

        With a window that is an upper bound: it does not speak against a request that has run in this pool before.
        """
        config = self.config
        whole = admission_blocks(
            request.num_tokens,
            config.block_size,
            window=config.sliding_window,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
        )
        if config.sliding_window is not None and request.num_preemptions:
            return min(whole, self.pool.num_blocks)
        return whole

    def tokens_that_fit(self, computed_tokens: int) -> int:
        """Most tokens that a request with a sliding window could compute at once if the whole pool were free (at least 1)."""
        block_size = self.config.block_size
        skipped = skipped_blocks(computed_tokens, block_size, self.config.sliding_window)
        return max((self.pool.num_blocks + skipped) * block_size - computed_tokens, 1)
