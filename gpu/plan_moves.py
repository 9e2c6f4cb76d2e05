"""PlanMoves: what a plan does to blocks before anything is computed, and the device's book of who holds them.

Order, for one plan: forks, swap-outs, releases, copies, swap-ins. Forks share blocks that the releases give back, swap-outs read
them, releases make room that copies and swap-ins fill. A move that ran out of memory stays in the journal with all that follow, and is done
before the next plan's: the core has taken the step back, so nobody has written in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from sim.core.blocks import NO_BLOCK, IntegrityError
from sim.core.need import blocks_for
from sim.core.plan import ScheduledRequest, StepPlan

from .ops import Ops
from .pool import PagedKVPool
from .swap import BlockMover

Pairs = Sequence[tuple[int, int]]


class ChangedBlockError(RuntimeError):
    """A block came back from the CPU pool other than it went there. Names block, owner and steps."""


class PlanMoves:
    """Moves blocks of one device pool as plans say."""

    def __init__(
        self, pool: PagedKVPool, ops: Ops, mover: BlockMover | None, *, is_cached: Callable[[int], bool]
    ) -> None:
        self._pool, self._ops, self._mover = pool, ops, mover
        self._is_cached = is_cached
        """Whether a prefix cache may still find what a block holds: then it is not poisoned."""
        self._journal: deque[tuple[str, Callable[[], None]]] = deque()
        self._held: dict[str, tuple[int, ...]] = {}
        self._copied_away: set[int] = set()  # sources of copies since a step was last computed
        self._unsettled: set[str] = set()  # in a step that was taken back before the device held their blocks
        self._saved: dict[str, frozenset[int]] = {}  # core's CPU blocks by the key under which the CPU pool keeps them
        self._sums: dict[str, tuple[int, list[int]]] = {}  # of saved blocks, with the step (checked mode)
        self.during = ""
        """The move in progress, for reports."""
        self.copied_blocks = self.swapped_out_blocks = self.swapped_in_blocks = 0

    @property
    def holders(self) -> Collection[str]:
        """Requests that hold blocks here."""
        return self._held.keys()

    # -- plans ----------------------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """Do what `plan` asks of blocks, and what an earlier plan left undone.

        Raises:
            OutOfMemoryError: a move had no memory; it and the rest are done by the next call.
            DoubleFreeError: a release by somebody who does not hold the block.
        """
        if plan.saves or plan.loads or plan.to_cpu:
            raise IntegrityError(
                f"the plan of step {plan.step} begins {len(plan.saves)} saves and {len(plan.loads)} loads of a CPU prefix tier and moves "
                f"{len(plan.to_cpu)} requests to a CPU executor; this device has neither: make the engine without them"
            )
        self._copied_away.update(source for source, _ in plan.copies)
        never_used = self._unsettled | set(plan.preempted)
        releases = list(plan.releases)
        for child, source, table in plan.forks:
            had = next((given for given in releases if given[0] == child), None) if child in self._held else None
            if had is not None:
                releases.remove(had)
                self._put(f"release by {child}", partial(self._release, *had, strict=child not in self._unsettled))
            if table:
                self._put(f"fork of {source}", partial(self._fork, child, table))
        for request_id, pairs in plan.swap_outs:
            self._put(f"swap-out of {request_id}", partial(self._swap_out, request_id, pairs))
        for request_id, blocks in releases:
            strict = request_id not in never_used
            self._put(f"release by {request_id}", partial(self._release, request_id, blocks, strict=strict))
        for batch in independent(plan.copies):
            self._put("copy-on-write", partial(self._copy, batch))
        for request_id, pairs in plan.swap_ins:
            self._put(f"swap-in of {request_id}", partial(self._swap_in, request_id, pairs))
        self._drain()

    def hold(self, scheduled: ScheduledRequest) -> None:
        """The step that begins uses this request's table: book it, and poison what is new and unwritten.

        Raises:
            IntegrityError: a block left the table that nobody released and no copy replaced (checked mode).
            FenceError: a block's last reader is not done (checked mode).
        """
        name, table = scheduled.request_id, scheduled.block_table
        before = self._held.get(name, ())
        self._unsettled.discard(name)
        if table == before:
            return
        gone = set(before).difference(table) - {NO_BLOCK}
        if gone:
            unexplained = gone - self._copied_away
            if self._pool.checked and unexplained:
                raise IntegrityError(
                    f"{name} no longer uses blocks {sorted(unexplained)} at step {self._pool.clock.step}, and no plan released them"
                )
            self._give_back(name, sorted(gone))
        self._held[name] = table  # first: should poisoning fail, the step is taken back with the blocks
        self._pool.assign(name, table, scheduled.context_tokens)

    def settle(self) -> None:
        """The first step of the plan was computed: its copies are part of the tables now."""
        self._copied_away.clear()

    def take_back(self, scheduled: ScheduledRequest) -> None:
        """The first step of a plan computed nothing: the core has cut the request's table to its context."""
        name, table = scheduled.request_id, self._held.get(scheduled.request_id)
        if table is None:
            self._unsettled.add(name)
            return
        keep = blocks_for(scheduled.context_tokens, self._pool.layout.block_size)
        self._give_back(name, table[keep:])
        self._held[name] = table[:keep]

    def close(self, releases: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        """The run is over: give back what was released after the last plan."""
        for request_id, blocks in releases:
            strict = request_id not in self._unsettled
            self._put(f"release by {request_id}", partial(self._release, request_id, blocks, strict=strict))
        self._drain()

    # -- single moves ---------------------------------------------------------------------------------------------

    def _put(self, what: str, move: Callable[[], None]) -> None:
        self._journal.append((what, move))

    def _drain(self) -> None:
        while self._journal:
            self.during, move = self._journal[0]
            move()
            self._journal.popleft()
        self.during = ""

    def _release(self, name: str, blocks: Sequence[int], *, strict: bool) -> None:
        """Not `strict`: a victim gives back, with the rest, blocks that it got in the same plan and never used."""
        held = self._held.get(name, ())
        self._give_back(name, blocks if strict else [block for block in blocks if block in held])
        given = set(blocks)
        rest = tuple(NO_BLOCK if block in given else block for block in held)
        if any(rest):
            self._held[name] = rest
        else:
            self._held.pop(name, None)

    def _give_back(self, name: str, blocks: Sequence[int]) -> None:
        """Release blocks; those that are still to be copied from, or that a prefix cache may find, stay as they are."""
        given = [block for block in blocks if block != NO_BLOCK]
        kept = {block for block in given if block in self._copied_away or self._is_cached(block)}
        self._pool.release(name, [block for block in given if block in kept], keep_content=True)
        self._pool.release(name, [block for block in given if block not in kept])

    def _fork(self, name: str, table: tuple[int, ...]) -> None:
        """`name` holds blocks that its source holds too: nothing is fresh, all is written."""
        self._pool.assign(name, table, len(table) * self._pool.layout.block_size)
        self._held[name] = table

    def _copy(self, copies: Pairs) -> None:
        device = self._pool.device
        sources, targets = (torch.tensor(ids, dtype=torch.int64).to(device) for ids in zip(*copies, strict=True))
        self._ops.move_blocks(self._pool.rows, self._pool.rows, sources, targets)
        self.copied_blocks += len(copies)

    def _swap_out(self, name: str, pairs: Pairs) -> None:
        mover, slots = self._needed(name), frozenset(slot for _, slot in pairs)
        for key in [key for key, kept in self._saved.items() if key == name or kept & slots]:
            mover.cpu_pool.drop(key)  # its request ended while it was away: the core has given its slots to another
            del self._saved[key]
        transfer = mover.swap_out(name, [block for block, _ in pairs])
        if transfer is None:
            raise IntegrityError(
                f"the CPU pool has {mover.cpu_pool.num_free} free slots for {len(pairs)} blocks of {name}; the core counted more"
            )
        self._await(transfer.fence)
        self._saved[name] = slots
        if self._pool.checked:
            self._sums[name] = (self._pool.clock.step, self._checksums([block for block, _ in pairs]))
        self.swapped_out_blocks += len(pairs)

    def _swap_in(self, name: str, pairs: Pairs) -> None:
        transfer = self._needed(name).swap_in(name, [block for _, block in pairs])
        self._await(transfer.fence)
        del self._saved[name]
        if self._pool.checked:
            self._check_restored(name, [block for _, block in pairs])
        self.swapped_in_blocks += len(pairs)

    def _checksums(self, blocks: list[int]) -> list[int]:
        ids = torch.tensor(blocks, dtype=torch.int64).to(self._pool.device)
        sums = torch.empty(len(blocks), dtype=torch.int32, device=self._pool.device)
        found: list[int] = self._ops.block_checksum(self._pool.rows, ids, sums).tolist()
        return found

    def _check_restored(self, name: str, blocks: list[int]) -> None:
        """Verify that what came back is what was saved.

        Raises:
            ChangedBlockError: it is not; names the block, its owner and both steps.
        """
        step, saved = self._sums.pop(name)
        for block, before, now in zip(blocks, saved, self._checksums(blocks), strict=True):
            if before != now:
                raise ChangedBlockError(
                    f"block {block} of {name}, restored at step {self._pool.clock.step}, is not what was saved at step {step}: "
                    f"checksum {now & 0xFFFFFFFF:08x}, not {before & 0xFFFFFFFF:08x}; a copy was not waited for, or its place was rewritten"
                )

    def _await(self, fence: Any) -> None:
        """What comes next may write where the copy reads. The checked mode waits on the host, so that tags can be verified."""
        if self._pool.checked:
            fence.wait()
        else:
            fence.order()

    def _needed(self, name: str) -> BlockMover:
        if self._mover is None:
            raise IntegrityError(f"the plan swaps {name}, but the executor was made without a CPU pool")
        return self._mover


def independent(copies: Pairs) -> Iterator[list[tuple[int, int]]]:
    """Copies in batches within which the order does not matter.

    >>> list(independent([(1, 2), (1, 3), (4, 1)]))
    [[(1, 2), (1, 3)], [(4, 1)]]
    """
    batch: list[tuple[int, int]] = []
    for source, target in copies:
        if any(target in pair or source == pair[1] for pair in batch):
            yield batch
            batch = []
        batch.append((source, target))
    if batch:
        yield batch
