"""Whatever the engine, the load and the pressure: every request ends, for a reason, and every block comes back."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.clock import to_fs
from sim.core.config import AttentionGroup, EngineConfig
from sim.core.durations import Durations
from sim.core.engine import EngineCore
from sim.core.plan import OomReport, StepPlan, StepResult
from sim.core.policy import Policy
from sim.core.request import Outcome, RequestSpec
from sim.core.rungs import LadderConfig, Rung
from sim.world import run_world
from sim.world.executors import ModelExecutor
from tests.support.pressed_engines import STEP, Load, loads
from tests.support.roomy import TICK_S, engine, request

# -- every request ends, for a reason; every block comes back ----------------------------------------------------------


def can_never_be_served(spec: RequestSpec, config: EngineConfig) -> bool:
    """From the request and the engine alone: what is asked for is longer than the context or does not fit in the whole pool."""
    asked = spec.input_tokens + (spec.max_tokens or 1)
    if asked > config.max_model_len:
        return True
    needed = 0
    for group in config.kv_groups or (AttentionGroup(block_size=config.block_size, window=config.sliding_window),):
        blocks = math.ceil((asked - 1) / group.block_size)
        if group.window is not None:
            seen = min(group.window - 1 + config.max_num_batched_tokens, config.max_model_len)
            blocks = min(blocks, math.ceil(seen / group.block_size) + 1)
        needed += blocks
    return needed > config.num_gpu_blocks


@settings(max_examples=150)
@given(loads(), st.booleans())
def test_every_request_ends_with_an_outcome_and_a_reason_and_every_block_is_back(load: Load, stepping: bool) -> None:
    record = load.run(stepping=stepping)
    pool = record.recorders[0].core.pool
    assert (pool.num_free, pool.num_owned, pool.num_quarantined) == (load.config.num_gpu_blocks, 0, 0)
    assert [r.spec for r in record.requests] == list(load.requests)
    for r in record.requests:
        assert r.outcome is not None
        assert r.ended_fs is not None
        assert r.ended_fs >= r.arrival_fs == to_fs(r.spec.arrival_s)
        assert r.reason
        assert (r.outcome is Outcome.REJECTED) == can_never_be_served(r.spec, load.config)
        room = load.config.max_model_len - r.spec.input_tokens
        if r.outcome is Outcome.FINISHED:
            assert r.num_output_tokens == min(r.spec.target_tokens, room)
        elif r.outcome is Outcome.REJECTED:
            assert r.ended_fs == r.arrival_fs
            assert r.num_output_tokens == 0
        else:
            assert 0 <= r.num_output_tokens < min(r.spec.target_tokens, room)
        if r.outcome is Outcome.ABORTED:
            assert r.spec.cancel_after_s is not None
            assert r.ended_fs == r.arrival_fs + to_fs(r.spec.cancel_after_s)
        if r.outcome is Outcome.TIMED_OUT:
            assert r.spec.timeout_s is not None
            assert r.ended_fs == r.arrival_fs + to_fs(r.spec.timeout_s)
        if r.outcome is Outcome.FAILED:  # only for want of a cap could it enter and outgrow the pool
            assert r.spec.max_tokens is None
            assert str(load.config.num_gpu_blocks) in r.reason


def test_a_rejection_says_what_was_asked_and_what_there_is() -> None:
    config = engine(num_gpu_blocks=10, block_size=16, max_model_len=4096)
    specs = [
        request("no room", 0.0, 161, 1, max_tokens=1),
        request("fits exactly", 0.0, 160, 1, max_tokens=1),
        request("no room for the answer", 0.0, 100, 62, max_tokens=62),
        request("fits with the answer", 0.0, 100, 61, max_tokens=61),
        request("too long", 0.0, 4000, 97, max_tokens=97),
    ]
    record = run_world(config, STEP, specs, check=True)
    outcomes = {r.request_id: (r.outcome, r.finish_reason) for r in record.requests}
    assert outcomes == {
        "no room": (Outcome.REJECTED, "exceeds_kv_pool"),
        "fits exactly": (Outcome.FINISHED, "length"),
        "no room for the answer": (Outcome.REJECTED, "exceeds_kv_pool"),
        "fits with the answer": (Outcome.FINISHED, "length"),
        "too long": (Outcome.REJECTED, "exceeds_max_model_len"),
    }
    no_room, _, _, _, too_long = record.requests
    for number in ("161", "11", "10", "16"):
        assert number in no_room.reason
    for number in ("4000", "97", "4097", "4096"):
        assert number in too_long.reason


def test_a_request_that_outgrows_the_whole_pool_fails_alone_and_in_words() -> None:
    """Nobody knew how long it would get. Its end frees its blocks for the other, which finishes."""
    specs = [request("grows", 0.0, 30, 1000), request("other", 0.0, 30, 10)]
    record = run_world(engine(num_gpu_blocks=4), STEP, specs, check=True)
    grows, other = record.requests
    assert grows.outcome is Outcome.FAILED
    assert grows.num_output_tokens == 4 * 16 + 1 - 30  # the 65th token would need a fifth block
    assert "65 tokens" in grows.reason
    assert "5 KV blocks of a pool of 4" in grows.reason
    assert (other.outcome, other.num_output_tokens) == (Outcome.FINISHED, 10)


def test_a_client_that_leaves_at_time_zero_leaves_at_time_zero() -> None:
    """Its step is under way then, and ends later; zero is a time like any other."""
    core = EngineCore(engine())
    core.add(request("a", 0.0, 10, 5), 0)
    plan = core.plan(0)
    assert plan is not None
    assert core.abort("a", 0)
    core.commit(plan, StepResult(durations=Durations.one(1000)), 1000)
    (ended,) = core.take_ended()
    assert (ended.outcome, ended.ended_fs) == (Outcome.ABORTED, 0)


class FirstStepRunsOutOfMemory:
    """An executor that fails once, at once."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core

    def execute(self, plan: StepPlan) -> StepResult:
        oom = None if plan.step else OomReport(op="activations", requested_bytes=2, free_bytes=1)
        return StepResult(durations=ModelExecutor(STEP).execute(plan).durations, oom=oom)


