"""What a replica's steps needed of its device, in whole bytes, and every time that it was not there."""

from __future__ import annotations

from dataclasses import dataclass

from sim.core.batch_shape import BatchShape
from sim.core.facts import Committed
from sim.core.plan import OomReport, StepPlan, StepResult
from sim.memory.device import Device


@dataclass(slots=True)
class RowMemory:
    """The memory of one row of the timeline. Bytes of one rank."""

    workspace_bytes: int
    """Most that any of its steps needed for temporary tensors."""
    phase: str
    """The phase of that step in which it did: `prefill`, `decode`, `logits`, `sampler`, `verification`, `prompt_logprobs`."""
    headroom_bytes: int
    """Least that any of its steps left; negative: what was missing."""
    prefill_tokens: int = 0
    """Prompt tokens of that step, as it was planned: a step that fails computes none of them."""
    decode_sequences: int = 0
    """Sequences that decode in it."""
    tokens: int = 0
    """Tokens in all block tables at its end, a shared one counted for each holder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OomEvent:
    """One step that ran out of memory."""

    start_fs: int
    """When the step began."""
    step: int
    """Its number."""
    report: OomReport
    """What did not fit."""
    shape: BatchShape
    """The step, as it was planned."""
    workspace_bytes: int
    """What the step needed at its widest point."""
    used_blocks: int
    """KV blocks in use then."""


class MemoryRecord:
    """Listens, as part of a recorder, to the steps of one replica."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.peak_workspace_bytes = 0
        """Most that any step needed."""
        self.min_headroom_bytes = device.workspace_bytes
        """Least that any step left; negative: what was missing."""
        self.ooms: list[OomEvent] = []
        """Steps that ran out of memory, in order."""

    def committed(self, row: RowMemory | None, plan: StepPlan, result: StepResult, committed: Committed) -> RowMemory:
        """Account for the steps of a plan that were done. Returns the row's memory, `row` if that was begun already."""
        device, shape, durations = self.device, plan.shape, result.durations
        if device.faults:
            needs, headrooms = [], []
            for run in device.tightening(plan.start_fs, durations):
                time_fs = plan.start_fs + durations.before_fs(run[-1])
                needs.append(device.steps.need(shape, run[-1] + 1, device.faults.extra(time_fs)))
                headrooms.append(device.left_bytes(time_fs) - needs[-1].bytes)
            need, headroom = max(needs, key=lambda need: need.bytes), min(headrooms)
        else:
            need = device.steps.need(shape, result.steps)
            headroom = device.workspace_bytes - need.bytes
        if need.bytes > self.peak_workspace_bytes:
            self.peak_workspace_bytes = need.bytes
        if headroom < self.min_headroom_bytes:
            self.min_headroom_bytes = headroom
        if row is None:
            row = RowMemory(need.bytes, need.phase, headroom, shape.prefill_tokens, shape.decode_seqs)
        else:
            if need.bytes > row.workspace_bytes:
                row.workspace_bytes, row.phase = need.bytes, need.phase
                row.prefill_tokens, row.decode_sequences = shape.prefill_tokens, shape.decode_seqs
            if headroom < row.headroom_bytes:
                row.headroom_bytes = headroom
        later = max(committed.computed - 1, 0) * committed.written_per_step
        row.tokens = committed.written_tokens - committed.emptied_slots[-1] + later
        if result.oom is not None:
            self._failed(plan, result, committed)
        return row

    def _failed(self, plan: StepPlan, result: StepResult, committed: Committed) -> None:
        assert result.oom is not None
        last = result.steps - 1
        start_fs = plan.start_fs + result.durations.before_fs(last)
        need = self.device.steps.need(plan.shape, result.steps, self.device.faults.extra(start_fs))
        self.ooms.append(
            OomEvent(
                start_fs=start_fs,
                step=plan.step + last,
                report=result.oom,
                shape=plan.shape.later(last),
                workspace_bytes=need.bytes,
                used_blocks=committed.usage[-1][1],
            )
        )
