"""An executor that runs out of memory when the account says so.

It lets another executor price or run the steps, and looks at each of them: a step whose temporary tensors need more than is left
of the device fails, with the operator that did not fit. Within a stretch need and shortage only grow (but at the moments at which
a fault turns), so the first step that fails is found by bisection, and a leap fails at the very step at which stepping would.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from math import inf

from sim.core.durations import Durations
from sim.core.engine import EngineCore
from sim.core.plan import Executor, OomReport, StepPlan, StepResult
from sim.memory.device import Device
from sim.memory.ops import Peak
from sim.memory.rounding import reserved_bytes
from sim.memory.workspaces import CUBLAS


class WorkspaceExecutor:
    """`inner`, on a device with so much memory."""

    def __init__(self, inner: Executor, device: Device, core: EngineCore) -> None:
        self._inner, self._device, self._core = inner, device, core

    def execute(self, plan: StepPlan) -> StepResult:
        """The result of `inner` up to the first step that does not fit; raises DoubleFreeError where a fault provokes one."""
        device = self._device
        if device.faults.double_release_due(plan.start_fs):
            self._release_twice(plan)
        result = self._inner.execute(plan)
        if not plan.shape.computes:
            return result
        if not device.faults and device.steps.need(plan.shape, plan.repeat).bytes <= device.workspace_bytes:
            step = None  # nothing changes with time, and the last step is the widest
        else:
            step = self._first_failure(plan, result.durations)
        if step is not None:
            result = self._fail(plan, result, step)
        return self._with_share(plan, result) if self._core.watches_workspace else result

    def _with_share(self, plan: StepPlan, result: StepResult) -> StepResult:
        """The result, with the share of what is left for it that its last step needs."""
        start_fs, last = plan.start_fs, result.steps - 1
        left = self._device.left_bytes(start_fs + result.durations.before_fs(last))
        headroom = self._device.headroom_bytes(plan.shape, start_fs, result.durations, last)
        return replace(result, workspace_share=(left - headroom) / left if left > 0 else inf)

    def _first_failure(self, plan: StepPlan, durations: Durations) -> int | None:
        """The first step that needs more than is left at its start; None when all fit."""

        def fails(step: int) -> bool:
            return self._device.headroom_bytes(plan.shape, plan.start_fs, durations, step) < 0

        for run in self._device.tightening(plan.start_fs, durations):
            if fails(run[-1]):  # then all after the first that fails do
                return run[bisect_left(run, True, key=fails)]
        return None

    def _fail(self, plan: StepPlan, result: StepResult, step: int) -> StepResult:
        start_fs = plan.start_fs + result.durations.before_fs(step)
        device = self._device
        widest = device.steps.widest(plan.shape, step + 1, device.faults.extra(start_fs))
        report = what_fails(widest, device.left_bytes(start_fs))
        return StepResult(
            durations=result.durations.prefix(step + 1), stopped=result.stopped, tokens=result.tokens, oom=report
        )

    def _release_twice(self, plan: StepPlan) -> None:
        """Give back a block of the oldest scheduled request behind its back: its own release will be the second."""
        scheduled = plan.scheduled(0)[0]
        self._core.pool.release([scheduled.block_table[-1]], f"an injected fault (block of {scheduled.request_id})")
        self._core.pool.release([scheduled.block_table[-1]], f"{scheduled.request_id} (its own release)")


def what_fails(peak: Peak, left_bytes: int) -> OomReport:
    """The operator of `peak` that does not fit into `left_bytes` when they are asked for in order, and what was free then."""
    # The workspace of cuBLAS was taken by the first step of all and is kept.
    kept = [op for op in peak.ops if op.name == CUBLAS]
    alive = sum(op.allocated_bytes for op in kept)
    op = peak.ops[-1]
    for op in (op for op in peak.ops if op not in kept):
        if alive + op.allocated_bytes > left_bytes:
            break
        alive += op.allocated_bytes
    return OomReport(
        op=f"{peak.phase}: {op.name}",
        requested_bytes=reserved_bytes(op.requested_bytes),
        free_bytes=max(0, left_bytes - alive),
    )
