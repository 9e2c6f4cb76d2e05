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
from .prefix import PrefixIndex
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
        self._fences: dict[
            int, list[tuple[list[int], float]]
        ] = {}  # fence -> blocks that become free when it has passed
        self._quarantined: set[int] = set()
        self._read_by: dict[int, int] = {}  # blocks that a copy reads -> the fence behind which it has read them
        self._reads: dict[int, tuple[list[int], list[int]]] = {}  # fence -> those blocks, and those of them set aside
        self._released_by: dict[int, str] = {}
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
        return len(self._quarantined)

    @property
    def num_owned(self) -> int:
        """Distinct blocks that somebody holds."""
        return self.num_blocks - self.num_free - len(self._quarantined)

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
        ref_cnt, freed, index, registered = self._ref_cnt, self._freed, self.index, self.index.block_ids
        self.num_free -= num_blocks
        self.num_taken += num_blocks
        first_unused = len(ref_cnt)
        unused = min(num_blocks, self.num_blocks + 1 - first_unused)
        taken: list[int] = []
        if unused:  # never used blocks stand at the head of the queue: they were queued first
            ref_cnt.extend([1] * unused)
            taken = list(range(first_unused, first_unused + unused))
        if num_blocks > unused:
            reused = freed.pop(num_blocks - unused)
            for block_id in reused:
                ref_cnt[block_id] = 1
            taken += reused
        if self.num_cached:
            lost = list(filter(registered.__contains__, taken))
            self.num_cached -= len(lost)
            index.drop_all(lost)
        return taken

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add a reference to blocks found by `find`; those in the free queue leave it.

        Raises ValueError, and changes nothing, if one of them waits behind a fence or was never allocated.
        """
        block_ids = list(block_ids)
        ref_cnt = self._ref_cnt
        for block_id in block_ids:
            if block_id != NO_BLOCK and not self.ref_cnt(block_id) and block_id not in self._freed:
                where = "in quarantine" if block_id in self._quarantined else "not allocated"
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
        return self.index.find(keys, self._quarantined)

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
        for block_id in reversed(block_ids):
            if block_id == NO_BLOCK:
                continue
            ref_cnt[block_id] -= 1
            released_by[block_id] = by
            if not ref_cnt[block_id]:
                idle.append(block_id)
        if fence is not None:
            self._wait(idle, fence, worth)
        elif self._read_by:
            for block_id in idle:
                if block_id in self._read_by:
                    self._wait([block_id], self._read_by[block_id], worth)
            self._queue([block_id for block_id in idle if block_id not in self._read_by], worth)
        else:
            self._queue(idle, worth)

    def read(self, block_ids: Sequence[int], fence: int) -> None:
        """A copy reads these blocks, free or held, until `fence` has passed; before that nobody is given them to write (I9).

        Free ones wait in quarantine and keep their places in the free queue; held ones wait there if they are released before. No block
        may be read by two copies at once.
        """
        ref_cnt = self._ref_cnt
        aside = [block_id for block_id in block_ids if not ref_cnt[block_id]]
        self._read_by.update(dict.fromkeys(block_ids, fence))
        self._reads[fence] = (list(block_ids), aside)
        self._freed.set_aside(aside)
        self.num_free -= len(aside)
        self.num_cached -= sum(map(self.index.block_ids.__contains__, aside))
        self._quarantined.update(aside)

    @property
    def num_set_aside(self) -> int:
        """Free blocks that wait for a copy to read them."""
        return sum(len(aside) for _, aside in self._reads.values())

    def is_free(self, block_id: int) -> bool:
        """Whether a block that was used before can be allocated."""
        return block_id in self._freed

    @property
    def being_read(self) -> KeysView[int]:
        """The blocks that copies read."""
        return self._read_by.keys()

    def is_read(self, block_id: int) -> bool:
        """Whether a copy reads a block."""
        return block_id in self._read_by

    def _wait(self, block_ids: list[int], fence: int, worth: float) -> None:
        if block_ids:
            self._fences.setdefault(fence, []).append((block_ids, worth))
            self._quarantined.update(block_ids)

    def pass_fence(self, fence: int) -> None:
        """The last reader behind `fence` is done: its blocks join the free queue. Unknown fences are ignored."""
        read, aside = self._reads.pop(fence, ([], []))
        for block_id in read:
            del self._read_by[block_id]
        if aside:
            self._quarantined.difference_update(aside)
            self._freed.put_back(aside)
            self.num_free += len(aside)
            self.num_cached += sum(map(self.index.block_ids.__contains__, aside))
        for blocks, worth in self._fences.pop(fence, []):
            self._quarantined.difference_update(blocks)
            self._queue(blocks, worth)

    def forget(self, block_ids: Iterable[int]) -> None:
        """Drop the keys of blocks whose content was never computed."""
        known = [block_id for block_id in dict.fromkeys(block_ids) if block_id in self.index]
        for block_id in known:
            if block_id in self._freed:
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
        all_held = not block_ids or (max(block_ids) < len(ref_cnt) and min(map(ref_cnt.__getitem__, block_ids)) > 0)
        if not all_held:
            for block_id in block_ids:
                if block_id and (block_id >= len(ref_cnt) or ref_cnt[block_id] < 1):
                    first = self._released_by.get(block_id, "nobody (it was never allocated)")
                    raise DoubleFreeError(block_id, first, by)
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
        if not self._adds_up([table for _, table in named]):
            problems = self._problems(named)
            shown = "; ".join(problems[:10]) + (f"; and {len(problems) - 10} more" if len(problems) > 10 else "")
            raise IntegrityError(f"{len(problems)} faults in a pool of {self.num_blocks} blocks: {shown}")

    def _adds_up(self, tables: list[Sequence[int]]) -> bool:
        """The same verdict as `_problems`, quickly: it is asked after every event of a checked run."""
        held = Counter(chain.from_iterable(tables))
        del held[NO_BLOCK]
        referenced = {block_id: ref_cnt for block_id, ref_cnt in enumerate(self._ref_cnt) if ref_cnt}
        freed = self._freed.keys()
        used = len(self._ref_cnt) - 1
        return (
            held == referenced
            and freed.isdisjoint(referenced)
            and self._quarantined.isdisjoint(referenced)
            and freed.isdisjoint(self._quarantined)
            and len(freed) + len(self._quarantined) + len(referenced) == used
            and self.num_free == self.num_blocks - used + len(freed)
            and self.num_cached == len(freed & self.index.block_ids)
        )

    def _problems(self, tables: list[tuple[str, Sequence[int]]]) -> list[str]:
        owners: dict[int, list[str]] = {}
        for owner, table in tables:
            for block_id in table:
                if block_id != NO_BLOCK:
                    owners.setdefault(block_id, []).append(owner)
        problems: list[str] = []
        for block_id in range(1, len(self._ref_cnt)):
            held = owners.pop(block_id, [])
            ref_cnt = self._ref_cnt[block_id]
            places = (block_id in self._freed) + (block_id in self._quarantined)
            if ref_cnt != len(held):
                what = "missing" if ref_cnt > len(held) else "miscounted"
                last = self._released_by.get(block_id, "nobody")
                problems.append(
                    f"block {block_id} is {what}: its reference count is {ref_cnt}, held by {held or 'nobody'}, last released by {last}"
                )
            if (held or ref_cnt) and places:
                problems.append(f"block {block_id} is double: held by {held} and in the free queue or quarantine")
            if not held and not ref_cnt and places != 1:
                problems.append(
                    f"block {block_id} is {'double: free and quarantined' if places else 'missing: in no queue'}"
                )
        problems += [f"block {block_id} is held by {held} but was never allocated" for block_id, held in owners.items()]
        free = len(self._freed) + self.num_blocks + 1 - len(self._ref_cnt)
        if free != self.num_free:
            problems.append(f"{free} blocks are free, {self.num_free} are counted")
        cached = sum(1 for block_id in list(self._freed.keys()) if block_id in self.index)
        if cached != self.num_cached:
            problems.append(f"{cached} free blocks are cached, {self.num_cached} are counted")
        return problems
