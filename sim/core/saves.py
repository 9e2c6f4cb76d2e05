"""Saves: which prefix blocks go to the CPU tier, and when.

A block that is saved is not reused before its copy is done. Write-through saves a block once the step that filled it is planned before
others; write-back saves what is next to be evicted, several steps' worth at once. Source of the second: vLLM's lazy CPU offload, whose
cursor walks the free queue (engine-policies §1.1.8).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain

from .blocks import BlockPool
from .config import EngineConfig
from .need import blocks_for
from .tier import PrefixTier, TierBlock

LOOK_AHEAD_BLOCKS = 256
"""How far beyond the blocks that write-back keeps saved it looks for one that is not, to know for how long nothing needs saving."""

STEPS_AT_ONCE = 4
"""For how many steps write-back saves when it saves: each save ends a stretch when it is done."""

NO_LIMIT = 1 << 62
"""More blocks than ever are taken."""

Save = tuple[int, tuple[tuple[int, int], ...]]
"""`(fence, (device block, CPU block) pairs)`."""


class Saves:
    """The copies from one engine's device pool to its CPU tier."""

    def __init__(self, config: EngineConfig, pool: BlockPool, tier: PrefixTier, new_fence: Callable[[], int]) -> None:
        self._pool = pool
        self._tier = tier
        self._new_fence = new_fence
        self._slides = any(group.window is not None for group in config.groups)
        self._write_back = config.cpu_prefix_mode == "write_back"
        self._window = min(
            blocks_for(config.max_num_batched_tokens, config.block_size), max(1, config.num_gpu_blocks // 4)
        )
        self._completed: deque[tuple[int, int]] = deque()
        self._tried: dict[int, int] = {}  # by block: its content that was saved, and may be gone from the tier since
        self._clean_until = -1
        """Up to which `num_taken` of the pool the blocks that are reused next are known to be saved."""
        self.under_way: dict[int, list[TierBlock]] = {}
        """By fence, what is being written."""
        self.save_all = False
        """Whether all cached blocks that nobody holds are to be saved, and not only those that are next to be reused (`offload_cache`)."""
        self.num_blocks = 0
        """Blocks whose copies were begun."""

    # -- what is full -----------------------------------------------------------------------------------------------------

    def note(self, block_ids: Iterable[int], keys: Iterable[int]) -> None:
        """These blocks are full, or will be after the step that is being planned."""
        if not self._write_back:
            self._completed.extend(zip(block_ids, keys, strict=True))

    def take_completed(self) -> deque[tuple[int, int]]:
        """Blocks noted so far; those noted from now on are computed by the step that is being planned."""
        completed, self._completed = self._completed, deque()
        return completed

    def put_off(self, completed: Iterable[tuple[int, int]]) -> None:
        """Blocks that were taken to be saved are not saved in this plan; they come first in the next."""
        self._completed.extendleft(reversed(list(completed)))

    def undone(self, block_ids: Collection[int]) -> None:
        """The step that was to fill these blocks computed nothing: they may have the same content again before it is written."""
        if block_ids and self._completed:
            self._completed = deque(noted for noted in self._completed if noted[0] not in block_ids)

    def used(self, block_ids: Iterable[int]) -> None:
        """These were found on the device and are held again: they are worth saving again."""
        for block_id in block_ids:
            self._tried.pop(block_id, None)

    # -- copies -----------------------------------------------------------------------------------------------------------

    def begin(self, completed: deque[tuple[int, int]]) -> tuple[Save, ...]:
        """Begin to save what is due: the blocks completed by earlier steps, or those that will be evicted next."""
        evicted = self._next_evicted() if self._write_back or self.save_all else []
        if not (completed or evicted):
            return ()
        due = _Due(self._pool, self._tier)
        target = self._tier.begin_saves(chain(due.completed(completed), due.evicted(evicted)))
        if not self._write_back:
            self.put_off(due.put_off)
        if not target:
            return ()
        source = due.source[: len(target)]
        self._tried.update(zip(source, [block.key for block in target], strict=True))
        self._clean_until = -1
        fence = self._new_fence()
        self._pool.read(source, fence)
        self.under_way[fence] = target
        self.num_blocks += len(source)
        return ((fence, tuple(zip(source, [block.block_id for block in target], strict=True))),)

    def end(self, fence: int, *, done: bool) -> None:
        """One of them has ended."""
        self._tier.end_save(self.under_way.pop(fence), done=done)
        self._pool.pass_fence(fence)

    # -- what is evicted next ---------------------------------------------------------------------------------------------

    def changed(self) -> None:
        """A copy has ended: what was found by looking ahead holds no longer."""
        self._clean_until = -1

    def blocks_until_next(self) -> int | None:
        """How many blocks may be taken before another save could begin, if nothing comes, goes or arrives. None if one could begin though
        none is taken: time may change the order, or blocks that slide out of windows may be due, or make room for what was put off.
        """
        pool = self._pool
        if self._slides and (self.save_all or self._completed):
            return None
        if not self._write_back or not self._tier.num_obtainable:
            return NO_LIMIT
        if pool.num_free - pool.num_set_aside < 2:
            return None if self._slides else NO_LIMIT
        if pool.order_changes or (self._slides and not pool.queues_at_the_end):
            return None
        if pool.num_taken > self._clean_until or not pool.queues_at_the_end:
            self._look_ahead()
        if self._slides and pool.num_taken > self._clean_until:
            return None  # so few blocks are free that whatever joins them is due
        return max(self._clean_until - pool.num_taken, 0)

    def _look_ahead(self) -> None:
        """Find out how many blocks can be taken before one that is not saved is next. Where blocks join the free queue at its end,
        what is found stays true until a copy begins or ends.
        """
        pool, window = self._pool, self._next_step
        ahead = pool.peek(min(window + LOOK_AHEAD_BLOCKS, pool.num_free))
        unsaved = self._unsaved(ahead[:window]) or self._unsaved(ahead[window:])
        self._clean_until = pool.num_taken + (ahead.index(unsaved[0][0]) if unsaved else len(ahead)) - window

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
        return self._unsaved(pool.peek(reach))

    @property
    def _next_step(self) -> int:
        """Leading blocks in the order of eviction that write-back keeps saved, besides those that are being saved now."""
        return max(self._window - self._pool.num_set_aside, 0)

    def _unsaved(self, block_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Those blocks, with their content, that have some that was not saved since it was last used: a tier that is too small would
        otherwise save the same blocks in turn for ever.
        """
        key_of, saved, tried = self._pool.index.keys_by_block.get, self._tier.keys, self._tried.get
        return [
            (block_id, key)
            for block_id, key in zip(block_ids, map(key_of, block_ids), strict=True)
            if key is not None and key not in saved and tried(block_id) != key
        ]


class _Due:
    """What one plan saves, chosen as the tier takes it: what it forgets for one block, another may bring."""

    def __init__(self, pool: BlockPool, tier: PrefixTier) -> None:
        self._pool, self._saved = pool, tier.keys
        self._room = (pool.num_free - pool.num_set_aside) // 2
        """At most as many free blocks wait for copies as can be taken."""
        self.source: list[int] = []
        """The blocks, in order; the last one the tier may have had no room for."""
        self.put_off: list[tuple[int, int]] = []
        """Blocks that cannot be read now, because there is no room, or somebody else's fence is before them."""

    def completed(self, blocks: Iterable[tuple[int, int]]) -> Iterator[int]:
        """The keys of those blocks, held or free, that hold what they did when they were full, and that nobody has saved."""
        key_of, being_read, ref_cnts = self._pool.index.keys_by_block.get, self._pool.being_read, self._pool.ref_cnts
        saved, is_free, source = self._saved, self._pool.is_free, self.source
        for block_id, key in blocks:
            if key in saved or key_of(block_id) != key or block_id in being_read:
                continue
            if not ref_cnts[block_id]:
                if self._room <= 0 or not is_free(block_id):
                    self.put_off.append((block_id, key))
                    continue
                self._room -= 1
            source.append(block_id)
            yield key

    def evicted(self, blocks: Iterable[tuple[int, int]]) -> Iterator[int]:
        """The keys of those of the blocks, which are free, that nobody has saved, as far as there is room."""
        saved, source, room = self._saved, self.source, self._room
        for block_id, key in blocks:
            if key in saved:
                continue
            if room <= 0:
                self.put_off.append((block_id, key))
                continue
            room -= 1
            source.append(block_id)
            yield key
