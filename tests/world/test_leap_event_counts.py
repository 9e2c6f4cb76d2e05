"""Leaping really leaps: how many events a run takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sim.core.plan import StepPlan, StepResult
from sim.core.request import RequestSpec
from sim.costs.constant import FixedCost
from sim.costs.protocol import CostModel
from sim.world.executors import ModelExecutor
from tests.support.leaping import Scenario, at, by_hand
from tests.support.roomy import TICK_S


@dataclass
class Counted:
    """An executor that counts its calls and the steps they stood for."""

    cost: CostModel
    calls: Counter[str]

    def execute(self, plan: StepPlan) -> StepResult:
        self.calls["plans"] += 1
        return ModelExecutor(self.cost).execute(plan)


def plans_executed(scenario: Scenario, *, stepping: bool) -> tuple[int, int]:
    """Executor calls, which are SimPy events of the replica, and engine steps."""
    calls: Counter[str] = Counter()
    record = scenario.run(stepping=stepping, executor=lambda core: Counted(scenario.cost, calls))
    return calls["plans"], sum(recorder.core.steps for recorder in record.recorders)


def test_a_thousand_decode_steps_are_one_event() -> None:
    """One for the prompt and one for the other thousand tokens, though two hundred and fifty blocks are taken on the way."""
    scenario = by_hand(at(0, "alone", 4, 1001), num_gpu_blocks=300)
    assert plans_executed(scenario, stepping=False) == (2, 1001)
    assert plans_executed(scenario, stepping=True) == (1001, 1001)


def test_a_stretch_with_a_growing_step_time_is_still_one_event() -> None:
    growing = FixedCost(8 * TICK_S, per_context_token_s=TICK_S)
    scenario = by_hand(at(0, "alone", 4, 1001), num_gpu_blocks=300, cost=growing)
    assert plans_executed(scenario, stepping=False) == (2, 1001)


def test_arrivals_that_only_join_a_queue_cut_nothing() -> None:
    queued = [at(10 + i, f"queued-{i}", 4, 1) for i in range(50)]
    scenario = by_hand(at(0, "running", 4, 501), *queued, max_num_seqs=1, num_gpu_blocks=300)
    plans, steps = plans_executed(scenario, stepping=False)
    assert steps == 501 + 50
    assert plans == 2 + 50


def test_arrivals_behind_a_head_that_does_not_fit_cut_nothing() -> None:
    """The head cuts the stretch when it arrives; those behind it cannot change the decision and do not."""
    queued = [at(10 + i, f"queued-{i}", 4, 1) for i in range(50)]
    scenario = by_hand(at(0, "running", 4, 401), at(9, "head", 800, 1), *queued, num_gpu_blocks=201, max_num_seqs=100)
    plans, steps = plans_executed(scenario, stepping=False)
    assert steps == 401 + 2  # the head with the one that fits beside it, and then everybody else
    assert plans == 1 + 2 + 2


def batch(sizes: Sequence[tuple[int, int]]) -> list[RequestSpec]:
    return [at(0, f"r{i}", input_tokens, output_tokens) for i, (input_tokens, output_tokens) in enumerate(sizes)]


def test_a_batch_takes_one_event_a_completion() -> None:
    scenario = by_hand(*batch([(4, 100), (4, 200), (4, 300), (4, 400)]), num_gpu_blocks=1000)
    assert plans_executed(scenario, stepping=False) == (1 + 4, 400)
