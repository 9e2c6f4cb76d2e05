"""A device whose plans somebody tampers with, to see that it finds out."""

from __future__ import annotations

from collections.abc import Callable

from sim.core.plan import Executor, StepPlan, StepResult, Untold


class Tampered:
    """An executor that is given changed plans."""

    def __init__(self, inner: Executor, change: Callable[[StepPlan], StepPlan]) -> None:
        self.inner, self.change = inner, change

    def execute(self, plan: StepPlan) -> StepResult:
        return self.inner.execute(self.change(plan))

    def close(self, untold: Untold) -> None:
        self.inner.close(untold)


def tampering(change: Callable[[StepPlan], StepPlan]) -> Callable[[Executor], Tampered]:
    """For `run_for_real(wrap=…)`."""
    return lambda inner: Tampered(inner, change)
