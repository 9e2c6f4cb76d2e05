"""The executor of a simulation: it does nothing, and says how long that would have taken."""

from __future__ import annotations

from sim.core.plan import Durations, StepPlan, StepResult
from sim.costs.protocol import CostModel


class ModelExecutor:
    """Prices plans with a cost model."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost

    def execute(self, plan: StepPlan) -> StepResult:
        """The durations of the plan's steps; a stretch is priced in closed form."""
        shape = plan.shape
        if plan.repeat == 1:
            return StepResult(durations=Durations.one(self._cost.step_fs(shape)))
        return StepResult(
            durations=self._cost.decode_stretch(
                shape.decode_seqs, shape.decode_context_tokens, plan.repeat, shape.decode_max_context_tokens
            )
        )
