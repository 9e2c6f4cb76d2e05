"""The CPU executor beside an engine that plans ahead: it serves beside the steps, but whom it has let go the next plan does not know yet.

Twenty blocks of four, a second a step; a rung that keeps 6 blocks at most on the device (`run_on_cpu`, engine-policies §1.1.6).
"""

from __future__ import annotations

import pytest

from sim.core.clock import FS_PER_S
from sim.core.cpu_server import CpuExecutor
from sim.core.plan import StepPlan
from sim.core.request import Outcome, State
from sim.core.rungs import Rung
from tests.support.laddered_engine import LadderedEngine

RUNG = Rung(action="run_on_cpu", on=0.5, off=0.0, hold_s=0.0, value=0.3)


def engine_with(token_s: float, *rungs: Rung, slots: int = 8, ahead: bool = True) -> LadderedEngine:
    cpu = CpuExecutor(token_s=token_s, max_num_seqs=slots)
    return LadderedEngine(*(rungs or (RUNG,)), cpu=cpu, num_cpu_blocks=40, async_scheduling=ahead)


def room_taken(engine: LadderedEngine) -> int:
    return engine.core._scheduler.swapping.cpu_pool.num_owned


def moved(plan: StepPlan) -> list[str]:
    """Who goes on on the CPU."""
    return [move.request_id for move in plan.to_cpu]


@pytest.mark.parametrize(("ahead", "moved_in"), [(True, 5), (False, 4)])
def test_the_slot_of_who_finished_on_the_cpu_is_free_for_the_plan_after_next(ahead, moved_in):
    """ "first" has its tokens of 2.5 and 4 s on the CPU, and with them all. The step that ends at 4 s is under way then, and the next is
    planned: "second" is moved, into the one slot, with the one from 5 s on. Without planning ahead, with that from 4 s on."""
    engine = engine_with(1.5, slots=1, ahead=ahead)
    engine.add("high", 30, 20, priority=0)
    second, first = engine.add("second", 9, 12, priority=2), engine.add("first", 9, 3, priority=3)
    plans = [engine.step().plan for _ in range(6)]
    assert [moved(plan) for plan in plans[:2]] == [[], ["first"]]
    assert (first.outcome, first.num_output_tokens, first.ended_fs) == (Outcome.FINISHED, 3, 4 * FS_PER_S)
    assert [moved(plan) for plan in plans].index(["second"]) == moved_in
    engine.run()
    assert second.outcome is Outcome.FINISHED
    assert (engine.core.num_unfinished, room_taken(engine), engine.pool.num_owned) == (0, 0, 0)


def test_a_client_that_leaves_the_cpu_has_the_tokens_until_then_and_its_room_comes_back_later():
    """It leaves at 3.2 s with the tokens of 1 (the device's), 2 and 3 s. The step from 3 to 4 s is under way, and the next planned."""
    engine = engine_with(1.0)
    engine.add("high", 30, 20, priority=0)
    gone = engine.add("gone", 9, 9, priority=3)
    for _ in range(3):
        engine.step()
    plan = engine.plan(max_repeat=1)
    room = room_taken(engine)
    engine.now_fs += FS_PER_S // 5
    engine.abort("gone")
    assert (gone.outcome, gone.num_output_tokens, gone.ended_fs) == (Outcome.ABORTED, 3, 16 * FS_PER_S // 5)
    engine.commit(plan)
    assert room_taken(engine) == room > 0
    engine.step()
    assert room_taken(engine) == 0
    assert engine.core.cpu_tokens == 2
    engine.run()
    assert engine.core.num_unfinished == 0


def test_one_that_the_model_has_just_ended_may_be_moved_in_vain():
    """ "ends" stops by itself with its first token, at the end of step 0. What is planned meanwhile, the rung's move included, does not
    know it. Nothing is produced for it, and its room on the CPU is free for the plan after that."""
    engine = engine_with(1.0)
    engine.add("high", 30, 20, priority=0)
    ends = engine.add("ends", 9, 1, priority=3, max_tokens=12)
    engine.step()
    assert ends.outcome is Outcome.FINISHED
    plan = engine.plan(max_repeat=1)
    assert moved(plan) == ["ends"]
    assert (ends.state, ends.degraded, room_taken(engine)) == (State.ENDED, [], 0)
    engine.commit(plan)
    engine.run()
    assert engine.core.cpu_tokens == 0


def test_one_that_the_model_was_sure_to_end_is_not_moved():
    engine = engine_with(1.0)
    engine.add("high", 30, 20, priority=0)
    engine.add("ends", 9, 1, priority=3)
    assert [moved(engine.step().plan) for _ in range(3)] == [[], [], []]


def test_whom_a_rung_keeps_on_the_cpu_comes_back_to_a_device_that_has_nothing_else_to_do():
    """The rung goes on at 1 s and holds 3.5 s. "high" ends in the step to 5 s, and nothing can be planned ahead of it: as of 4 s the
    rung would hold, but the engine waits, looks again at 5 s, and "low" comes back."""
    rung = Rung(action="run_on_cpu", on=0.5, off=0.3, hold_s=3.5, value=0.45)
    engine = engine_with(2.0, rung)
    high = engine.add("high", 30, 5, priority=0, max_tokens=5)
    low = engine.add("low", 13, 10, priority=2)
    for _ in range(5):
        engine.step()
    assert (high.outcome, low.state, engine.now_fs) == (Outcome.FINISHED, State.ON_CPU, 5 * FS_PER_S)
    step = engine.step()
    assert step.tokens == {"low": 1}
    assert step.plan.shape.after_pause
    engine.run()
    assert (low.outcome, low.num_output_tokens) == (Outcome.FINISHED, 10)
