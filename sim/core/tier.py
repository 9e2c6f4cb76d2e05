"""The CPU prefix tier: which CPU block holds the KV of which full prefix block, and whether it may be read or reused yet.

A block of the tier is being written (a save is under way), ready, or read by loads. Only a ready block can be found; one that a
copy writes or reads is not given to anybody else before that copy is done (I9). What was used longest ago goes first, and of one
prefix the tail before the head, as on the device. Source of the states: vLLM's CPU offload manager (engine-policies §1.1.8).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, KeysView, Sequence
from dataclasses import dataclass

from .blocks import IntegrityError


@dataclass(slots=True, eq=False)
class TierBlock:
    """One CPU block that holds, or is about to hold, a prefix block."""

    block_id: int
    """Number of the CPU block, from 1."""
    key: int
    """What it holds."""
    written: bool = False
    """Whether its save is done."""
    readers: int = 0
    """Loads that read it."""
    dropped: bool = False
    """Nobody is to find it any more; it is free when its copies are done."""

    @property
    def busy(self) -> bool:
        """Whether a copy writes or reads it."""
        return self.readers > 0 or not self.written


class PrefixTier:
    """`num_blocks` CPU blocks, by the key of what they hold."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._by_key: OrderedDict[int, TierBlock] = OrderedDict()  # what goes first comes first
        self._leaving: dict[int, TierBlock] = {}  # by CPU block: dropped while a copy used them
        self._free: list[int] = []  # used before
        self._num_used = 0  # CPU blocks ever taken
        self.num_busy = 0
        """Blocks that a copy writes or reads."""

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: object) -> bool:
        return key in self._by_key

    @property
    def keys(self) -> KeysView[int]:
        """What is here, or on its way here."""
        return self._by_key.keys()

    @property
    def num_obtainable(self) -> int:
        """Blocks that can be written now: free ones, and those whose content may be forgotten."""
        return self.num_blocks - self.num_busy

    def find(self, keys: Iterable[int]) -> list[TierBlock]:
        """Blocks that hold the longest run of `keys` from the first and may be read."""
        found: list[TierBlock] = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None or not block.written:
                break
            found.append(block)
        return found

    def is_moving(self, key: int) -> bool:
        """Whether a copy brings this content to the tier, or from it to the device."""
        block = self._by_key.get(key)
        return block is not None and block.busy

    def begin_saves(self, keys: Iterable[int]) -> list[TierBlock]:
        """Take a block for each of `keys`, whose content is not here when its turn comes; fewer when all are busy.

        Raises ValueError if the content is here already.
        """
        by_key, free, forgotten, before = self._by_key, self._free, 0, len(self._by_key)
        taken: list[TierBlock] = []
        for key in keys:
            if free:
                block = TierBlock(free.pop(), key)
            elif self._num_used < self.num_blocks:
                self._num_used += 1
                block = TierBlock(self._num_used, key)
            else:
                for block in by_key.values():
                    if block.written and not block.readers:
                        break
                else:
                    break
                del by_key[block.key]  # nobody uses it: it holds something else from now on
                block.key, block.written = key, False
                forgotten += 1
            by_key[key] = block
            taken.append(block)
        if len(by_key) != before - forgotten + len(taken):
            raise ValueError(f"of {[block.key for block in taken]} some were in the CPU tier already, or twice")
        self.num_busy += len(taken)
        return taken

    def end_save(self, blocks: Sequence[TierBlock], *, done: bool) -> None:
        """A save has ended; what was not saved is forgotten."""
        if not done:
            self.drop(blocks)
        move_to_end = self._by_key.move_to_end
        for block in reversed(blocks):  # the head of a prefix is kept longest
            block.written = True
            if block.readers or block.dropped:
                self._rest(block)
            else:
                self.num_busy -= 1
            if not block.dropped:
                move_to_end(block.key)

    def begin_load(self, blocks: Sequence[TierBlock]) -> None:
        """A load reads what `find` has found."""
        for block in blocks:
            self.num_busy += not block.busy
            block.readers += 1
        self._use(blocks)

    def end_load(self, blocks: Sequence[TierBlock], *, done: bool) -> None:
        """It has read it; what could not be read is forgotten."""
        if not done:
            self.drop(blocks)
        for block in blocks:
            block.readers -= 1
            self._rest(block)

    def forget(self, keys: Iterable[int]) -> None:
        """Forget contents, as far as they are here."""
        self.drop([self._by_key[key] for key in keys if key in self._by_key])

    def drop(self, blocks: Iterable[TierBlock]) -> None:
        """Let nobody find these any more; one that a copy uses is free when the copy is done."""
        for block in blocks:
            if block.dropped:
                continue
            block.dropped = True
            del self._by_key[block.key]
            if block.busy:
                self._leaving[block.block_id] = block
            else:
                self._free.append(block.block_id)

    def check(self) -> None:
        """Verify that every block is in one place. Raises IntegrityError with the counts."""
        kept = (*self._by_key.values(), *self._leaving.values())
        places = sorted([*(block.block_id for block in kept), *self._free])
        busy = sum(block.busy for block in kept)
        if places != list(range(1, self._num_used + 1)) or busy != self.num_busy or self._num_used > self.num_blocks:
            raise IntegrityError(
                f"the CPU tier of {self.num_blocks} blocks has used {self._num_used}: {len(kept)} hold something and "
                f"{len(self._free)} are free; {busy} are busy, {self.num_busy} are counted"
            )

    def _rest(self, block: TierBlock) -> None:
        """A copy of a block has ended."""
        if block.busy:
            return
        self.num_busy -= 1
        if block.dropped:
            del self._leaving[block.block_id]
            self._free.append(block.block_id)

    def _use(self, blocks: Sequence[TierBlock]) -> None:
        """These were used now; the head of a prefix is kept longest."""
        for block in reversed(blocks):
            if not block.dropped:
                self._by_key.move_to_end(block.key)
