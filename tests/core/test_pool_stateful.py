"""The block pool and the block tables against a model that does everything the slow, obvious way.

The model keeps plain lists and sets, and what every slot of every block holds, so that a block shared, copied or reused wrongly
is seen as wrong content and not only as a wrong count.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sim.core.blocks import NO_BLOCK, BlockPool, DoubleFreeError
from sim.core.tables import BlockTable, BlockTables

BLOCK_SIZE = 4
Prefix = tuple[str, ...]
"""Tokens from the first of a sequence up to some token: what the KV of that last token depends on."""


@dataclass
class Sequence:
    """A sequence as the model sees it: its tokens, and the blocks that hold them."""

    real: BlockTable
    tokens: list[str] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)

    def prefix(self, length: int) -> Prefix:
        return tuple(self.tokens[:length])


class Model:
    """A pool of blocks, kept in the plainest data structures that do the job."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = list(range(1, num_blocks + 1))
        self.fenced: list[tuple[int, int]] = []  # (fence, block) in the order of release
        self.registered: list[tuple[int, Prefix]] = []  # (block, content) in the order of registration
        self.memory: dict[tuple[int, int], Prefix] = {}  # (block, offset) -> what was written there last
        self.last_release: dict[int, str] = {}
        self.sequences: dict[str, Sequence] = {}

    def references(self, block: int) -> int:
        return sum(held == block for sequence in self.sequences.values() for held in sequence.blocks)

    def quarantined(self) -> list[int]:
        return [block for _, block in self.fenced]

    def content(self, block: int) -> Prefix | None:
        return next((content for known, content in self.registered if known == block), None)

    def find(self, wanted: list[Prefix]) -> list[int]:
        found: list[int] = []
        for content in wanted:
            holders = [block for block, held in self.registered if held == content and block not in self.quarantined()]
            if not holders:
                break
            found.append(holders[0])
        return found

    def take(self) -> int:
        block = self.free.pop(0)
        self.registered = [(known, content) for known, content in self.registered if known != block]
        return block

    def give_back(self, sequence: Sequence, kept: list[int], dropped: list[int], by: str, fence: int | None) -> None:
        sequence.blocks = kept
        for block in reversed(dropped):
            if block == NO_BLOCK:
                continue
            self.last_release[block] = by
            if self.references(block) or block in self.free or block in self.quarantined():
                continue
            if fence is None:
                self.free.append(block)
            else:
                self.fenced.append((fence, block))


def dead_blocks(computed: int, window: int | None) -> int:
    """Leading blocks all of whose tokens are out of sight for the token that comes after `computed` others."""
    if window is None:
        return 0
    dead = 0
    while all(computed - token >= window for token in range(dead * BLOCK_SIZE, (dead + 1) * BLOCK_SIZE)):
        dead += 1
    return dead


