"""PoolBooks: whether what a pool says of its blocks agrees with itself and with the tables of those who hold them (I1, I2, I3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolBooks:
    """What a pool says of its blocks at one moment. Blocks count from 1; 0 in a table stands for none."""

    num_blocks: int
    ref_cnt: Sequence[int]
    """By block id, of every block used so far; the first is no block."""
    freed: Set[int]
    """Blocks in the free queue that were used before."""
    quarantined: Set[int]
    findable: Set[int]
    """Blocks whose content can be found."""
    released_by: Sequence[str]
    """By block id, who gave the block back last; empty for nobody."""
    num_free: int
    num_cached: int

    def add_up(self, held: Counter[int]) -> bool:
        """Whether `problems` would find none, quickly: it is asked after every event of a checked run. `held` says how many tables hold
        each block.
        """
        referenced = {block_id: ref_cnt for block_id, ref_cnt in enumerate(self.ref_cnt) if ref_cnt}
        freed, quarantined = self.freed, self.quarantined
        used = len(self.ref_cnt) - 1
        return (
            held == referenced
            and freed.isdisjoint(referenced)
            and quarantined.isdisjoint(referenced)
            and freed.isdisjoint(quarantined)
            and len(freed) + len(quarantined) + len(referenced) == used
            and self.num_free == self.num_blocks - used + len(freed)
            and self.num_cached == len(freed & self.findable)
        )

    def problems(self, tables: list[tuple[str, Sequence[int]]]) -> list[str]:
        """What is wrong, a sentence a block, against `(owner, block table)` pairs."""
        owners: dict[int, list[str]] = {}
        for owner, table in tables:
            for block_id in table:
                if block_id:
                    owners.setdefault(block_id, []).append(owner)
        problems: list[str] = []
        for block_id in range(1, len(self.ref_cnt)):
            problems += self._problems_of(block_id, owners.pop(block_id, []))
        problems += [f"block {block_id} is held by {held} but was never allocated" for block_id, held in owners.items()]
        free = len(self.freed) + self.num_blocks + 1 - len(self.ref_cnt)
        if free != self.num_free:
            problems.append(f"{free} blocks are free, {self.num_free} are counted")
        cached = len(self.freed & self.findable)
        if cached != self.num_cached:
            problems.append(f"{cached} free blocks are cached, {self.num_cached} are counted")
        return problems

    def _problems_of(self, block_id: int, held: list[str]) -> list[str]:
        problems: list[str] = []
        ref_cnt = self.ref_cnt[block_id]
        places = (block_id in self.freed) + (block_id in self.quarantined)
        if ref_cnt != len(held):
            what = "missing" if ref_cnt > len(held) else "miscounted"
            last = self.released_by[block_id] or "nobody"
            problems.append(
                f"block {block_id} is {what}: its reference count is {ref_cnt}, held by {held or 'nobody'}, last released by {last}"
            )
        if (held or ref_cnt) and places:
            problems.append(f"block {block_id} is double: held by {held} and in the free queue or quarantine")
        if not held and not ref_cnt and places != 1:
            problems.append(
                f"block {block_id} is {'double: free and quarantined' if places else 'missing: in no queue'}"
            )
        return problems
