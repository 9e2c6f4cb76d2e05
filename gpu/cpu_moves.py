"""CpuMoves: what plans move between a device and the CPU: swapped requests, prefixes, and requests that go on there.

The core counts the CPU's blocks and gives them out, and plans name them; here lies what is in them. What a request has left there is
overwritten when the core gives its place to another: that it ended, no plan tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sim.core.blocks import IntegrityError
from sim.core.plan import CpuMove

from .cpu_lane import CpuLane
from .ops import Ops
from .pool import PagedKVPool
from .staging import MAX_IDS
from .swap import BlockMover

Pairs = Sequence[tuple[int, int]]
_Sums = dict[int, tuple[int, int]]
"""By the core's CPU block: step and checksum of what was saved there."""


class ChangedBlockError(RuntimeError):
    """A block came back from the CPU pool other than it went there. Names block, owner and steps."""


class CpuMoves:
    """Moves between one device pool and the CPU."""

    def __init__(
        self,
        pool: PagedKVPool,
        ops: Ops,
        *,
        mover: BlockMover | None = None,
        tier: BlockMover | None = None,
        lane: CpuLane | None = None,
    ) -> None:
        """`mover` has the CPU pool of swapped requests, `tier` that of prefixes, the blocks of which the core numbers from 1; `lane` serves
        requests on the CPU. A plan that needs one that is not there is refused with IntegrityError.
        """
        self._pool, self._ops, self._mover, self._tier, self._lane = pool, ops, mover, tier, lane
        self._swapped: _Sums = {}  # of requests, in checked mode
        self._prefixes: _Sums = {}
        self.swapped_out_blocks = self.swapped_in_blocks = 0
        """Blocks of requests that went to the CPU pool and came back."""
        self.saved_blocks = self.loaded_blocks = 0
        """Blocks of prefixes that went to the tier and came from it."""
        self.moved_to_cpu = 0
        """Requests that went on on the CPU."""

    def report(self) -> dict[str, int]:
        """The counts, as JSON values."""
        return {
            "swapped_out_blocks": self.swapped_out_blocks,
            "swapped_in_blocks": self.swapped_in_blocks,
            "saved_prefix_blocks": self.saved_blocks,
            "loaded_prefix_blocks": self.loaded_blocks,
            "moved_to_cpu": self.moved_to_cpu,
        }

    def swap_out(self, name: str, pairs: Pairs) -> None:
        """A request's blocks go to the CPU pool, to the places that the core gave them: others may come back with them (forks)."""
        blocks = [block for block, _ in pairs]
        if not blocks:
            return
        transfer = self._needed(name).save(blocks, [cpu_block - 1 for _, cpu_block in pairs])
        self._await(transfer.fence)
        self._remember(self._swapped, pairs)
        self.swapped_out_blocks += len(pairs)

    def swap_in(self, name: str, pairs: Pairs) -> None:
        """A request's blocks come back from the CPU pool.

        Raises:
            ChangedBlockError: they are not what was saved (checked mode).
        """
        blocks = [block for _, block in pairs]
        if not blocks:
            return
        transfer = self._needed(name).load(blocks, [cpu_block - 1 for cpu_block, _ in pairs])
        self._await(transfer.fence)
        self._check_restored(self._swapped, name, pairs)
        self.swapped_in_blocks += len(pairs)

    def save(self, pairs: Pairs) -> None:
        """Prefix blocks to the tier. The core rewrites neither end before it has heard that they are there; but the world may tell it
        before the device is so far, so what comes next waits.
        """
        tier = self._needed_tier()
        transfer = tier.save([block for block, _ in pairs], [cpu_block - 1 for _, cpu_block in pairs])
        self._await(transfer.fence)
        self._remember(self._prefixes, pairs)
        self.saved_blocks += len(pairs)

    def load(self, name: str, pairs: Pairs) -> None:
        """Prefix blocks from the tier, for a request.

        Raises:
            ChangedBlockError: they are not what was saved there (checked mode).
        """
        tier = self._needed_tier()
        transfer = tier.load([block for _, block in pairs], [cpu_block - 1 for cpu_block, _ in pairs])
        self._await(transfer.fence)
        self._check_restored(self._prefixes, name, pairs)
        self.loaded_blocks += len(pairs)

    def _needed_tier(self) -> BlockMover:
        if self._tier is None:
            raise IntegrityError(
                "the plan saves or loads prefixes, but the executor was made without a CPU prefix tier"
            )
        return self._tier

    def to_cpu(self, move: CpuMove) -> None:
        """A request goes on on the CPU."""
        lane = self._needed_lane(move.request_id)
        with self._pool.beside():
            lane.receive(move, self._pool)
        self.moved_to_cpu += 1

    def from_cpu(self, move: CpuMove) -> None:
        """A request comes back from where it was served, with what was computed for it there. Raises KeyError when it is not there."""
        lane = self._needed_lane(move.request_id)
        with self._pool.beside():
            lane.give_back(move, self._pool)

    def end_on_cpu(self, name: str) -> None:
        """A request has ended there. Raises KeyError when it is not there."""
        self._needed_lane(name).drop(name)

    def catch_up(self) -> None:
        """What the CPU computes for itself; called when the device's step has been timed."""
        if self._lane is not None:
            self._lane.catch_up()

    def _needed_lane(self, name: str) -> CpuLane:
        if self._lane is None:
            raise IntegrityError(f"the plan moves {name} to the CPU, or from it, but the executor was made without one")
        return self._lane

    def _checksums(self, blocks: list[int]) -> list[int]:
        found: list[int] = []
        for start in range(0, len(blocks), MAX_IDS):
            some = blocks[start : start + MAX_IDS]
            with self._ops.staging.ids("blocks to sum", some) as ids, self._pool.beside():
                sums = torch.empty(len(some), dtype=torch.int32, device=self._pool.device)
                found += self._ops.block_checksum(self._pool.rows, ids, sums).tolist()
        return found

    def _remember(self, sums: _Sums, pairs: Pairs) -> None:
        """What these blocks held when they were saved (checked mode)."""
        if not self._pool.checked:
            return
        step = self._pool.clock.step
        for (_, cpu_block), checksum in zip(pairs, self._checksums([block for block, _ in pairs]), strict=True):
            sums[cpu_block] = (step, checksum)

    def _check_restored(self, sums: _Sums, name: str, pairs: Pairs) -> None:
        """Verify that what came back is what was saved (checked mode).

        Raises:
            ChangedBlockError: it is not; names the block, its owner and both steps.
        """
        if not self._pool.checked:
            return
        for (cpu_block, block), now in zip(pairs, self._checksums([block for _, block in pairs]), strict=True):
            came = f"block {block} of {name}, restored at step {self._pool.clock.step}, "
            if cpu_block not in sums:
                raise ChangedBlockError(f"{came}comes from CPU block {cpu_block}, to which nothing was ever saved")
            step, before = sums[cpu_block]
            if before != now:
                raise ChangedBlockError(
                    f"{came}is not what was saved at step {step}: "
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
