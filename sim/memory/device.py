"""The device while it serves: what stays, what the KV pool has in use, what faults hold, and what is left for a step.

The ledger says where every byte goes before the first request. Here the same lines are regrouped by who could tell them apart
from outside: tensors of PyTorch, memory of this process beside them, other processes, and the workspace that steps share.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from sim.catalog.gpus import Gpu
from sim.catalog.shape import ModelShape
from sim.core.batch_shape import BatchShape
from sim.core.durations import Durations

from .faults import Faults
from .ledger import Ledger
from .measured_steps import MeasuredStepMemory
from .step_memory import StepMemory

_NON_TORCH = frozenset({"context", "non_torch", "communication"})
_LEFT = frozenset({"peak_activation", "unused", "fragmentation", "outside_budget"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """Who holds how many bytes at one moment, between two steps."""

    tensors_bytes: int
    """Weights, buffers and graphs, and what leaks: PyTorch's, beside the KV pool and private pools."""
    weights_bytes: int
    """The part of it that are weights."""
    graphs_bytes: int
    """The part of it that CUDA graphs keep."""
    private_bytes: int
    """Free in the private pools of graphs: PyTorch counts it as allocated."""
    kv_pool_bytes: int
    """The whole pool, used or not."""
    stuck_bytes: int
    """Reserved by PyTorch in pieces too small to use."""
    pending_bytes: int
    """Freed and waiting for another stream."""
    cached_bytes: int
    """In free segments that go back to the device on demand."""
    non_torch_bytes: int
    """Context, libraries and communication of this process."""
    others_bytes: int
    """Other processes."""
    left_bytes: int
    """For the temporary tensors of a step; negative when the rest is more than the device."""


class Device:
    """One rank's memory. All ranks are alike or better off."""

    def __init__(self, model: ModelShape, gpu: Gpu, ledger: Ledger, faults: Faults) -> None:
        self.ledger = ledger
        self.faults = faults
        last = ledger.pipeline_rank == ledger.pipeline_parallel_size - 1
        measured = ledger.measured
        self.steps: StepMemory = (
            StepMemory(model, gpu, ledger.settings, samples=last)
            if measured is None
            else MeasuredStepMemory(model, gpu, ledger.settings, measured)
        )
        """What steps need."""
        self.total_bytes = ledger.total_bytes
        """Physical memory."""
        lines = {line.name: line.bytes for line in ledger.lines}
        self._kv_pool = lines["kv_pool"]
        self._non_torch = sum(lines.get(name, 0) for name in _NON_TORCH)
        self._others = lines.get("other_processes", 0)
        self.workspace_bytes = sum(lines.get(name, 0) for name in _LEFT)
        """What the account leaves for steps: the budgeted peak, what nobody claimed inside and outside the budget, ends of segments."""
        self._weights, self._graphs = lines.get("weights", 0), lines.get("cuda_graphs", 0)
        self._tensors = self.total_bytes - self._kv_pool - self._non_torch - self._others - self.workspace_bytes

    def block_bytes(self, num_blocks: int) -> int:
        """Bytes of one block of a pool of `num_blocks`."""
        return self._kv_pool // num_blocks

    def left_bytes(self, time_fs: int) -> int:
        """Bytes for the temporary tensors of a step that starts at a time."""
        return self.workspace_bytes - self.faults.taken_bytes(time_fs)

    def headroom_bytes(self, shape: BatchShape, start_fs: int, durations: Durations, step: int) -> int:
        """What step `step` of a stretch that starts at `start_fs` leaves; negative when it does not fit."""
        if not self.faults:
            return self.workspace_bytes - self.steps.need(shape, step + 1).bytes
        time_fs = start_fs + durations.before_fs(step)
        return self.left_bytes(time_fs) - self.steps.need(shape, step + 1, self.faults.extra(time_fs)).bytes

    def tightening(self, start_fs: int, durations: Durations) -> Iterator[range]:
        """The steps of a stretch in runs within which each step leaves at most as much as the one before.

        A run ends where a fault turns: where it gives back what it held, or where steps begin or cease to need more.
        """
        steps, first = durations.steps, 0
        for turn_fs in self.faults.turns_fs:
            stop = bisect_left(range(steps), turn_fs - start_fs, key=durations.before_fs)
            if stop > first:
                yield range(first, stop)
                first = stop
        if first < steps:
            yield range(first, steps)

    def at(self, time_fs: int) -> Holdings:
        """Everything at a time, between two steps."""
        held = self.faults.held_bytes
        return Holdings(
            tensors_bytes=self._tensors + held("leak", time_fs),
            weights_bytes=self._weights,
            graphs_bytes=self._graphs,
            private_bytes=held("cuda_graphs", time_fs),
            kv_pool_bytes=self._kv_pool,
            stuck_bytes=held("fragmentation", time_fs),
            pending_bytes=held("pending_frees", time_fs),
            cached_bytes=held("cached", time_fs),
            non_torch_bytes=self._non_torch + held("non_torch", time_fs),
            others_bytes=self._others + held("other_process", time_fs),
            left_bytes=self.left_bytes(time_fs),
        )
