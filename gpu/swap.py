"""Moving blocks between the device and the CPU pool, on a stream of its own on CUDA.

The two rules whose breach corrupts KV silently (vLLM #31341, #32255): a copy starts only after the work that wrote what it
reads, and what a copy reads or writes is not reused before the copy's fence has passed. The first is kept here; for the
second every transfer hands its caller a fence, behind which the blocks are to be released.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sim.core.blocks import NO_BLOCK

from .cpu_pool import CpuBlockPool, runs
from .fences import CudaFence, Fence, StepFence
from .kernels.block_rows import BlockRows
from .ops import Ops
from .pool import PagedKVPool
from .staging import MAX_IDS


@dataclass(frozen=True, slots=True)
class Transfer:
    """A batch of blocks under way."""

    num_blocks: int
    num_bytes: int
    fence: Fence
    """Passes when every block has arrived; until then neither end may be reused."""


class BlockMover:
    """Saves blocks of a device pool in a CPU pool and brings them back, in batches of `staging_blocks`.

    On CUDA a batch is gathered by one kernel into a staging buffer, from which every run of consecutive CPU slots is one copy
    (and the other way round), on a copy stream. On the CPU device `latency_steps` puts the copy off, as a slow bus would: it
    is then done by the `poll` in which its fence passes, and sees what the blocks hold by then.
    """

    def __init__(
        self,
        pool: PagedKVPool,
        cpu_pool: CpuBlockPool,
        ops: Ops,
        *,
        staging_blocks: int = MAX_IDS,
        latency_steps: int = 0,
    ) -> None:
        self.pool, self.cpu_pool, self.ops = pool, cpu_pool, ops
        self.staging_blocks = staging_blocks
        self.latency_steps = latency_steps
        self._put_off: list[tuple[Fence, list[int], list[int], bool]] = []
        self._stream: Any = None
        if pool.device.type == "cuda":
            self._stream = torch.cuda.Stream(pool.device)
            size = staging_blocks * pool.layout.block_bytes
            self._staging = torch.empty(size, dtype=torch.uint8, device=pool.device)
            self._staging_rows = BlockRows.of(pool.layout, self._staging, staging_blocks, dense=True)
            self._places = torch.arange(staging_blocks, device=pool.device)
            self._bytes = self._staging.view(staging_blocks, pool.layout.block_bytes)
            self._cpu_bytes = cpu_pool.buffer.view(cpu_pool.num_blocks, pool.layout.block_bytes)

    def save(self, block_ids: Sequence[int], slots: Sequence[int]) -> Transfer:
        """Start saving device blocks into these CPU slots, which the caller owns. Release neither end before the transfer's fence has
        passed.

        Raises:
            ValueError: not as many slots as blocks, or NO_BLOCK is among the blocks: it holds nothing, and the caller remembers its place.
            OutOfMemoryError: there was no memory for the move. A copy that was submitted before may still write into the slots.
        """
        return self._start(block_ids, slots, out=True)

    def load(self, block_ids: Sequence[int], slots: Sequence[int]) -> Transfer:
        """Start loading these CPU slots into device blocks, and order the current stream after it. As `save` otherwise."""
        return self._start(block_ids, slots, out=False)

    def poll(self) -> None:
        """Do the copies that were put off and are due (CPU device with `latency_steps`)."""
        due = [move for move in self._put_off if move[0].passed()]
        self._put_off = [move for move in self._put_off if not move[0].passed()]
        for _, block_ids, slots, out in due:
            self._move(block_ids, slots, out=out)

    # -- the two ways ---------------------------------------------------------------------------------------------

    def _start(self, block_ids: Sequence[int], slots: Sequence[int], *, out: bool) -> Transfer:
        if NO_BLOCK in block_ids:
            raise ValueError(f"NO_BLOCK cannot be moved: leave out what slid out of the window ({list(block_ids)})")
        if len(block_ids) != len(slots):
            raise ValueError(
                f"{len(block_ids)} blocks of the device and {len(slots)} slots of the CPU pool do not match"
            )
        move = self._on_cpu if self._stream is None else self._on_cuda
        fence = move(list(block_ids), list(slots), out=out)
        return Transfer(len(block_ids), len(block_ids) * self.pool.layout.block_bytes, fence)

    def _on_cpu(self, block_ids: list[int], slots: list[int], *, out: bool) -> Fence:
        clock = self.pool.clock
        fence = StepFence(clock, clock.step - 1 + self.latency_steps)
        if fence.passed() or self.latency_steps == 0:
            self._move(block_ids, slots, out=out)
            return StepFence(clock, clock.completed)
        self._put_off.append((fence, block_ids, slots, out))
        return fence

    def _move(self, block_ids: list[int], slots: list[int], *, out: bool) -> None:
        """Copy between the pools by the CPU, which reaches both."""
        pools = (self.pool.rows, self.cpu_pool.rows)
        for blocks, places in self._batches(block_ids, slots):
            ids = self.ops.staging.ids
            with ids("blocks to move", blocks) as here, ids("places in the CPU pool", places) as there:
                (source, target), ends = (pools, (here, there)) if out else (pools[::-1], (there, here))
                self.ops.move_blocks(source, target, *ends)

    def _batches(self, block_ids: list[int], slots: list[int]) -> Iterator[tuple[list[int], list[int]]]:
        """Block ids and slots, `staging_blocks` at a time."""
        for start in range(0, len(block_ids), self.staging_blocks):
            stop = start + self.staging_blocks
            yield block_ids[start:stop], slots[start:stop]

    def _order_after_compute(self) -> None:
        """The copy stream waits for what the current stream was given: the writers of what is saved, and the last readers
        of what is overwritten.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self.pool.device))

    def _on_cuda(self, block_ids: list[int], slots: list[int], *, out: bool) -> Fence:
        self._order_after_compute()
        with torch.cuda.stream(self._stream):
            for blocks, batch in self._batches(block_ids, slots):
                places = self._places[: len(batch)]
                with self.ops.staging.ids("blocks to move", blocks) as chosen:
                    if out:
                        self.ops.move_blocks(self.pool.rows, self._staging_rows, chosen, places)
                    for place, slot, length in runs(batch):
                        staged, kept = self._bytes[place : place + length], self._cpu_bytes[slot : slot + length]
                        if out:
                            kept.copy_(staged, non_blocking=True)
                        else:
                            staged.copy_(kept, non_blocking=True)
                    if not out:
                        self.ops.move_blocks(self._staging_rows, self.pool.rows, places, chosen)
            fence = CudaFence(self._stream)
        if not out:
            fence.order()  # what reads the restored blocks comes after them
        return fence
