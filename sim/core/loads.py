"""Loads: requests whose prefix comes from the CPU tier, and what they hold until it is there.

A block that is loaded belongs to its request, which neither computes on it nor shares it before the copy is done. A request that waits
for a load is not running: it takes no place in a step. It holds all blocks that it needs to produce its first tokens, or it does not
start to load: so loads never wait for each other (vLLM #45388, #57104). An abort leaves the blocks of a copy under way behind its
fence (#32255). A request whose load fails goes back to the queue, and is computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from .blocks import NO_BLOCK, BlockPool
from .config import EngineConfig
from .holdings import Holdings
from .need import blocks_for
from .reach import Reach, Reaches
from .request import Request, State
from .tier import PrefixTier

Load = tuple[str, int, tuple[tuple[int, int], ...]]
"""`(request_id, fence, (CPU block, device block) pairs)`."""


@dataclass(slots=True, eq=False)
class Loading:
    """A request whose prefix is loaded, or has been and waits for its turn to run."""

    request: Request
    fence: int
    reach: Reach
    """What is read, and what was on the device."""
    targets: list[int]
    """The blocks that the copy writes."""
    filled_slots: int
    """Token slots of its blocks that hold something."""
    since_fs: int
    """Up to when those are accounted for."""
    done: bool = False

    def settle(self, now_fs: int) -> None:
        """Account for the tokens in its blocks until now."""
        self.request.token_fs += self.filled_slots * (now_fs - self.since_fs)
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
        self._reaches = Reaches(holdings, tier)
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

    def find(self, request: Request, hits: list[int]) -> Reach | None:
        """What a waiting request would have if the tier's part of its prefix were loaded; None if that is no more than the device's
        `hits`. Sequences that fork do not load: they find what the others of their family have.
        """
        if (
            request.spec.forking is not None
            or request in self._no_load
            or not len(self._tier)
            or not self._holdings.reuses(request)
        ):
            return None
        return self._reaches.find(request, hits)

    def need(self, request: Request, reach: Reach) -> tuple[list[int], int] | None:
        """Blocks that a request must hold before it may load, as the length of each of its tables, and how many of them come from the free
        queue: all its known tokens' and that of the next, though where a window slides no more than the next step can compute. None if the
        whole pool has fewer.
        """
        tokens = request.num_tokens
        more = (request.spec.max_tokens or 2) > request.num_output_tokens + 1 and tokens < self._config.max_model_len
        found = [block_id for own in reach.hits for block_id in own if block_id != NO_BLOCK]
        for upto in (tokens + 1, tokens) if more else (tokens,):
            nearest = min(upto, reach.tokens + self._config.max_num_batched_tokens)
            lengths = [
                blocks_for(upto if group.window is None else nearest, group.block_size) for group in self._config.groups
            ]
            held = sum(lengths) - reach.num_passed
            if held <= self._pool.num_blocks:
                return lengths, held - len(found) + self._pool.num_unreferenced(found)
        return None

    def begin(self, request: Request, reach: Reach, lengths: list[int], now_fs: int) -> None:
        """Take blocks for tables of these lengths, and load what the tier has; there must be enough room."""
        pool, holdings = self._pool, self._holdings
        self._reaches.complete(request, reach)
        found = [block_id for own in reach.hits for block_id in own if block_id != NO_BLOCK]
        held = sum(lengths) - reach.num_passed
        pool.acquire(found)
        blocks = pool.allocate(held - len(found))
        assert blocks is not None  # `need` was compared with what is free
        targets = self._fill(request, reach, lengths, blocks)
        request.state = State.LOADING
        request.num_computed_tokens = reach.hit_tokens
        holdings.hold(request, held, now_fs)
        slots = self._config.slots_per_block
        loading = Loading(request, self._new_fence(), reach, targets, len(found) * slots, now_fs)
        self.waiting[request] = self.under_way[loading.fence] = loading
        if found:
            holdings.sharing.join(request, reach.hits, now_fs)
        self._tier.begin_load(reach.blocks)
        self.num_blocks += len(targets)
        pairs = tuple(zip([block.block_id for block in reach.blocks], targets, strict=True))
        self._new.append((request.request_id, loading.fence, pairs))

    def _fill(self, request: Request, reach: Reach, lengths: list[int], blocks: list[int]) -> list[int]:
        """Make the tables; returns the blocks that are loaded, in the order of `reach.blocks`."""
        fresh = iter(blocks)
        targets: list[int] = []
        for table, own, places, length in zip(request.table.groups, reach.hits, reach.places, lengths, strict=True):
            table.blocks = own.copy()
            for place in places:
                target = next(fresh)
                targets.append(target)
                if place < len(own):
                    table.blocks[place] = target
                else:
                    table.blocks.append(target)
            table.blocks += [next(fresh) for _ in range(length - len(table.blocks))]
        return targets

    # -- at the end -------------------------------------------------------------------------------------------------------

    def end(self, fence: int, now_fs: int, *, done: bool) -> Loading | None:
        """One of them has ended. If it failed, what it was: its request waits again, and whoever asks has to queue it."""
        loading = self.under_way.pop(fence)
        request = loading.request
        self._tier.end_load(loading.reach.blocks, done=done)
        self._pool.pass_fence(fence)
        if request not in self.waiting:
            return None  # its client left, and its blocks have returned just now
        if not done:
            self._no_load.add(request)
            return loading
        loading.settle(now_fs)
        loading.done = True
        self.ready.append(loading)
        reach = loading.reach
        self._pool.index.add(loading.targets, [block.key for block in reach.blocks])
        loading.filled_slots += len(loading.targets) * self._config.slots_per_block
        request.num_computed_tokens = reach.tokens
        request.num_registered = reach.tokens // self._config.block_size
        if not request.num_preemptions:
            self.hit_tokens += reach.tokens - reach.hit_tokens
        return None

    def leave(self, loading: Loading, now_fs: int) -> None:
        """A request stops being one that loads: it runs now, or it is gone."""
        loading.settle(now_fs)
        del self.waiting[loading.request]
        if loading.done:
            self.ready.remove(loading)

    def give_up(self, loading: Loading, now_fs: int) -> list[int]:
        """A request whose load has failed waits again, with nothing. Returns the blocks that a plan has to say are given back."""
        request = loading.request
        self.leave(loading, now_fs)
        request.state, request.num_computed_tokens = State.WAITING, 0
        return self._holdings.release_unwritten(request, "could not be loaded", None, now_fs)

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
            return self._holdings.release_unwritten(request, why, loading.fence, now_fs)
        self._new = told
        del self.under_way[loading.fence]
        self._tier.end_load(loading.reach.blocks, done=True)
        self.num_blocks -= len(loading.targets)
        self._holdings.release_unwritten(request, why, None, now_fs)
        return []

    def forget(self, request: Request) -> None:
        """A request has ended."""
        self._no_load.discard(request)
