"""Owner tags: the device's own book of who may read which block. Pure Python.

The core decides; this book is kept from what the device is told, so that a wrong table, a read after release or a leak shows
here even when the core's books add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sim.core.blocks import NO_BLOCK, DoubleFreeError, IntegrityError

from .fences import Fence, FenceError


class ForeignReadError(RuntimeError):
    """A request is about to read or write a block that it does not hold. Names block, request, holders and step."""


@dataclass(frozen=True, slots=True)
class Released:
    """How a block was last given back."""

    owner: str
    step: int

    def __str__(self) -> str:
        return f"{self.owner} at step {self.step}"


class OwnerTags:
    """Blocks 1 to `num_blocks`, each with the requests that hold it, or waiting behind a fence, or free."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._holders: dict[
            int, dict[str, int]
        ] = {}  # by block: who holds it, and the step in which it came to hold it
        self._blocks: dict[str, set[int]] = {}
        self._quarantine: dict[int, Fence] = {}
        self._released: dict[int, Released] = {}

    @property
    def num_held(self) -> int:
        """Blocks that somebody holds."""
        return len(self._holders)

    @property
    def num_quarantined(self) -> int:
        """Blocks that nobody holds and somebody may still read."""
        return len(self._quarantine)

    def holders(self, block_id: int) -> tuple[str, ...]:
        """Who holds a block, sorted."""
        return tuple(sorted(self._holders.get(block_id, ())))

    def last_release(self, block_id: int) -> Released | None:
        """How a block was last given back."""
        return self._released.get(block_id)

    def hold(self, owner: str, block_ids: Sequence[int], step: int, *, wait: bool = False) -> list[int]:
        """`owner` holds these blocks too; returns those that nobody held before and `owner` gets.

        A block in quarantine is an error; with `wait`, its fence is ordered before what comes next instead.

        Raises:
            FenceError: the last reader of a block is not done; nothing is changed.
            IntegrityError: a block that the pool does not have.
        """
        mine = self._blocks.get(owner, set())
        new = [block_id for block_id in dict.fromkeys(block_ids) if block_id != NO_BLOCK and block_id not in mine]
        for block_id in new:
            if not 0 < block_id <= self.num_blocks:
                raise IntegrityError(
                    f"{owner} was given block {block_id} of a pool of {self.num_blocks} at step {step}"
                )
            fence = self._quarantine.get(block_id)
            if fence is not None and not wait and not fence.passed():
                raise FenceError(
                    f"block {block_id} was given to {owner} at step {step} before the fence of its release by "
                    f"{self._released[block_id]} has passed"
                )
        fresh: list[int] = []
        for block_id in new:
            fence = self._quarantine.pop(block_id, None)
            if fence is not None and not fence.passed():
                fence.order()
            if block_id not in self._holders:
                fresh.append(block_id)
            self._holders.setdefault(block_id, {})[owner] = step
        if new:
            self._blocks.setdefault(owner, set()).update(new)
        return fresh

    def release(self, owner: str, block_ids: Iterable[int], step: int, fence: Fence | None = None) -> list[int]:
        """`owner` gives blocks back; returns those that nobody holds any more. Behind a `fence` that has not passed they
        wait in quarantine.

        Raises:
            DoubleFreeError: `owner` does not hold one of them; names both releases, and nothing is changed.
        """
        mine = self._blocks.get(owner, set())
        given = [block_id for block_id in block_ids if block_id != NO_BLOCK]
        seen: set[int] = set()
        for block_id in given:
            if block_id not in mine or block_id in seen:
                first = owner if block_id in seen else str(self._released.get(block_id, "nobody (it never held it)"))
                raise DoubleFreeError(block_id, first, str(Released(owner, step)))
            seen.add(block_id)
        idle: list[int] = []
        for block_id in given:
            mine.remove(block_id)
            holders = self._holders[block_id]
            del holders[owner]
            self._released[block_id] = Released(owner, step)
            if not holders:
                del self._holders[block_id]
                idle.append(block_id)
                if fence is not None and not fence.passed():
                    self._quarantine[block_id] = fence
        if not mine:
            self._blocks.pop(owner, None)
        return idle

    def settle(self) -> list[int]:
        """Blocks whose fence has passed since the last call; they are free now."""
        passed = [block_id for block_id, fence in self._quarantine.items() if fence.passed()]
        for block_id in passed:
            del self._quarantine[block_id]
        return passed

    def check_held(self, owner: str, block_ids: Iterable[int], step: int) -> None:
        """Verify that `owner` holds every block it is about to use.

        Raises:
            ForeignReadError: it does not; names the block, who holds it, who released it last, and the step.
        """
        mine = self._blocks.get(owner, set())
        for block_id in block_ids:
            if block_id != NO_BLOCK and block_id not in mine:
                holders = " and ".join(self.holders(block_id)) or "nobody"
                released = self._released.get(block_id)
                raise ForeignReadError(
                    f"{owner} uses block {block_id} at step {step} without holding it: it is held by {holders}, "
                    + (f"last released by {released}" if released else "never released")
                )

    def check_kept(self, owner: str, held: Sequence[int], table: Iterable[int], step: int) -> None:
        """Verify that `owner`, whose table was `held`, does not use on in `table` what it has given back: with the rest of its blocks in
        this very step, or by itself. To be asked of blocks whose content a prefix cache keeps; any other was poisoned.

        Raises:
            IntegrityError: it does; names the block and both steps.
        """
        mine = self._blocks.get(owner, set())
        for place, block_id in enumerate(table):
            last = self._released.get(block_id)
            if block_id == NO_BLOCK or block_id in mine or last is None or last.owner != owner:
                continue
            if last.step == step or (place < len(held) and held[place] == NO_BLOCK):
                raise IntegrityError(f"{owner} uses block {block_id} at step {step}, after it was released by {last}")

    def compare(self, tables: Iterable[tuple[str, Sequence[int]]]) -> None:
        """Verify that these block tables are what the device was told.

        Raises:
            IntegrityError: how many blocks differ, and which, with their owners and the step in which each got the block: held here and
                in no table (a leak on the device), or in a table and not held here.
        """
        wanted: dict[int, set[str]] = {}
        for owner, table in tables:
            for block_id in table:
                if block_id != NO_BLOCK:
                    wanted.setdefault(block_id, set()).add(owner)
        problems = [
            f"block {block_id} is held by {self._since(block_id)} on the device and by "
            f"{', '.join(sorted(wanted.get(block_id, ()))) or 'nobody'} in the tables"
            for block_id in sorted(wanted.keys() | self._holders.keys())
            if wanted.get(block_id, set()) != self._holders.get(block_id, {}).keys()
        ]
        if problems:
            more = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
            raise IntegrityError(f"{len(problems)} blocks differ: {'; '.join(problems[:10])}{more}")

    def _since(self, block_id: int) -> str:
        """Who holds a block, and since which step."""
        holders = sorted(self._holders.get(block_id, {}).items())
        return ", ".join(f"{owner} (since step {step})" for owner, step in holders) or "nobody"
