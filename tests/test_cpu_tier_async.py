"""The CPU prefix tier of an engine that plans ahead: what a plan knows of copies, and whom it still plans for. A step takes a second.

What is said of time without it is in `test_cpu_tier`; here only what planning ahead changes (engine-policies §1.1.6, §1.1.8).
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.clock import FS_PER_S
from sim.core.config import EngineConfig
from sim.core.plan import Durations, OomReport, StepResult
from sim.core.policies import PRESETS
from sim.core.request import Outcome, RequestSpec, State
from sim.costs.constant import FixedCost
from sim.world import run_world

SMALL = {
    "block_size": 4,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "num_cpu_prefix_blocks": 10,
    "async_scheduling": True,
}
TICK_S = 2.0**-10


def named(names: str) -> dict[str, object]:
    """A prompt whose content is named, 4 tokens a name."""
    return {"content_ids": tuple(names), "content_block_tokens": 4}


def finish(engine) -> None:
    """Let everybody end and every copy be done."""
    while (plan := engine.plan()) is not None:
        engine.commit(plan)
        pass_all(engine, plan)


def pass_all(engine, plan) -> None:
    """The copies that a plan began are done."""
    for fence in [save[0] for save in plan.saves] + [load[1] for load in plan.loads]:
        engine.core.pass_fence(fence, engine.now_fs)
    engine.core.check()


def loading_engine(drive, **fields):
    """x and y are in the tier, and nowhere on the device; the pool has 8 blocks."""
    engine = drive(num_gpu_blocks=8, **SMALL | fields)
    engine.add("W", 9, **named("xy"))
    finish(engine)
    engine.add("filler", 32)
    finish(engine)
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


@st.composite
def conversations(draw: st.DrawFn) -> tuple[RequestSpec, ...]:
    """Turns of a few conversations, singly and in bursts; some stop by themselves, some of their clients leave."""
    ticks, made = 0, []
    for number in range(draw(st.integers(4, 18))):
        ticks += draw(st.sampled_from([0, 0, 8, 40, 90]))
        conversation, turns = draw(st.sampled_from("abcd")), draw(st.integers(1, 3))
        output_tokens = draw(st.integers(1, 15))
        patience = draw(st.sampled_from([None] * 6 + [4, 20, 64]))
        made.append(
            RequestSpec(
                request_id=f"r{number}",
                arrival_s=ticks * TICK_S,
                input_tokens=8 * turns + draw(st.integers(1, 5)),
                output_tokens=output_tokens,
                max_tokens=draw(st.sampled_from([None, output_tokens, 15])),
                priority=draw(st.integers(0, 2)),
                content_ids=tuple(f"{conversation}{turn}" for turn in range(turns)),
                content_block_tokens=8,
                cancel_after_s=None if patience is None else patience * TICK_S,
            )
        )
    return tuple(made)


@pytest.mark.parametrize("name", ["vllm-v1", "sglang", "trtllm-max-util", "trtllm-no-evict", "ladder"])
def test_leaps_are_steps_everybody_ends_and_every_block_comes_back(name: str) -> None:
    @settings(max_examples=60)
    @given(
        conversations(),
        st.sampled_from([12, 16, 24]),
        st.sampled_from([1, 6, 200]),
        st.sampled_from(["write_through", "write_back"]),
        st.sampled_from([0.0, TICK_S, 60 * TICK_S]),
        st.sampled_from([0, 2]),
        st.sampled_from(["lru", "lfu"]),
    )
    def same(requests, blocks, cpu_blocks, mode, copy_s, failing, eviction) -> None:  # type: ignore[no-untyped-def]
        config = EngineConfig(
            num_gpu_blocks=blocks, block_size=4, max_model_len=44, max_num_seqs=4, max_num_batched_tokens=48
        )
        preset = PRESETS[name](config)
        config = replace(
            preset.configure(config),
            num_cpu_prefix_blocks=cpu_blocks,
            cpu_prefix_mode=mode,
            async_scheduling=True,
        )
        logs = []
        for stepping in (False, True):
            log: list[str] = []
            record = run_world(
                config,
                FixedCost(8 * TICK_S, per_token_s=TICK_S, per_copied_block_s=copy_s),
                requests,
                policy=replace(preset.policy, eviction=eviction),
                check=True,
                stepping=stepping,
                failing_copies=lambda fence: failing > 0 and fence % failing == 0,
                decision_log=lambda entry, log=log: log.append(json.dumps(entry)),
            )
            logs.append(
                (log, [(r.outcome, r.reason, r.first_token_fs, r.ended_fs, r.token_fs) for r in record.requests])
            )
            core = record.recorders[0].core
            assert core.offload is not None
            assert not core.offload.in_flight
            assert (core.pool.num_owned, core.pool.num_quarantined, core.offload.tier.num_busy) == (0, 0, 0)
            assert all(request.outcome not in (None, Outcome.FAILED) for request in record.requests)
        assert logs[0] == logs[1]

    same()
