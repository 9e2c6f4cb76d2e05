"""Device pool and CPU tier under random copies, with what every block of both really holds.

A copy reads its source and writes its target when it ends, not when it begins. So a block that is reused before its copy is done
shows as wrong content: what a load brings is then not what its key says.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sim.core.blocks import BlockPool
from sim.core.eviction import EVICTIONS
from sim.core.tier import PrefixTier, TierBlock


@dataclass
class Copy:
    """One copy under way."""

    fence: int
    keys: list[int]
    device: list[int]
    cpu: list[TierBlock]
    is_save: bool
    owner: str | None = None
    """Who holds the blocks that a load writes; None once its client has left."""


class TierMachine(RuleBasedStateMachine):
    """Tables are taken, written, registered and released; blocks are saved and loaded; copies end in any order, or fail."""

    @initialize(blocks=st.integers(2, 10), cpu_blocks=st.integers(1, 6), eviction=st.sampled_from(list(EVICTIONS)))
    def begin(self, blocks: int, cpu_blocks: int, eviction: str) -> None:
        self.pool = BlockPool(blocks, eviction=eviction)
        self.tier = PrefixTier(cpu_blocks)
        self.tables: dict[str, list[int]] = {}
        self.device: dict[int, int] = {}  # block -> key of what was written there last
        self.cpu: dict[int, int] = {}
        self.copies: list[Copy] = []
        self.made = self.fence = 0

    def pick(self, choice: int) -> str:
        return list(self.tables)[choice % len(self.tables)]

    def name(self) -> str:
        self.made += 1
        return f"t{self.made}"

    @rule(count=st.integers(1, 4), first_key=st.integers(1, 12), full=st.booleans())
    def write(self, count: int, first_key: int, full: bool) -> None:
        """A sequence of `count` blocks is computed; if they are full, others may find them."""
        blocks = self.pool.allocate(count)
        if blocks is None:
            return
        writing = {block for copy in self.copies for block in copy.device}
        assert not writing & set(blocks), "a block that a copy uses was given away"
        self.tables[self.name()] = blocks
        for block, key in zip(blocks, range(first_key, first_key + count), strict=True):
            self.device[block] = key if full else -key
        if full:
            self.pool.index.add(blocks, range(first_key, first_key + count))

    @rule(first_key=st.integers(1, 12), count=st.integers(1, 4))
    def share(self, first_key: int, count: int) -> None:
        found = self.pool.find(range(first_key, first_key + count))
        assert [self.device[block] for block in found] == list(range(first_key, first_key + len(found)))
        if found:
            self.pool.acquire(found)
            self.tables[self.name()] = found

    @precondition(lambda self: self.tables)
    @rule(choice=st.integers(0, 99), worth=st.sampled_from([0.0, 1.0]))
    def release(self, choice: int, worth: float) -> None:
        """The client of a load under way leaves its blocks behind the fence."""
        name = self.pick(choice)
        load = next((copy for copy in self.copies if copy.owner == name), None)
        blocks = self.tables.pop(name)
        self.pool.release(blocks, name, None if load is None else load.fence, worth)
        if load is not None:
            load.owner = None

    @rule(data=st.data())
    def save(self, data: st.DataObject) -> None:
        """Save registered blocks, held or free, that are not in the tier."""
        known = [
            block
            for block in sorted(self.device)
            if (key := self.pool.index.key_of(block)) is not None
            and key not in self.tier
            and block not in self.pool.being_read
            and (self.pool.ref_cnt(block) or self.pool.is_free(block))
        ]
        chosen = data.draw(st.lists(st.sampled_from(known), unique=True, max_size=4)) if known else []
        copy = Copy(self.fence - 1, [], [], [], is_save=True)
        for block in chosen:
            key = self.pool.index.key_of(block)
            assert key is not None
            if key in self.tier:
                continue  # two blocks hold the same
            obtainable = self.tier.num_obtainable
            targets = self.tier.begin_saves([key])
            assert len(targets) == min(1, obtainable)
            if not targets:
                break
            copy.keys.append(key)
            copy.device.append(block)
            copy.cpu += targets
        if copy.keys:
            self.fence = copy.fence
            self.pool.read(copy.device, copy.fence)
            self.copies.append(copy)

    @rule(first_key=st.integers(1, 12), count=st.integers(1, 4))
    def load(self, first_key: int, count: int) -> None:
        found = self.tier.find(range(first_key, first_key + count))
        blocks = self.pool.allocate(len(found)) if found else None
        if blocks is None:
            return
        self.fence -= 1
        name = self.name()
        self.tables[name] = blocks
        self.tier.begin_load(found)
        self.copies.append(Copy(self.fence, [block.key for block in found], blocks, found, is_save=False, owner=name))

    @precondition(lambda self: self.copies)
    @rule(choice=st.integers(0, 99), done=st.booleans())
    def end(self, choice: int, done: bool) -> None:
        """A copy ends: now it reads and writes."""
        copy = self.copies.pop(choice % len(self.copies))
        for key, block, cpu in zip(copy.keys, copy.device, copy.cpu, strict=True):
            if copy.is_save:
                assert self.device[block] == key, "the block was rewritten while it was being saved"
                self.cpu[cpu.block_id] = self.device[block]
            else:
                assert self.cpu[cpu.block_id] == key, "the CPU block was rewritten while it was being loaded"
                self.device[block] = self.cpu[cpu.block_id]
        if copy.is_save:
            self.tier.end_save(copy.cpu, done=done)
        else:
            self.tier.end_load(copy.cpu, done=done)
        self.pool.pass_fence(copy.fence)
        if not copy.is_save and done and copy.owner is not None:
            self.pool.index.add(copy.device, copy.keys)

    @rule(keys=st.lists(st.integers(1, 15), max_size=3))
    def forget(self, keys: list[int]) -> None:
        self.tier.forget(keys)

    @rule()
    def drop_cached(self) -> None:
        self.pool.drop_cached()

    @invariant()
    def the_books_add_up(self) -> None:
        self.pool.check(self.tables.items())
        self.tier.check()
        aside = {block for copy in self.copies if copy.is_save for block in copy.device if not self.pool.ref_cnt(block)}
        assert self.pool.num_set_aside <= len(aside) <= self.pool.num_quarantined
        assert len(self.pool.peek(self.pool.num_free)) == self.pool.num_free
        assert not aside & set(self.pool.peek(self.pool.num_free))


TierMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestTier = TierMachine.TestCase
