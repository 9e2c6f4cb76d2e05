"""Moving blocks between the device and the CPU pool, on a stream of its own on CUDA.

The two rules whose breach corrupts KV silently (vLLM #31341, #32255): a copy starts only after the work that wrote what it
reads, and what a copy reads or writes is not reused before the copy's fence has passed. The first is kept here; for the
second every transfer hands its caller a fence, behind which the blocks are to be released.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sim.core.blocks import NO_BLOCK

from .cpu_pool import CpuBlockPool, runs
from .fences import CudaFence, Fence, StepFence
from .kernels.block_rows import BlockRows
from .ops import Ops
from .pool import PagedKVPool


@dataclass(frozen=True, slots=True)
class Transfer:
    """A batch of blocks under way."""

    num_blocks: int
    num_bytes: int
    fence: Fence
    """Passes when every block has arrived; until then neither end may be reused."""


class _IdBuffers:
    """Block ids on their way to a CUDA device: pairs of a pinned and a device buffer, used again once their fence has passed,
    so that a steady state allocates none.
    """

    def __init__(self, size: int, device: Any) -> None:
        self._size, self._device = size, device
        self._pairs: list[tuple[Any, Any, CudaFence | None]] = []

    def send(self, ids: Sequence[int]) -> tuple[Any, Callable[[], None]]:
        """Copy ids to the device on the current stream; returns `[len(ids)]` int64 there, and what to call once all work that
        reads them has been submitted to the current stream.
        """
        pair = next((pair for pair in self._pairs if pair[2] is not None and pair[2].passed()), None)
        if pair is not None:
            self._pairs.remove(pair)
            host, there = pair[:2]
        else:
            host = torch.empty(self._size, dtype=torch.int64, pin_memory=True)
            there = torch.empty(self._size, dtype=torch.int64, device=self._device)
        host[: len(ids)].copy_(torch.tensor(ids, dtype=torch.int64))
        there[: len(ids)].copy_(host[: len(ids)], non_blocking=True)
        return there[: len(ids)], lambda: self._pairs.append((host, there, CudaFence()))


class BlockMover:
    """Saves blocks of a device pool in a CPU pool and brings them back, in batches of `staging_blocks`.

    On CUDA a batch is gathered by one kernel into a staging buffer, from which every run of consecutive CPU slots is one copy
    (and the other way round), on a copy stream. On the CPU device `latency_steps` puts the copy off, as a slow bus would: it
    is then done by the `poll` in which its fence passes, and sees what the blocks hold by then.
    """

    def __init__(
        self, pool: PagedKVPool, cpu_pool: CpuBlockPool, ops: Ops, *, staging_blocks: int = 64, latency_steps: int = 0
    ) -> None:
        self.pool, self.cpu_pool, self.ops = pool, cpu_pool, ops
        self.staging_blocks = staging_blocks
        self.latency_steps = latency_steps
        self._put_off: list[tuple[Fence, BlockRows, BlockRows, Any, Any]] = []
        self._stream: Any = None
        if pool.device.type == "cuda":
            self._stream = torch.cuda.Stream(pool.device)
            size = staging_blocks * pool.layout.block_bytes
            self._staging = torch.empty(size, dtype=torch.uint8, device=pool.device)
            self._staging_rows = BlockRows.of(pool.layout, self._staging, staging_blocks, dense=True)
            self._places = torch.arange(staging_blocks, device=pool.device)
            self._bytes = self._staging.view(staging_blocks, pool.layout.block_bytes)
            self._ids = _IdBuffers(max(pool.num_blocks, 1), pool.device)
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
        for _, source, target, source_ids, target_ids in due:
            self.ops.move_blocks(source, target, source_ids, target_ids)

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
        device = (self.pool.rows, torch.tensor(block_ids, dtype=torch.int64))
        host = (self.cpu_pool.rows, torch.tensor(slots, dtype=torch.int64))
        (source, source_ids), (target, target_ids) = (device, host) if out else (host, device)
        clock = self.pool.clock
        fence = StepFence(clock, clock.step - 1 + self.latency_steps)
        if fence.passed() or self.latency_steps == 0:
            self.ops.move_blocks(source, target, source_ids, target_ids)
            return StepFence(clock, clock.completed)
        self._put_off.append((fence, source, target, source_ids, target_ids))
        return fence

    def _order_after_compute(self) -> None:
        """The copy stream waits for what the current stream was given: the writers of what is saved, and the last readers
        of what is overwritten.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self.pool.device))

    def _on_cuda(self, block_ids: list[int], slots: list[int], *, out: bool) -> Fence:
        self._order_after_compute()
        with torch.cuda.stream(self._stream):
            ids, done = self._ids.send(block_ids)
            for start in range(0, len(block_ids), self.staging_blocks):
                batch = slots[start : start + self.staging_blocks]
                chosen, places = ids[start : start + len(batch)], self._places[: len(batch)]
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
            done()
            fence = CudaFence(self._stream)
        if not out:
            fence.order()  # what reads the restored blocks comes after them
        return fence
