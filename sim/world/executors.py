"""Executors that need no device: one that prices plans, one that prices what another does, one that writes down what another
measured, one that plays it back.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from sim.core.durations import Durations
from sim.core.plan import Executor, OomReport, StepPlan, StepResult, Untold
from sim.costs.protocol import CostModel


@runtime_checkable
class HoldsBlocks(Protocol):
    """An executor with blocks of its own, that must hear of what no plan tells it too."""

    def close(self, untold: Untold) -> None:
        """The run is over, and this is what became of blocks and sequences after its latest plan."""
        ...


class ModelExecutor:
    """Prices plans with a cost model."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost

    def execute(self, plan: StepPlan) -> StepResult:
        """The durations of the plan's steps; a stretch is priced in closed form, but for steps in several passes, which are priced
        one by one.
        """
        shape = plan.shape
        if not shape.computes:
            return StepResult(durations=Durations.one(0))
        if shape.passes > 1:
            steps = [sum(map(self._cost.step_fs, shape.later(ahead).split())) for ahead in range(plan.repeat)]
            return StepResult(durations=Durations.measured(steps))
        if plan.repeat == 1:
            return StepResult(durations=Durations.one(self._cost.step_fs(shape)))
        return StepResult(
            durations=self._cost.decode_stretch(
                shape.decode_seqs, shape.decode_context_tokens, plan.repeat, shape.decode_max_context_tokens
            )
        )


class PricedExecutor:
    """Lets another executor do the steps, and a cost model say how long they take: real work in simulated time.

    What is decided, and so what runs together, is then the same every time, whatever else the machine is doing.
    """

    def __init__(self, inner: Executor, cost: CostModel) -> None:
        self._inner = inner
        self._prices = ModelExecutor(cost)

    def execute(self, plan: StepPlan) -> StepResult:
        """What the other executor computed, in the durations of the model."""
        result = self._inner.execute(plan)
        durations = self._prices.execute(plan).durations.prefix(result.steps)
        return StepResult(durations=durations, stopped=result.stopped, tokens=result.tokens, oom=result.oom)

    def close(self, untold: Untold) -> None:
        """Passed on."""
        if isinstance(self._inner, HoldsBlocks):
            self._inner.close(untold)


class StepRecord(NamedTuple):
    """What came of one step."""

    duration_fs: int
    oom: OomReport | None = None
    """The report if it ran out of memory."""
    workspace_share: float | None = None
    """Share of the memory left for steps that it needed, where the executor said so."""


Recording = dict[int, StepRecord]
"""By number of the step."""


class RecordingExecutor:
    """Lets another executor work, and writes down what came of each step."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.recording: Recording = {}
        """What counted: a step that was run again, because its stretch was cut, replaces what was written before."""

    def execute(self, plan: StepPlan) -> StepResult:
        """As the other executor does."""
        result = self.inner.execute(plan)
        for step in [step for step in self.recording if step >= plan.step]:
            del self.recording[step]
        for index in range(result.steps):
            durations = result.durations
            last = index == result.steps - 1
            duration_fs = durations.before_fs(index + 1) - durations.before_fs(index)
            oom, share = (result.oom, result.workspace_share) if last else (None, None)
            self.recording[plan.step + index] = StepRecord(duration_fs, oom, share)
        return result

    def close(self, untold: Untold) -> None:
        """Passed on."""
        if isinstance(self.inner, HoldsBlocks):
            self.inner.close(untold)


class ReplayExecutor:
    """Gives every step the duration, and the failure, that were recorded for it: the lock-step test's other world."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def execute(self, plan: StepPlan) -> StepResult:
        """What was recorded for the plan's steps, as far as it goes.

        Raises:
            ValueError: nothing was recorded for the first: the two worlds have parted.
        """
        records: list[StepRecord] = []
        for step in range(plan.step, plan.step + plan.repeat):
            if step not in self._recording or (records and records[-1].oom is not None):
                break
            records.append(self._recording[step])
        if not records:
            raise ValueError(f"step {plan.step} was never recorded: the replay has parted from the run")
        durations = Durations.measured([record.duration_fs for record in records])
        last = records[-1]
        return StepResult(durations=durations, workspace_share=last.workspace_share, oom=last.oom)
