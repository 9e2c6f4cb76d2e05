"""BlockPool: who holds every KV block, from the first allocation to the last reader.

Think of a cloakroom. Every block is a hook: free, held by one or more guests (reference count), or waiting behind a
rope (quarantine) until the last one who still reads it has left. Free hooks are reused oldest first, and what still
hangs on them may be found again until then (prefix cache). Source of the order: vLLM V1 `BlockPool` (engine-policies §1.1.5).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, KeysView, Sequence
from itertools import chain

from .eviction import EVICTIONS, LruQueue
from .pool_books import PoolBooks
from .prefix import PrefixIndex
from .quarantine import Quarantine
from .ranked_eviction import RetentionQueue
from .retention import Course

NO_BLOCK = 0
"""Stands in a block table for a block that slid out of the attention window; never allocated."""


class DoubleFreeError(RuntimeError):
    """A block was released by somebody who does not hold it. Names both releases (I10)."""

    def __init__(self, block_id: int, first: str, second: str) -> None:
        super().__init__(block_id, first, second)  # all of them: SimPy makes the error anew from its `args`
        self.block_id, self.first, self.second = block_id, first, second

    def __str__(self) -> str:
        return f"block {self.block_id} is released twice: first by {self.first}, now by {self.second}"


class IntegrityError(RuntimeError):
    """The pool's books do not add up. The message names each block that is missing, double or miscounted."""