@pytest.mark.parametrize("chunked", [True, False], ids=["in chunks", "whole"])
def test_a_step_that_ran_out_of_memory_keeps_nobody_out_for_ever(chunked: bool) -> None:
    """The first request is over, or gone, when the second comes, whose prompt is longer than half of the step that failed."""
    config = engine(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, enable_chunked_prefill=chunked)
    specs = [request("first", 0.0, 10, 1, cancel_after_s=0.5 * TICK_S), request("second", 10 * TICK_S, 10, 3)]
    record = run_world(config, STEP, specs, check=True, executor=FirstStepRunsOutOfMemory)
    assert record.recorders[0].core.oom_events == 1
    assert [r.outcome for r in record.requests] == [Outcome.ABORTED, Outcome.FINISHED]


def test_a_step_shrunk_by_the_ladder_keeps_out_no_prompt_that_cannot_be_cut() -> None:
    """Without chunked prefill a prompt of 100 tokens does not fit in half of a step of 128; when nothing runs, it starts all the same."""
    config = engine(max_model_len=128, max_num_seqs=1, max_num_batched_tokens=128, enable_chunked_prefill=False)
    shrink = Rung(action="shrink_step", signal="queue_s", on=4 * TICK_S, off=TICK_S, value=0.5)
    specs = [request("first", 0.0, 10, 9, priority=1), request("long", TICK_S, 100, 2, priority=1)]
    policy = Policy(ladder=LadderConfig(rungs=(shrink,)))
    record = run_world(config, STEP, specs, check=True, policy=policy)
    assert [(r.outcome, r.degraded) for r in record.requests] == [
        (Outcome.FINISHED, []),
        (Outcome.FINISHED, []),
    ]


# -- the decision log --------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(loads(), st.sampled_from([2, 3]), st.sampled_from(["round-robin", "least-requests", "least-kv"]))
def test_several_replicas_lose_nothing_either(load: Load, replicas: int, router: str) -> None:
    record = load.run(replicas=replicas, router=router)
    assert [r.spec for r in record.requests] == list(load.requests)
    assert set(record.replica_of) == {spec.request_id for spec in load.requests}
    for recorder in record.recorders:
        pool = recorder.core.pool
        assert (pool.num_free, pool.num_owned) == (load.config.num_gpu_blocks, 0)


@settings(max_examples=50)
@given(loads(), st.integers(1, 4))
def test_a_closed_loop_never_has_more_requests_outstanding_than_clients(load: Load, clients: int) -> None:
    record = load.run(max_concurrency=clients)
    edges = sorted(
        [(r.arrival_fs, 1) for r in record.requests if r.ended_fs != r.arrival_fs]
        + [(r.ended_fs, -1) for r in record.requests if r.ended_fs != r.arrival_fs]
    )
    outstanding = 0
    for _, change in edges:
        outstanding += change
        assert outstanding <= clients
