"""How the engine refuses to be misused: ids, plans and results that are not its own."""

from __future__ import annotations

import pytest

from sim.core.blocks import IntegrityError
from sim.core.clock import FS_PER_S
from sim.core.durations import Durations
from sim.core.plan import StepResult
from sim.core.request import Outcome

SETTINGS = {"num_gpu_blocks": 16, "block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 2}


# -- misuse ------------------------------------------------------------------------------------------------------------


def test_a_request_id_in_the_system_is_refused_and_one_that_ended_is_free(drive):
    engine = drive(**SETTINGS)
    engine.add("A", 4, output_tokens=3)
    with pytest.raises(ValueError, match="request id 'A' is already in the system"):
        engine.add("A", 8)
    plan = engine.plan()
    engine.abort("A")
    with pytest.raises(ValueError, match="request id 'A' is already in the system"):
        engine.add("A", 8)  # its step is still out
    engine.commit(plan)
    engine.add("A", 5)
    assert engine.step().tokens == {"A": 5}  # and finds nothing of its namesake
    assert [ended.outcome for ended in engine.ended] == [Outcome.ABORTED, Outcome.FINISHED]


def test_a_second_plan_is_refused_while_one_is_out(drive):
    engine = drive(**SETTINGS)
    engine.add("A", 4, output_tokens=3)
    plan = engine.plan()
    with pytest.raises(RuntimeError, match="step 0 is under way; commit it before planning the next"):
        engine.plan()
    engine.commit(plan)
    assert engine.plan().step == 1


def result_of(steps):
    return StepResult(durations=Durations.affine(steps, FS_PER_S, 0) if steps else Durations(()))


def test_a_plan_of_somebody_else_is_refused(drive):
    engine, elsewhere = drive(**SETTINGS), drive(**SETTINGS)
    for one in (engine, elsewhere):
        one.add("A", 4, output_tokens=3)
    plan, foreign = engine.plan(), elsewhere.plan()
    with pytest.raises(ValueError, match="the plan of step 0 is not the one under way"):
        engine.core.commit(foreign, result_of(1), FS_PER_S)
    engine.commit(plan)
    with pytest.raises(ValueError, match="the plan of step 0 is not the one under way"):
        engine.core.commit(plan, result_of(1), FS_PER_S)
    assert engine.core.steps == 1


@pytest.mark.parametrize("steps", [0, 3])
def test_a_result_of_no_steps_or_of_too_many_is_refused(drive, steps):
    engine = drive(**SETTINGS)
    engine.add("A", 4, output_tokens=3)
    engine.step()
    plan = engine.plan()
    assert plan.repeat == 2
    with pytest.raises(ValueError, match=f"a result of {steps} steps for a plan of 2"):
        engine.core.commit(plan, result_of(steps), engine.now_fs)
    engine.commit(plan)  # refused means unchanged
    assert engine.ended[0].num_output_tokens == 3


def test_tables_of_a_committed_plan_are_refused(drive):
    """They may be gone, and while another plan is out they would be another step's."""
    engine = drive(**SETTINGS)
    engine.add("A", 4, output_tokens=5)
    old = engine.plan()
    engine.commit(old)
    with pytest.raises(RuntimeError, match="committed"):
        old.scheduled(0)
    engine.plan()
    with pytest.raises(RuntimeError, match="committed"):
        old.scheduled(0)


@pytest.mark.parametrize("ahead", [-1, 4, 30])
def test_steps_that_a_plan_does_not_have_are_refused(drive, ahead):
    """`scheduled(i)` answers for i in [0, repeat)."""
    engine = drive(**SETTINGS)
    engine.add("A", 4, output_tokens=5)
    engine.step()
    plan = engine.plan()
    assert plan.repeat == 4
    with pytest.raises((IndexError, ValueError), match=f"{ahead}.*4"):
        plan.scheduled(ahead)


# -- the pool's own alarms ---------------------------------------------------------------------------------------------


def test_the_engine_notices_a_table_that_does_not_fit_its_tokens(drive):
    """5 tokens need 2 blocks (I4)."""
    engine = drive(**SETTINGS)
    request = engine.add("A", 5, output_tokens=9)
    engine.step()
    engine.core.tables.truncate(request.table, 4, "a bug")
    with pytest.raises(IntegrityError, match="A has 1 blocks for 5 tokens, which need 2"):
        engine.core.check()
