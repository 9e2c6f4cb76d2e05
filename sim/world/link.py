"""The link between a device and the CPU memory beside it, as SimPy events: copies of prefix blocks take time on it.

Each direction does one copy at a time, in the order in which plans began them, beside the steps. The cost model says how long.
"""

from __future__ import annotations

from collections.abc import Callable

import simpy

from sim.core.plan import StepPlan
from sim.costs.protocol import CostModel


class Link:
    """One replica's link. `on_end(fence, done)` is called when a copy has ended; copies with a fence in `failing` fail."""

    def __init__(
        self,
        env: simpy.Environment,
        cost: CostModel,
        on_end: Callable[[int, bool], None],
        failing: Callable[[int], bool] = lambda fence: False,
    ) -> None:
        self._env, self._cost, self._on_end, self._failing = env, cost, on_end, failing
        self._free_at_fs = {"out": 0, "in": 0}

    def begin(self, plan: StepPlan) -> None:
        """Begin the copies of a plan; it starts now."""
        for fence, pairs in plan.saves:
            self._copy("out", fence, len(pairs))
        for _, fence, pairs in plan.loads:
            self._copy("in", fence, len(pairs))

    def _copy(self, direction: str, fence: int, num_blocks: int) -> None:
        now_fs = int(self._env.now)
        end_fs = max(now_fs, self._free_at_fs[direction]) + self._cost.copy_fs(num_blocks)
        self._free_at_fs[direction] = end_fs
        ended = self._env.timeout(end_fs - now_fs)
        ended.callbacks.append(lambda event: self._on_end(fence, not self._failing(fence)))