class BlockPool:
    """Blocks 1 to `num_blocks`, each free, owned or quarantined (I1).

    Blocks never used yet are not stored one by one, so a pool of ten million costs nothing until it is used.
    """

    def __init__(self, num_blocks: int, index: PrefixIndex | None = None, eviction: str = "lru") -> None:
        self.num_blocks = num_blocks
        self.index = PrefixIndex() if index is None else index
        self._ref_cnt: list[int] = [0]  # grows with the highest block id ever allocated; [0] is NO_BLOCK
        self._freed = EVICTIONS[eviction](
            self.index.__contains__
        )  # released blocks, in the order in which they are taken
        self.ages = isinstance(self._freed, RetentionQueue)
        """Whether the order in which blocks are taken depends on the time, so that `tick` matters."""
        self._quarantine = Quarantine()
        self._released_by = [""]  # of every block in `_ref_cnt`: who gave it back last
        self.num_free = num_blocks
        """Blocks that can be allocated now, cached ones included."""
        self.num_cached = 0
        """Free blocks whose content can still be found."""
        self.num_taken = 0
        """Blocks that ever left the free queue, in whatever way: by how many places others may have moved up in it."""

    # -- counts ---------------------------------------------------------------------------------------------------

    @property
    def num_quarantined(self) -> int:
        """Blocks released behind a fence that has not passed."""
        return len(self._quarantine.blocks)

    @property
    def num_owned(self) -> int:
        """Distinct blocks that somebody holds."""
        return self.num_blocks - self.num_free - len(self._quarantine.blocks)

    def ref_cnt(self, block_id: int) -> int:
        """How many tables hold a block."""
        return self._ref_cnt[block_id] if block_id < len(self._ref_cnt) else 0

    @property
    def ref_cnts(self) -> Sequence[int]:
        """That of every block used so far, by block id; to be read only."""
        return self._ref_cnt

    def num_unreferenced(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks are in the free queue: taking them costs capacity like a new block does."""
        ref_cnt = self._ref_cnt
        return sum(1 for block_id in block_ids if block_id and not ref_cnt[block_id])

    # -- taking ---------------------------------------------------------------------------------------------------

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take `num_blocks` blocks from the head of the free queue; their old content can no longer be found.

        Returns None, and changes nothing (I6), if fewer are free.
        """
        if num_blocks > self.num_free:
            return None
        ref_cnt = self._ref_cnt
        self.num_free -= num_blocks
        self.num_taken += num_blocks
        first_unused = len(ref_cnt)
        unused = min(num_blocks, self.num_blocks + 1 - first_unused)
        taken: list[int] = []
        if unused:  # never used blocks stand at the head of the queue: they were queued first
            ref_cnt.extend([1] * unused)
            self._released_by.extend([""] * unused)
            taken = list(range(first_unused, first_unused + unused))
        if num_blocks > unused:
            reused = self._freed.pop(num_blocks - unused)
            for block_id in reused:
                ref_cnt[block_id] = 1
            taken += reused
            if self.num_cached:
                self.num_cached -= self.index.drop_all(reused)
        return taken

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add a reference to blocks found by `find`; those in the free queue leave it.

        Raises ValueError, and changes nothing, if one of them waits behind a fence or was never allocated.
        """
        block_ids = list(block_ids)
        ref_cnt = self._ref_cnt
        for block_id in block_ids:
            if block_id != NO_BLOCK and not self.ref_cnt(block_id) and not self.is_free(block_id):
                where = "in quarantine" if block_id in self._quarantine.blocks else "not allocated"
                raise ValueError(f"block {block_id} is {where}: its content cannot be shared")
        for block_id in block_ids:
            if block_id == NO_BLOCK:
                continue
            if not ref_cnt[block_id]:
                self._freed.remove(block_id)
                self.num_free -= 1
                self.num_taken += 1
                if block_id in self.index:
                    self.num_cached -= 1
            ref_cnt[block_id] += 1
        self._freed.found(block_ids)

    def find(self, keys: Iterable[int]) -> list[int]:
        """Blocks holding the longest run of `keys`. Takes nothing. Quarantined blocks cannot be found."""
        return self.index.find(keys, self._quarantine.blocks)

    def peek(self, num_blocks: int) -> list[int]:
        """The blocks the next allocations will take, in order, without taking them."""
        first_unused = len(self._ref_cnt)
        unused = min(num_blocks, self.num_blocks + 1 - first_unused)
        return [*range(first_unused, first_unused + unused), *self._freed.peek(num_blocks - unused)]

    def untouched(self, block_ids: Sequence[int], most: int) -> int:
        """How many blocks can be allocated, at most `most`, before one of these is taken; those of them that somebody holds now come after
        all that are free. Holds where the free queue is in the order of release.
        """
        order, kept = self.peek(min(most, self.num_free)), set(block_ids)
        return next((place for place, block_id in enumerate(order) if block_id in kept), len(order))

    # -- giving back ----------------------------------------------------------------------------------------------

    def release(self, block_ids: Sequence[int], by: str, fence: int | None = None, worth: float = 0.0) -> None:
        """Drop one reference of each block. Those nobody holds any more join the free queue, last block first, so that
        the tail of a sequence is reused before its head; with a `fence` they wait in quarantine until it passes. `worth` is how
        much their content is worth keeping, where the order of eviction asks for that.

        Raises DoubleFreeError, and changes nothing, if one of them is not held.
        """
        self._refuse_double_release(block_ids, by)
        ref_cnt, released_by = self._ref_cnt, self._released_by
        idle: list[int] = []
        for block_id in filter(None, reversed(block_ids)):  # without NO_BLOCK
            released_by[block_id] = by
            ref_cnt[block_id] = left = ref_cnt[block_id] - 1
            if not left:
                idle.append(block_id)
        quarantine = self._quarantine
        if fence is not None:
            quarantine.wait(idle, fence, worth)
        elif read_by := quarantine.read_by:
            for block_id in idle:
                if block_id in read_by:
                    quarantine.wait([block_id], read_by[block_id], worth)
            self._queue([block_id for block_id in idle if block_id not in read_by], worth)
        else:
            self._queue(idle, worth)

    def read(self, block_ids: Sequence[int], fence: int) -> None:
        """A copy reads these blocks, free or held, until `fence` has passed; before that nobody is given them to write (I9).

        Free ones wait in quarantine and keep their places in the free queue; held ones wait there if they are released before. No block
        may be read by two copies at once.
        """
        ref_cnt = self._ref_cnt
        aside = [block_id for block_id in block_ids if not ref_cnt[block_id]]
        self._quarantine.read(block_ids, aside, fence)
        self._freed.set_aside(aside)
        self.num_free -= len(aside)
        self.num_cached -= sum(map(self.index.block_ids.__contains__, aside))

    @property
    def num_set_aside(self) -> int:
        """Free blocks that wait for a copy to read them."""
        return self._quarantine.num_set_aside

    def is_free(self, block_id: int) -> bool:
        """Whether a block that was used before can be allocated."""
        return block_id < len(self._ref_cnt) and not self._ref_cnt[block_id] and block_id not in self._quarantine.blocks

    @property
    def being_read(self) -> KeysView[int]:
        """The blocks that copies read."""
        return self._quarantine.read_by.keys()

    def pass_fence(self, fence: int) -> None:
        """The last reader behind `fence` is done: its blocks join the free queue. Unknown fences are ignored."""
        aside, released = self._quarantine.passed(fence)
        if aside:
            self._freed.put_back(aside)
            self.num_free += len(aside)
            self.num_cached += sum(map(self.index.block_ids.__contains__, aside))
        for blocks, worth in released:
            self._queue(blocks, worth)

    def forget(self, block_ids: Iterable[int]) -> None:
        """Drop the keys of blocks whose content was never computed."""
        known = [block_id for block_id in dict.fromkeys(block_ids) if block_id in self.index]
        for block_id in known:
            if self.is_free(block_id):
                self.num_cached -= 1
            self.index.drop(block_id)
        if known:
            self._freed.forgotten(known)

    def tick(self, now_fs: int) -> None:
        """It is this time now; what is taken and given back next, is taken and given back now."""
        self._freed.tick(now_fs)

    def retain(self, block_ids: Sequence[int], courses: Iterable[Course]) -> None:
        """Blocks that are about to be released are to be kept like this. Only for the eviction order `retention`."""
        assert isinstance(self._freed, RetentionQueue)
        self._freed.retain(block_ids, courses)

    @property
    def queues_at_the_end(self) -> bool:
        """Whether blocks that become free stand behind all that are free, whatever they hold."""
        return isinstance(self._freed, LruQueue)

    @property
    def order_changes(self) -> bool:
        """Whether the order in which free blocks are taken will change when time merely passes."""
        return isinstance(self._freed, RetentionQueue) and self._freed.num_expiring > 0

    def drop_cached(self) -> int:
        """Forget the content of every free block; returns how many had any."""
        dropped = [block_id for block_id in list(self._freed.keys()) if block_id in self.index]
        self.forget(dropped)
        return len(dropped)

    def _queue(self, block_ids: list[int], worth: float) -> None:
        self.num_free += len(block_ids)
        self._freed.add(block_ids, worth)
        registered = self.index.block_ids
        self.num_cached += sum(map(registered.__contains__, block_ids))

    def _refuse_double_release(self, block_ids: Sequence[int], by: str) -> None:
        ref_cnt = self._ref_cnt
        try:
            all_held = all(map(ref_cnt.__getitem__, block_ids))
        except IndexError:  # one of them has never been used
            all_held = False
        if not all_held:
            for block_id in block_ids:
                if block_id >= len(ref_cnt):
                    raise DoubleFreeError(block_id, "nobody (it was never allocated)", by)
                if block_id and not ref_cnt[block_id]:
                    raise DoubleFreeError(block_id, self._released_by[block_id], by)
        if len(set(block_ids)) != len(block_ids):
            for block_id, times in Counter(block_ids).items():
                if block_id and times > ref_cnt[block_id]:
                    raise DoubleFreeError(block_id, by, by)

    # -- checking -------------------------------------------------------------------------------------------------

    def check(self, tables: Iterable[tuple[str, Sequence[int]]]) -> None:
        """Verify I1, I2 and I3 against `(owner, block table)` pairs.

        Raises IntegrityError naming the blocks that are missing (held by no table, in no queue), double (held and free)
        or counted wrongly, with their owners.
        """
        named = list(tables)
        held = Counter(chain.from_iterable([table for _, table in named]))
        del held[NO_BLOCK]
        books = PoolBooks(
            num_blocks=self.num_blocks,
            ref_cnt=self._ref_cnt,
            freed=self._freed.keys(),
            quarantined=self._quarantine.blocks,
            findable=self.index.block_ids,
            released_by=self._released_by,
            num_free=self.num_free,
            num_cached=self.num_cached,
        )
        if not books.add_up(held):
            problems = books.problems(named)
            shown = "; ".join(problems[:10]) + (f"; and {len(problems) - 10} more" if len(problems) > 10 else "")
            raise IntegrityError(f"{len(problems)} faults in a pool of {self.num_blocks} blocks: {shown}")