class PoolMachine(RuleBasedStateMachine):
    """Sequences come, grow, share, split, shrink and go; full attention."""

    window: int | None = None

    @initialize(num_blocks=st.integers(3, 14))
    def empty_pool(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.tables = BlockTables(self.pool, BLOCK_SIZE, self.window)
        self.model = Model(num_blocks)
        self.keys: dict[Prefix, int] = {}
        self.made = 0

    # -- helpers -----------------------------------------------------------------------------------------------------

    def pick(self, choice: int) -> tuple[str, Sequence]:
        names = list(self.model.sequences)
        name = names[choice % len(names)]
        return name, self.model.sequences[name]

    def key(self, content: Prefix) -> int:
        return self.keys.setdefault(content, len(self.keys) + 1)

    def state(self) -> object:
        """Everything that a refused operation must leave alone."""
        pool, blocks = self.pool, range(1, self.model.num_blocks + 1)
        return (
            pool.peek(pool.num_free),
            [pool.ref_cnt(block) for block in blocks],
            [pool.index.key_of(block) for block in blocks],
            [pool.find([key]) for key in self.keys.values()],
            (pool.num_free, pool.num_cached, pool.num_quarantined, pool.num_owned),
            {name: list(sequence.real.blocks) for name, sequence in self.model.sequences.items()},
        )

    def extend(self, sequence: Sequence, tokens: list[str], hits: list[int]) -> bool:
        """Let the real table and the model's grow by `tokens`; True if there was room."""
        model, start = self.model, len(sequence.tokens)
        self.slide(sequence)
        first, last = start // BLOCK_SIZE, (start + len(hits) * BLOCK_SIZE + len(tokens) - 1) // BLOCK_SIZE
        shared_tail = first < len(sequence.blocks) and model.references(sequence.blocks[first]) > 1
        fresh = max(last + 1 - len(sequence.blocks) - len(hits), 0)
        need = fresh + shared_tail + sum(block in model.free for block in hits)
        assert self.tables.need(sequence.real, start, len(tokens), hits) == need
        before = self.state()
        allocation = self.tables.grow(sequence.real, start, len(tokens), hits)
        if need > len(model.free):
            assert allocation is None
            assert self.state() == before
            return False
        assert allocation is not None
        for block in hits:
            if block in model.free:
                model.free.remove(block)
        sequence.blocks += hits
        copies = ()
        if shared_tail:
            old, new = sequence.blocks[first], model.take()
            sequence.blocks[first] = new
            model.last_release[old] = f"{sequence.real.owner} (copied on write)"
            for offset in range(BLOCK_SIZE):
                model.memory[new, offset] = model.memory.get((old, offset), ())
            copies = ((old, new),)
        added = [model.take() for _ in range(fresh)]
        sequence.blocks += added
        assert (allocation.new_blocks, allocation.copies) == (added, copies)
        if first < len(sequence.blocks) - fresh - len(hits) and not shared_tail:
            self.rewrite(sequence.blocks[first])
        return True

    def rewrite(self, block: int) -> None:
        """A block that was cut is about to hold other tokens: nobody may find it by what it held."""
        self.pool.forget([block])
        self.model.registered = [known for known in self.model.registered if known[0] != block]

    def write(self, sequence: Sequence, tokens: list[str]) -> None:
        for token in tokens:
            place, offset = divmod(len(sequence.tokens), BLOCK_SIZE)
            sequence.tokens.append(token)
            self.model.memory[sequence.blocks[place], offset] = sequence.prefix(len(sequence.tokens))

    def slide(self, sequence: Sequence) -> None:
        dead = min(dead_blocks(len(sequence.tokens), self.window), len(sequence.blocks))
        dropped = [block for block in sequence.blocks[:dead] if block != NO_BLOCK]
        assert self.tables.slide(sequence.real, len(sequence.tokens)) == dropped
        kept = [NO_BLOCK] * dead + sequence.blocks[dead:]
        self.model.give_back(sequence, kept, dropped, f"{sequence.real.owner} (slid out of the window)", None)

    def wanted(self, sequence: Sequence, full_blocks: int) -> list[Prefix]:
        return [sequence.prefix((index + 1) * BLOCK_SIZE) for index in range(full_blocks)]

    # -- what happens to sequences -------------------------------------------------------------------------------------

    @rule(
        prompt=st.sampled_from(["aaaaaaaaaaaaaaaaaaaa", "aaaabbbbbbbbbbbb", "bbbbbbbbbbbb"]), length=st.integers(1, 20)
    )
    def admit(self, prompt: str, length: int) -> None:
        """A prompt arrives: what is cached of it is taken over, the rest is allocated, or nothing happens at all."""
        self.made += 1
        sequence, tokens = Sequence(BlockTable(f"s{self.made}")), list(prompt[:length])
        contents = [tuple(tokens[: end + BLOCK_SIZE]) for end in range(0, len(tokens) - BLOCK_SIZE, BLOCK_SIZE)]
        assert len(contents) == (len(tokens) - 1) // BLOCK_SIZE
        found = self.model.find(contents)
        assert self.pool.find([self.key(content) for content in contents]) == found
        passed = dead_blocks(len(found) * BLOCK_SIZE, self.window)
        hits = [NO_BLOCK] * passed + found[passed:]
        if self.extend(sequence, tokens[len(hits) * BLOCK_SIZE :], hits):
            sequence.tokens = tokens[: len(hits) * BLOCK_SIZE]
            self.model.sequences[sequence.real.owner] = sequence
            self.write(sequence, tokens[len(sequence.tokens) :])

    @precondition(lambda self: self.model.sequences)
    @rule(choice=st.integers(0, 9), count=st.integers(1, 9))
    def append(self, choice: int, count: int) -> None:
        """A sequence grows by tokens of its own."""
        name, sequence = self.pick(choice)
        tokens = [f"{name}:{len(sequence.tokens) + i}" for i in range(count)]
        if self.extend(sequence, tokens, []):
            self.write(sequence, tokens)

    @precondition(lambda self: self.model.sequences)
    @rule(choice=st.integers(0, 9))
    def register(self, choice: int) -> None:
        """The full blocks of a sequence can be found from now on."""
        _, sequence = self.pick(choice)
        full = len(sequence.tokens) // BLOCK_SIZE
        contents = self.wanted(sequence, full)
        self.pool.index.add(sequence.real.blocks[:full], [self.key(content) for content in contents])
        for block, content in zip(sequence.blocks[:full], contents, strict=True):
            if block != NO_BLOCK and self.model.content(block) is None:
                self.model.registered.append((block, content))

    @precondition(lambda self: 0 < len(self.model.sequences) < 8)
    @rule(choice=st.integers(0, 9))
    def fork(self, choice: int) -> None:
        """A second sequence continues from the same blocks."""
        _, sequence = self.pick(choice)
        self.made += 1
        child = self.tables.fork(sequence.real, f"s{self.made}")
        self.model.sequences[child.owner] = Sequence(child, list(sequence.tokens), list(sequence.blocks))

    @precondition(lambda self: self.model.sequences)
    @rule(choice=st.integers(0, 9), fence=st.sampled_from([None, None, 1, 2]))
    def release(self, choice: int, fence: int | None) -> None:
        """A sequence ends, whether or not others share its blocks; a fence keeps its blocks until its last reader is done."""
        name, sequence = self.pick(choice)
        held = [block for block in sequence.blocks if block != NO_BLOCK]
        assert self.tables.release(sequence.real, f"end of {name}", fence) == held
        del self.model.sequences[name]
        self.model.give_back(sequence, [], held, f"end of {name}", fence)

    @rule(fence=st.sampled_from([1, 2, 3]))
    def pass_fence(self, fence: int) -> None:
        """The readers behind a fence are done; a fence nobody waits for is nothing."""
        self.pool.pass_fence(fence)
        model = self.model
        model.free += [block for waiting_for, block in model.fenced if waiting_for == fence]
        model.fenced = [waiting for waiting in model.fenced if waiting[0] != fence]

    # -- what must be refused ----------------------------------------------------------------------------------------

    @rule(excess=st.integers(1, 3))
    def ask_for_too_much(self, excess: int) -> None:
        before = self.state()
        assert self.pool.allocate(self.pool.num_free + excess) is None
        assert self.state() == before

    @precondition(lambda self: any(not self.model.references(block) for block in self.model.last_release))
    @rule(choice=st.integers(0, 9), among=st.integers(0, 9))
    def release_twice(self, choice: int, among: int) -> None:
        """A block that nobody holds is released again, alone or together with blocks that are held."""
        model, before = self.model, self.state()
        idle = [block for block in model.last_release if not model.references(block)]
        block = idle[choice % len(idle)]
        held = [other for sequence in model.sequences.values() for other in sequence.blocks if other][: among % 3]
        with pytest.raises(DoubleFreeError) as refused:
            self.pool.release([*dict.fromkeys(held), block], "a second releaser")
        assert refused.value.block_id == block
        assert (refused.value.first, refused.value.second) == (model.last_release[block], "a second releaser")
        assert model.last_release[block] in str(refused.value)
        assert self.state() == before

    @precondition(lambda self: any(block for table in self.model.sequences.values() for block in table.blocks))
    @rule(choice=st.integers(0, 9))
    def release_more_often_than_held(self, choice: int) -> None:
        """One call names a block once more than it is held."""
        held = [block for sequence in self.model.sequences.values() for block in sequence.blocks if block]
        block, before = held[choice % len(held)], self.state()
        with pytest.raises(DoubleFreeError) as refused:
            self.pool.release([block] * (self.model.references(block) + 1), "a careless releaser")
        assert (refused.value.first, refused.value.second) == ("a careless releaser", "a careless releaser")
        assert self.state() == before

    # -- what always holds ---------------------------------------------------------------------------------------------

    @invariant()
    def every_block_is_in_exactly_one_place(self) -> None:
        """I1, and with it the counts."""
        model, pool = self.model, self.pool
        owned = {block for sequence in model.sequences.values() for block in sequence.blocks if block != NO_BLOCK}
        places = sorted([*model.free, *model.quarantined(), *owned])
        assert places == list(range(1, model.num_blocks + 1))
        assert (pool.num_free, pool.num_quarantined, pool.num_owned) == (
            len(model.free),
            len(model.fenced),
            len(owned),
        )
        assert pool.num_cached == sum(model.content(block) is not None for block in model.free)

    @invariant()
    def references_are_counted(self) -> None:
        """I2 and I3."""
        for block in range(1, self.model.num_blocks + 1):
            assert self.pool.ref_cnt(block) == self.model.references(block)
        assert all(self.pool.ref_cnt(block) == 0 for block in self.pool.peek(self.pool.num_free))

    @invariant()
    def the_free_queue_has_the_order_of_the_model(self) -> None:
        assert self.pool.peek(self.pool.num_free) == self.model.free

    @invariant()
    def tables_are_those_of_the_model(self) -> None:
        for sequence in self.model.sequences.values():
            assert sequence.real.blocks == sequence.blocks
            assert len(sequence.blocks) == -(-len(sequence.tokens) // BLOCK_SIZE)

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        """I9 as a sequence sees it: no block that it still reads was rewritten."""
        for sequence in self.model.sequences.values():
            length = len(sequence.tokens)
            for token in range(length):
                if self.window is not None and length - token >= self.window:
                    continue  # out of sight for the next token
                block = sequence.blocks[token // BLOCK_SIZE]
                assert self.model.memory[block, token % BLOCK_SIZE] == sequence.prefix(token + 1)

    @invariant()
    def a_block_that_is_found_holds_what_its_key_says(self) -> None:
        """I7."""
        for content, key in self.keys.items():
            found = self.pool.find([key])
            assert found == self.model.find([content])
            for block in found:
                assert self.model.memory[block, BLOCK_SIZE - 1] == content

    @invariant()
    def the_books_check_out(self) -> None:
        self.pool.check((name, sequence.real.blocks) for name, sequence in self.model.sequences.items())


class TruncatingPoolMachine(PoolMachine):
    """Full attention, where sequences may also be cut short (rejected drafts, rolled-back turns)."""

    @precondition(lambda self: self.model.sequences)
    @rule(choice=st.integers(0, 9), tokens=st.integers(1, 20), fence=st.sampled_from([None, None, 1]))
    def truncate(self, choice: int, tokens: int, fence: int | None) -> None:
        """A sequence is cut back, perhaps into a block that can be found."""
        name, sequence = self.pick(choice)
        tokens = min(tokens, len(sequence.tokens))
        keep = -(-tokens // BLOCK_SIZE)
        dropped = sequence.blocks[keep:]
        assert self.tables.truncate(sequence.real, tokens, f"cut of {name}", fence) == dropped
        self.model.give_back(sequence, sequence.blocks[:keep], dropped, f"cut of {name}", fence)
        sequence.tokens = sequence.tokens[:tokens]


class SlidingPoolMachine(PoolMachine):
    """A sliding window of 6 tokens: leading blocks are given back while their sequence grows."""

    window = 6

    @precondition(lambda self: self.model.sequences)
    @rule(choice=st.integers(0, 9))
    def slide_only(self, choice: int) -> None:
        """Sliding by itself, and again: the second time there is nothing left to give back."""
        _, sequence = self.pick(choice)
        self.slide(sequence)
        assert self.tables.slide(sequence.real, len(sequence.tokens)) == []


often = settings(max_examples=100, stateful_step_count=60)
TestPool = TruncatingPoolMachine.TestCase
TestPool.settings = often
TestSlidingPool = SlidingPoolMachine.TestCase
TestSlidingPool.settings = often
