"""Requests that go on on the CPU: the same tokens, on a real model, and the same decisions in both worlds, whatever layers keep."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from experiments.validation import SCENARIOS, reference_answers, replay, run_for_real
from experiments.validation.scenarios import SmallScenario
from experiments.validation.worlds import changed_answers, first_difference, preset
from gpu.cpu_moves import CpuMoves
from gpu.executor import TorchExecutor
from gpu.pool import PoisonedReadError
from sim.core.plan import StepPlan, StepResult
from tests.support.scenarios import with_engine
from tests.support.steady_timer import SteadyTimer

RUNG = {"action": "run_on_cpu", "signal": "kv_usage", "on": 0.6, "off": 0.4, "hold_s": 0.0, "value": 0.4}
FULL = ["pressure-0", "pressure-1", "leavers-0", "leavers-1", "conversations-1"]
WINDOWS = ["window-0", "window-1", "hybrid-0", "hybrid-swaps-0"]


def paced(inner):
    """The device, whose steps are said to last as `SteadyTimer` says."""
    inner._timer = SteadyTimer()
    return inner


def to_be_moved(name: str, *, ahead: bool, num_cpu_blocks: int = 400) -> SmallScenario:
    """All may be moved; the model ends them before they expect it."""
    scenario = with_engine(SCENARIOS[name], num_cpu_blocks=num_cpu_blocks, async_scheduling=ahead)
    return replace(
        scenario,
        requests=tuple(replace(spec, priority=1, max_tokens=spec.output_tokens + 2) for spec in scenario.requests),
    )


@pytest.mark.parametrize(
    ("name", "ahead", "token_s"),
    [
        *((name, True, token_s) for name in FULL for token_s in (0.002, 0.02)),
        *((name, True, 0.002) for name in WINDOWS),
        *((name, False, 0.02) for name in ("window-1", "hybrid-1")),
    ],
)
def test_they_get_the_tokens_that_they_get_on_the_device(name, ahead, token_s):
    scenario = to_be_moved(name, ahead=ahead)
    ladder = preset("ladder", [RUNG], cpu_token_s=token_s)
    run = run_for_real(scenario, ladder, wrap=paced)
    assert any("run_on_cpu" in request.degraded for request in run.requests)
    assert run.report["moved_to_cpu"] > 0
    assert run.leaked_blocks == 0
    assert changed_answers(run, reference_answers(scenario)) == []
    assert first_difference(run.decisions, replay(scenario, ladder, run.recording)) is None


class Counting:
    """The device, and whether the CPU beside it holds as many blocks of each request as the core counts there."""

    def __init__(self, inner: TorchExecutor, scenario: SmallScenario) -> None:
        self.inner, self.engine = paced(inner), scenario.engine
        self.came, self.went = 0, 0

    def execute(self, plan: StepPlan) -> StepResult:
        result = self.inner.execute(plan)
        lane = self.inner.moves.cpu._lane
        gone = {move.request_id for move in plan.from_cpu}
        for move in plan.to_cpu:
            if move.request_id not in gone:
                counted = self.engine.blocks_at(move.computed_tokens, move.most_tokens)
                assert lane._guests[move.request_id].pool.num_blocks == counted
        assert not gone & set(lane.guests)
        self.came += len(plan.to_cpu)
        self.went += len(gone)
        return result

    def close(self, releases: object) -> None:
        self.inner.close(releases)


@pytest.mark.parametrize("name", ["pressure-0", "window-1", "hybrid-1"])
def test_the_cpu_holds_the_blocks_that_the_core_counts_there(name):
    scenario, made = to_be_moved(name, ahead=False), []

    def counting(inner):
        made.append(Counting(inner, scenario))
        return made[0]

    run_for_real(scenario, preset("ladder", [RUNG], cpu_token_s=0.004), wrap=counting)
    assert min(made[0].came, made[0].went) > 3


@pytest.fixture
def unreliable():
    """A device on which three calls of attention in a hundred have no memory."""
    draw = random.Random(0)

    def sometimes(works):
        def call(given):
            if draw.random() < 0.03:
                raise torch.OutOfMemoryError("Tried to allocate 2.00 MiB")
            return works(given)

        return call

    def faulty(inner):
        ops = paced(inner).model.ops
        ops.prefill_attention, ops.decode_attention = sometimes(ops.prefill_attention), sometimes(ops.decode_attention)
        return inner

    return faulty


@pytest.mark.parametrize("name", ["pressure-1", "window-2", "hybrid-2"])
def test_steps_without_memory_change_no_answer_of_those_who_come_and_go(name, unreliable):
    """Who comes back in a step that fails, and then gives way, has blocks to give back that it never used."""
    scenario, failures = to_be_moved(name, ahead=False), 0
    reference = reference_answers(scenario)
    for _ in range(4):
        run = run_for_real(scenario, preset("ladder", [RUNG], cpu_token_s=0.01), wrap=unreliable)
        failures += run.report["oom_steps"]
        assert changed_answers(run, reference) == []
        assert run.leaked_blocks == 0
    assert failures > 4


def test_a_device_that_brings_back_the_wrong_tokens_is_found_out(monkeypatch):
    """The comparison is not blind: with the last two blocks of each table in each other's place, one is read that is not full."""
    brings = CpuMoves.from_cpu

    def mixed_up(self, move):
        turned = tuple((*table[:-2], *reversed(table[-2:])) for table in move.group_tables)
        brings(self, replace(move, group_tables=turned))

    monkeypatch.setattr(CpuMoves, "from_cpu", mixed_up)
    with pytest.raises(PoisonedReadError):
        run_for_real(to_be_moved("hybrid-1", ahead=False), preset("ladder", [RUNG], cpu_token_s=0.02), wrap=paced)
