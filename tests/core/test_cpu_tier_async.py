"""The CPU prefix tier of an engine that plans ahead: what a plan knows of copies, and whom it still plans for. A step takes a second.

What is said of time without it is in `test_cpu_tier`; here only what planning ahead changes (engine-policies §1.1.6, §1.1.8).
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.clock import FS_PER_S
from sim.core.config import EngineConfig
from sim.core.durations import Durations
from sim.core.plan import OomReport, StepResult
from sim.core.request import Outcome, RequestSpec, State
from tests.support.tiers import (
    Copies,
    assert_nobody_is_lost,
    conversations,
    copies,
    fill,
    finish,
    named,
    pass_all,
    scenario_of,
    warm,
)

SMALL = {
    "block_size": 4,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "num_cpu_prefix_blocks": 10,
    "async_scheduling": True,
}


def loading_engine(drive, **fields):
    """x and y are in the tier, and nowhere on the device; the pool has 8 blocks."""
    engine = drive(num_gpu_blocks=8, **SMALL | fields)
    warm(engine, "W", "xy")
    fill(engine, 32)
    assert (engine.pool.num_free, engine.core.num_unfinished) == (8, 0)
    return engine


def test_what_a_step_fills_is_saved_with_the_next_one(drive):
    """Step 0 computes x, y and z. Step 1 is planned while it runs, and begins when it is done: the copy reads what is there."""
    engine = drive(num_gpu_blocks=20, **SMALL)
    engine.add("A", 13, output_tokens=3, **named("xyz"))
    assert [engine.step().plan.saves for _ in range(3)] == [(), ((-1, ((1, 1), (2, 2), (3, 3))),), ()]


def test_a_load_that_ends_during_a_step_is_known_two_plans_later(drive):
    """The load of A ends during step k, whose successor was planned before: A is in step k + 2. Without planning ahead, in k + 1."""
    for ahead, starts in ((True, 2), (False, 1)):
        engine = loading_engine(drive, async_scheduling=ahead)
        engine.add("R", 2, output_tokens=9)
        engine.step()
        engine.add("A", 9, output_tokens=2, **named("xy"))
        if ahead:
            assert engine.step().plan.loads == ()  # A came during the step before: it is not known either
        plan = engine.plan(max_repeat=1)
        ((_, fence, _),) = plan.loads
        engine.now_fs += FS_PER_S // 2
        engine.core.pass_fence(fence, engine.now_fs)
        engine.commit(plan)
        steps = [engine.step().tokens for _ in range(starts)]
        assert steps[:-1] == [{"R": 1}] * (starts - 1)
        assert steps[-1] == {"R": 1, "A": 1}


def test_a_fence_passes_once(drive):
    engine = loading_engine(drive)
    engine.add("R", 2, output_tokens=9)
    engine.add("A", 9, **named("xy"))
    plan = engine.plan(max_repeat=1)
    ((_, fence, _),) = plan.loads
    engine.core.pass_fence(fence, engine.now_fs)
    with pytest.raises(KeyError, match="has passed"):
        engine.core.pass_fence(fence, engine.now_fs)


def test_when_nothing_can_be_planned_ahead_the_engine_hears_of_its_copies(drive):
    """A loads beside R's only step; the load ends in it. Nothing can be planned ahead, so the engine waits, and then knows."""
    engine = loading_engine(drive)
    engine.add("R", 2, output_tokens=1, max_tokens=1)
    engine.add("A", 9, **named("xy"))
    plan = engine.plan()
    ((_, fence, _),) = plan.loads
    engine.now_fs += FS_PER_S // 2
    engine.core.pass_fence(fence, engine.now_fs)
    engine.commit(plan)
    step = engine.step()
    assert step.tokens == {"A": 1}
    assert step.plan.shape.after_pause


