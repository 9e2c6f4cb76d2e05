"""Saving prefix blocks to the CPU tier, and loading them again, while steps go on.

Copies take time, and a fence says when one is done. Until then a block that is saved is not reused, and a block that is loaded belongs
to its request, which neither computes on it nor shares it. A request that waits for a load is not running: it takes no place in a
step. It holds all blocks that it needs to produce its first tokens, or it does not start to load: so loads never wait for each other
(vLLM #45388, #57104). An abort leaves the blocks of a copy under way behind its fence (#32255). A load that fails is computed instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .blocks import BlockPool
from .config import EngineConfig
from .holdings import Holdings
from .need import blocks_for, new_blocks_for_whole
from .request import Request, State
from .tier import PrefixTier, TierBlock

LOOK_AHEAD_BLOCKS = 256
"""How far beyond the blocks that write-back keeps saved it looks for one that is not, to know for how long nothing needs saving."""

STEPS_AT_ONCE = 4
"""For how many steps write-back saves when it saves: each save ends a stretch when it is done."""

Save = tuple[int, tuple[tuple[int, int], ...]]
"""`(fence, (device block, CPU block) pairs)`."""
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


class Offload:
    """The copies between one engine's device pool and its CPU prefix tier, and who waits for them."""

    def __init__(self, config: EngineConfig, holdings: Holdings) -> None:
        self.tier = PrefixTier(config.num_cpu_prefix_blocks)
        self._config = config
        self._holdings = holdings
        self._pool: BlockPool = holdings.pool
        self._write_back = config.cpu_prefix_mode == "write_back"
        self._window = min(
            blocks_for(config.max_num_batched_tokens, config.block_size), max(1, config.num_gpu_blocks // 4)
        )
        self._completed: deque[tuple[int, int]] = deque()
        self._saves: dict[int, list[TierBlock]] = {}
        self._loads: dict[int, Loading] = {}
        self._no_load: set[Request] = set()
        self._tried: dict[int, int] = {}  # by block: its content that was saved, and may be gone from the tier since
        self._clean_until = (
            -1
        )  # up to which `num_taken` of the pool the blocks that are reused next are known to be saved
        self._fence = 0
        self.save_all = False
        """Whether all cached blocks that nobody holds are to be saved, and not only those that are next to be reused (`offload_cache`)."""
        self.loading: dict[Request, Loading] = {}
        """Requests that hold blocks and do not run."""
        self.ready: deque[Loading] = deque()
        """Those of them whose load has ended, in that order."""
        self.new_loads: list[Load] = []
        """Loads begun since the engine last took them."""
        self.hit_tokens = 0
        """Prompt tokens that first admissions did not find on the device but in the tier."""
        self.saved_blocks = self.loaded_blocks = self.failed_copies = 0
        """Blocks whose copies were begun, and copies that failed."""

    @property
    def in_flight(self) -> bool:
        """Whether a copy is under way."""
        return bool(self._saves or self._loads)

    def is_under_way(self, fence: int) -> bool:
        """Whether a copy with this fence is."""
        return fence in self._saves or fence in self._loads

    # -- loads ------------------------------------------------------------------------------------------------------------

    def find(self, request: Request, hits: int) -> list[TierBlock] | None:
        """What the tier has of a waiting request's prefix beyond its `hits` blocks on the device; empty if nothing. None: it had
        better wait, because a copy that is under way brings what comes next. Sequences that fork do not load: they find what the
        others of their family have.
        """
        if request.spec.forking is not None:
            return []
        stop = self._holdings.findable_blocks(request)
        if hits >= stop or request in self._no_load or not self._holdings.reuses(request):
            return []
        (first,) = request.keys.keys(hits, hits + 1)
        if first not in self.tier.keys:  # most often, and asked again in every step
            return []
        return None if self.tier.is_moving(first) else self.tier.find(request.keys.keys(hits, stop))

    def need(self, request: Request, hits: list[int]) -> tuple[int, int]:
        """Blocks that a request must hold before it may load: all its known tokens' and that of the next, and those of them that come
        from the free queue.
        """
        tokens = request.num_tokens
        if (request.spec.max_tokens or 2) > request.num_output_tokens + 1 and tokens < self._config.max_model_len:
            tokens += 1
        whole = min(blocks_for(tokens, self._config.block_size), self._pool.num_blocks)
        return whole, new_blocks_for_whole(whole, len(hits), self._pool.num_unreferenced(hits))

    def begin_load(self, request: Request, hits: list[int], found: list[TierBlock], whole: int, now_fs: int) -> None:
        """Take the blocks and load; there must be enough."""
        pool, holdings = self._pool, self._holdings
        pool.acquire(hits)
        self.used(hits)
        blocks = pool.allocate(whole - len(hits))
        assert blocks is not None  # `need` was compared with what is free
        request.table.blocks = [*hits, *blocks]
        request.state = State.LOADING
        request.num_computed_tokens = len(hits) * self._config.block_size
        request.num_registered = len(hits)
        holdings.hold(request, whole, now_fs)
        loading = self.loading[request] = Loading(request, self._new_fence(), found, len(hits), now_fs)
        if hits:
            holdings.sharing.join(request, holdings.tables.split(hits), now_fs)
        self.tier.begin_load(found)
        self._loads[loading.fence] = loading
        self.loaded_blocks += len(found)
        pairs = tuple((block.block_id, target) for block, target in zip(found, blocks, strict=False))
        self.new_loads.append((request.request_id, loading.fence, pairs))

    def leave(self, loading: Loading, now_fs: int) -> None:
        """A request stops being one that loads: it runs now, or it is gone."""
        self._settle(loading, now_fs)
        del self.loading[loading.request]
        if loading.done:
            self.ready.remove(loading)

    def drop(self, request: Request, why: str, now_fs: int) -> None:
        """A request goes away; blocks that its load still writes return when that is done."""
        loading = self.loading[request]
        self.leave(loading, now_fs)
        if loading.done:
            self._holdings.release(request, why, now_fs, reusable=False)
        else:
            self._holdings.release_unwritten(request, loading.hits, why, loading.fence, now_fs)

    # -- saves ------------------------------------------------------------------------------------------------------------

    def note(self, block_ids: Iterable[int], keys: Iterable[int]) -> None:
        """These blocks are full, or will be after the step that is being planned."""
        if not self._write_back:
            self._completed.extend(zip(block_ids, keys, strict=True))

    def take_completed(self) -> deque[tuple[int, int]]:
        """Blocks noted so far; those noted from now on are computed by the step that is being planned."""
        completed, self._completed = self._completed, deque()
        return completed

    def put_off(self, completed: deque[tuple[int, int]]) -> None:
        """Blocks that were taken to be saved are not saved in this plan."""
        self._completed.extendleft(reversed(completed))

    def used(self, block_ids: Iterable[int]) -> None:
        """These were found on the device and are held again: they are worth saving again."""
        for block_id in block_ids:
            self._tried.pop(block_id, None)

    def save(self, completed: deque[tuple[int, int]]) -> tuple[Save, ...]:
        """Begin to save what is due: the blocks completed by earlier steps, or those that will be evicted next."""
        pool = self._pool
        if self._write_back or self.save_all:
            completed.extend(self._next_evicted())
        room = (pool.num_free - pool.num_set_aside) // 2  # at most as many free blocks wait for copies as can be taken
        source: list[int] = []
        target: list[TierBlock] = []
        put_off: list[tuple[int, int]] = []
        key_of, saved, being_read, ref_cnt = pool.index.keys_by_block.get, self.tier.keys, pool.being_read, pool.ref_cnt
        begin_save = self.tier.begin_save
        for block_id, key in completed:
            if key_of(block_id) != key or key in saved or block_id in being_read:
                continue
            if not ref_cnt(block_id):
                if room <= 0 or not pool.is_free(block_id):
                    put_off.append((block_id, key))  # no room, or somebody else's fence is before it
                    continue
                room -= 1
            block = begin_save(key)
            if block is None:
                break
            self._tried[block_id] = key
            source.append(block_id)
            target.append(block)
        if not self._write_back:
            self.put_off(deque(put_off))
        if not source:
            return ()
        self._clean_until = -1
        fence = self._new_fence()
        pool.read(source, fence)
        self._saves[fence] = target
        self.saved_blocks += len(source)
        pairs = tuple((block_id, block.block_id) for block_id, block in zip(source, target, strict=True))
        return ((fence, pairs),)

    def blocks_until_save(self, room: int) -> int | None:
        """How many of `room` blocks may be taken before another save could begin, if nothing comes, goes or arrives; None if time alone
        may begin one.
        """
        pool = self._pool
        if not self._write_back or pool.num_free - pool.num_set_aside < 2 or not self.tier.num_obtainable:
            return room
        if pool.order_changes:
            return None
        if pool.num_taken > self._clean_until or not pool.queues_at_the_end:
            self._look_ahead()
        return min(room, max(self._clean_until - pool.num_taken, 0))

    def _look_ahead(self) -> None:
        """Find out how many blocks can be taken before one that is not saved is next. Where blocks join the free queue at its end,
        what is found stays true until a copy begins or ends.
        """
        pool, window = self._pool, self._next_step
        ahead = pool.peek(min(window + LOOK_AHEAD_BLOCKS, pool.num_free))
        first = next(self._unsaved(ahead), None)
        self._clean_until = pool.num_taken + (len(ahead) if first is None else ahead.index(first[0])) - window

    def _next_evicted(self) -> list[tuple[int, int]]:
        """Blocks not saved yet among those that are to be reused next; several steps' worth at once, when one of the next step's is not."""
        pool = self._pool
        reach = pool.num_free
        if not self.save_all:
            if pool.num_taken > self._clean_until or not pool.queues_at_the_end:
                self._look_ahead()
            if pool.num_taken <= self._clean_until:
                return []
            reach = min(STEPS_AT_ONCE * self._window, reach)
        return list(self._unsaved(pool.peek(reach)))

    @property
    def _next_step(self) -> int:
        """Leading blocks in the order of eviction that write-back keeps saved, besides those that are being saved now."""
        return max(self._window - self._pool.num_set_aside, 0)

    def _unsaved(self, block_ids: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Those blocks, with their content, that have some that was not saved since it was last used: a tier that is too small would
        otherwise save the same blocks in turn for ever.
        """
        key_of, saved, tried = self._pool.index.keys_by_block.get, self.tier.keys, self._tried.get
        for block_id in block_ids:
            key = key_of(block_id)
            if key is not None and key not in saved and tried(block_id) != key:
                yield block_id, key

    # -- fences -----------------------------------------------------------------------------------------------------------

    def pass_fence(self, fence: int, now_fs: int, *, done: bool) -> None:
        """A copy under way has ended; `done` is False if it failed."""
        self.failed_copies += not done
        self._clean_until = -1
        if (saved := self._saves.pop(fence, None)) is not None:
            self.tier.end_save(saved, done=done)
            self._pool.pass_fence(fence)
            return
        loading = self._loads.pop(fence)
        request = loading.request
        self.tier.end_load(loading.found, done=done)
        self._pool.pass_fence(fence)
        if request not in self.loading:
            return  # its client left, and its blocks have returned just now
        self._settle(loading, now_fs)
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

    def forget(self, request: Request, private_keys: Iterable[int]) -> None:
        """A request has ended; what it left for itself nobody will look for."""
        self._no_load.discard(request)
        self.tier.forget(private_keys)

    def _settle(self, loading: Loading, now_fs: int) -> None:
        loading.request.token_fs += loading.request.num_computed_tokens * (now_fs - loading.since_fs)
        loading.since_fs = now_fs

    def _new_fence(self) -> int:
        """Fences of copies count down, so that no other fence of the pool is one of theirs."""
        self._fence -= 1
        return self._fence
