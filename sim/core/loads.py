"""Loads: requests whose prefix comes from the CPU tier, and what they hold until it is there.

A block that is loaded belongs to its request, which neither computes on it nor shares it before the copy is done. A request that waits
for a load is not running: it takes no place in a step. It holds all blocks that it needs to produce its first tokens, or it does not
start to load: so loads never wait for each other (vLLM #45388, #57104). An abort leaves the blocks of a copy under way behind its
fence (#32255). A load that fails is computed instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from .blocks import BlockPool
from .config import EngineConfig
from .holdings import Holdings
from .need import blocks_for, new_blocks_for_whole
from .request import Request, State
from .tier import PrefixTier, TierBlock

Load = tuple[str, int, tuple[tuple[int, int], ...]]
"""`(request_id, fence, (CPU block, device block) pairs)`."""


@dataclass(slots=True, eq=False)
class Loading:
    """A request whose prefix is loaded, or has been and waits for its turn to run."""

    request: Request
    fence: int
    found: list[TierBlock]
    """What is read."""
    hits: int
    """Leading blocks of its table that were on the device."""
    since_fs: int
    """Up to when the tokens in its blocks are accounted for."""
    done: bool = False

    def settle(self, now_fs: int) -> None:
        """Account for the tokens in its blocks until now."""
        self.request.token_fs += self.request.num_computed_tokens * (now_fs - self.since_fs)
        self.since_fs = now_fs


class Loads:
    """The copies from one engine's CPU tier to its device pool, and who waits for them."""

    def __init__(
        self, config: EngineConfig, holdings: Holdings, tier: PrefixTier, new_fence: Callable[[], int]
    ) -> None:
        self._config = config
        self._holdings = holdings
        self._pool: BlockPool = holdings.pool
        self._tier = tier
        self._new_fence = new_fence
        self._no_load: set[Request] = set()
        self._new: list[Load] = []
        self.under_way: dict[int, Loading] = {}
        """By fence, the loads that have not ended."""
        self.waiting: dict[Request, Loading] = {}
        """Requests that hold blocks and do not run."""
        self.ready: deque[Loading] = deque()
        """Those of them whose load has ended, in that order."""
        self.hit_tokens = 0
        """Prompt tokens that first admissions did not find on the device but in the tier."""
        self.num_blocks = 0
        """Blocks whose copies were begun."""

    def take_new(self) -> tuple[Load, ...]:
        """Loads begun since the last call."""
        new, self._new = tuple(self._new), []
        return new

    # -- before and at the start ------------------------------------------------------------------------------------------

    def has_more(self, request: Request, hits: int) -> bool | None:
        """Whether the tier has something of a waiting request's prefix beyond its `hits` blocks on the device. None: it had better wait,
        because a copy that is under way brings what comes next. Sequences that fork do not load: they find what the others of their
        family have.
        """
        if request.spec.forking is not None:
            return False
        if (
            hits >= self._holdings.findable_blocks(request)
            or request in self._no_load
            or not self._holdings.reuses(request)
        ):
            return False
        (first,) = request.keys.keys(hits, hits + 1)
        if first not in self._tier.keys:  # most often, and asked again in every step
            return False
        return None if self._tier.is_moving(first) else True

    def need(self, request: Request, hits: list[int]) -> tuple[int, int]:
        """Blocks that a request must hold before it may load: all its known tokens' and that of the next, and those of them that come
        from the free queue.
        """
        tokens = request.num_tokens
        if (request.spec.max_tokens or 2) > request.num_output_tokens + 1 and tokens < self._config.max_model_len:
            tokens += 1
        whole = min(blocks_for(tokens, self._config.block_size), self._pool.num_blocks)
        return whole, new_blocks_for_whole(whole, len(hits), self._pool.num_unreferenced(hits))

    def begin(self, request: Request, hits: list[int], whole: int, now_fs: int) -> None:
        """Take the blocks and load all that the tier has beyond the `hits`; there must be enough room, and something to load."""
        pool, holdings = self._pool, self._holdings
        found = self._tier.find(request.keys.keys(len(hits), holdings.findable_blocks(request)))
        pool.acquire(hits)
        blocks = pool.allocate(whole - len(hits))
        assert blocks is not None  # `need` was compared with what is free
        request.table.blocks = [*hits, *blocks]
        request.state = State.LOADING
        request.num_computed_tokens = len(hits) * self._config.block_size
        request.num_registered = len(hits)
        holdings.hold(request, whole, now_fs)
        loading = self.waiting[request] = Loading(request, self._new_fence(), found, len(hits), now_fs)
        if hits:
            holdings.sharing.join(request, holdings.tables.split(hits), now_fs)
        self._tier.begin_load(found)
        self.under_way[loading.fence] = loading
        self.num_blocks += len(found)
        pairs = tuple((block.block_id, target) for block, target in zip(found, blocks, strict=False))
        self._new.append((request.request_id, loading.fence, pairs))

    # -- at the end -------------------------------------------------------------------------------------------------------

    def end(self, fence: int, now_fs: int, *, done: bool) -> None:
        """One of them has ended, or failed."""
        loading = self.under_way.pop(fence)
        request = loading.request
        self._tier.end_load(loading.found, done=done)
        self._pool.pass_fence(fence)
        if request not in self.waiting:
            return  # its client left, and its blocks have returned just now
        loading.settle(now_fs)
        loading.done = True
        self.ready.append(loading)
        if not done:
            self._no_load.add(request)
            return
        stop = loading.hits + len(loading.found)
        self._pool.index.add(request.table.blocks[loading.hits : stop], (block.key for block in loading.found))
        request.num_registered = stop
        request.num_computed_tokens = stop * self._config.block_size
        if not request.num_preemptions:
            self.hit_tokens += len(loading.found) * self._config.block_size

    def leave(self, loading: Loading, now_fs: int) -> None:
        """A request stops being one that loads: it runs now, or it is gone."""
        loading.settle(now_fs)
        del self.waiting[loading.request]
        if loading.done:
            self.ready.remove(loading)

    def drop(self, request: Request, why: str, now_fs: int) -> list[int]:
        """A request goes away; blocks that its load still writes return when that is done. A load that no plan has told yet is not done
        at all. Returns the blocks that a plan has to say are given back.
        """
        loading = self.waiting[request]
        self.leave(loading, now_fs)
        if loading.done:
            return self._holdings.release(request, why, now_fs, reusable=False)
        told = [load for load in self._new if load[1] != loading.fence]
        if len(told) == len(self._new):
            return self._holdings.release_unwritten(request, loading.hits, why, loading.fence, now_fs)
        self._new = told
        del self.under_way[loading.fence]
        self._tier.end_load(loading.found, done=True)
        self.num_blocks -= len(loading.found)
        self._holdings.release_unwritten(request, loading.hits, why, None, now_fs)
        return []

    def forget(self, request: Request) -> None:
        """A request has ended."""
        self._no_load.discard(request)