def test_blocks_of_a_load_whose_client_leaves_come_back_when_the_engine_knows_and_the_copy_is_done(drive):
    """A's client leaves while the step runs in which its load began. The plan after it does not know, the next one does; A's three blocks
    (two that are written, one that was to follow) wait for the copy."""
    engine = loading_engine(drive)
    engine.add("R", 2, output_tokens=9)
    a = engine.add("A", 9, **named("xy"))
    plan = engine.plan(max_repeat=1)
    engine.now_fs += FS_PER_S // 2
    assert engine.abort("A")
    assert (a.outcome, a.state, engine.core.num_waiting) == (Outcome.ABORTED, State.LOADING, 0)
    engine.commit(plan)
    assert (engine.pool.num_quarantined, engine.pool.num_owned) == (0, 4)
    engine.step()  # planned without knowing
    assert (engine.pool.num_quarantined, engine.pool.num_owned) == (3, 1)
    pass_all(engine, plan)
    engine.step()
    engine.step()
    assert (engine.pool.num_quarantined, engine.pool.num_owned) == (0, 2)
    finish(engine)
    assert engine.pool.num_free == 8


def test_one_whose_client_left_while_it_loaded_may_be_started_in_vain(drive):
    """The load ends during step k, and A's client leaves during step k + 1: step k + 2 is planned with A."""
    engine = loading_engine(drive)
    engine.add("R", 2, output_tokens=9)
    a = engine.add("A", 9, output_tokens=4, **named("xy"))
    before = engine.core.discarded_tokens
    plan = engine.plan(max_repeat=1)
    engine.core.pass_fence(plan.loads[0][1], engine.now_fs + 1)
    engine.commit(plan)
    plan = engine.plan(max_repeat=1)
    engine.now_fs += FS_PER_S // 2
    assert engine.abort("A")
    engine.commit(plan)
    assert engine.step().tokens == {"R": 1, "A": 1}
    assert engine.step().tokens == {"R": 1}
    assert (a.outcome, a.num_output_tokens, engine.core.discarded_tokens - before) == (Outcome.ABORTED, 0, 1)
    finish(engine)
    assert (engine.pool.num_free, engine.core.num_unfinished) == (8, 0)


def test_a_load_that_was_never_told_is_not_done(drive):
    """A comes during step 0 and leaves during step 1, R's last. What is planned ahead is A's load alone; so the engine waits for step 1,
    and hears that A has gone: there is nothing to do, and nothing under way."""
    engine = loading_engine(drive)
    engine.add("R", 2, output_tokens=2, max_tokens=2)
    plan = engine.plan()
    engine.now_fs += FS_PER_S // 2
    engine.add("A", 9, **named("xy"))
    engine.commit(plan)
    plan = engine.plan()
    engine.now_fs += FS_PER_S // 2
    engine.abort("A")
    engine.commit(plan)
    assert engine.plan() is None
    offload = engine.core.offload
    assert (offload.in_flight, offload.loads.num_blocks, offload.tier.num_busy) == (False, 0, 0)
    assert (engine.pool.num_free, engine.core.num_unfinished) == (8, 0)


def test_a_step_that_runs_out_of_memory_makes_everything_known(drive):
    engine = loading_engine(drive)
    engine.add("R", 2, output_tokens=9)
    a = engine.add("A", 9, output_tokens=2, **named("xy"))
    plan = engine.plan(max_repeat=1)
    engine.core.pass_fence(plan.loads[0][1], engine.now_fs + 1)
    failed = StepResult(durations=Durations.one(FS_PER_S), oom=OomReport(op="logits", requested_bytes=2, free_bytes=1))
    engine.now_fs += FS_PER_S
    engine.core.commit(plan, failed, engine.now_fs)
    engine.core.check()
    assert a.num_computed_tokens == 8


@pytest.mark.parametrize("name", ["vllm-v1", "sglang", "trtllm-max-util", "trtllm-no-evict", "ladder"])
def test_nobody_is_lost_and_a_leap_is_its_steps(name: str) -> None:
    @settings(max_examples=40)
    @given(conversations(), st.sampled_from([12, 16, 24]), copies, st.sampled_from(["lru", "lfu"]))
    def same(requests: tuple[RequestSpec, ...], blocks: int, tier: Copies, eviction: str) -> None:
        config = EngineConfig(
            num_gpu_blocks=blocks,
            block_size=4,
            max_model_len=44,
            max_num_seqs=4,
            max_num_batched_tokens=48,
            async_scheduling=True,
        )
        assert_nobody_is_lost(scenario_of(name, config, tier, requests, eviction), tier.fails)

    same()
