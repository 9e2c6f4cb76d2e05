"""A full queue, and a more important arrival: the least important of those who wait makes room, and is told when to come back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sim
from sim.catalog.vllm_args import parse_vllm_args
from sim.core.admission import AdmissionBase, CanEverFit, Every, FreeBlocks, Rejection
from sim.core.config import ConfigError, EngineConfig
from sim.core.policies import MaxInFlight
from sim.core.policy import Policy
from sim.core.request import Outcome, RequestSpec
from sim.core.waiting import priority_queue
from sim.costs.constant import FixedCost
from sim.world import run_world


def at_most(limit, *others):
    return Policy(
        admission=lambda config: Every([CanEverFit(config), MaxInFlight(limit, displace=True), *others, FreeBlocks()]),
        queue=priority_queue,
    )


def full(drive, *others, **settings):
    """One runs, three wait, with priorities 5, 5 and 3; nobody else may enter."""
    engine = drive(num_gpu_blocks=100, block_size=4, max_num_seqs=1, policy=at_most(4, *others), **settings)
    running = engine.add("running", 4, output_tokens=50, priority=9)
    engine.step()
    return engine, running, [engine.add(name, 4, priority=p) for name, p in (("a5", 5), ("b5", 5), ("c3", 3))]


def test_of_the_least_important_that_wait_the_latest_makes_room(drive):
    engine, running, (a5, b5, c3) = full(drive)
    new = engine.add("new", 4, priority=2)
    assert b5.outcome is Outcome.REJECTED
    assert b5.finish_reason == "displaced"
    assert b5.reason.startswith(
        "a request of priority 2 took its place, it has 5; the server is busy: 4 requests are in it"
    )
    assert b5.retry_after_s > 0
    assert [request.outcome for request in (running, a5, c3, new)] == [None] * 4
    assert engine.core.num_unfinished == 4
    engine.step()
    assert engine.log[-1]["rejected"] == [("b5", b5.reason)]


def test_what_runs_is_never_displaced_and_equals_do_not_displace_each_other(drive):
    """ "running" is the least important of all, and "new" no more important than c3: a5 and b5 go, then nobody."""
    engine, running, (a5, b5, c3) = full(drive)
    made = [engine.add(f"new {index}", 4, priority=3) for index in range(3)]
    assert [request.outcome for request in (b5, a5)] == [Outcome.REJECTED] * 2
    assert [request.finish_reason for request in made] == ["", "", "queue_full"]
    assert (running.outcome, c3.outcome) == (None, None)


def test_who_was_displaced_is_let_in_when_it_was_told_to_come_back(drive):
    engine, _running, (_a5, b5, _c3) = full(drive)
    engine.add("new", 4, priority=2)
    engine.run()
    engine.now_fs = max(engine.now_fs, round(b5.retry_after_s * 1e15))
    assert engine.add("b5", 4, priority=5).outcome is None


class NoTens(AdmissionBase):
    """Turns away whoever is of priority -10."""

    def arrive(self, spec, view):
        return Rejection(code="ten", http_status=400, reason="10") if spec.priority == -10 else None


def test_when_another_policy_turns_the_arrival_away_nobody_goes_for_it(drive):
    engine, _running, waiting = full(drive, NoTens())
    assert engine.add("ten", 4, priority=-10).finish_reason == "ten"
    assert [request.outcome for request in waiting] == [None] * 3
    assert engine.add("new", 4, priority=2).outcome is None
    assert waiting[1].finish_reason == "displaced"  # it kept its place in the order


@st.composite
def loads(draw):
    arrival, made = 0, []
    for number in range(draw(st.integers(4, 14))):
        arrival += draw(st.sampled_from([0, 0, 0, 4, 16, 40]))
        made.append(
            RequestSpec(
                request_id=f"r{number}",
                arrival_s=arrival / 1024,
                input_tokens=draw(st.integers(1, 30)),
                output_tokens=draw(st.integers(1, 20)),
                priority=draw(st.integers(0, 3)),
                cancel_after_s=draw(st.sampled_from([None, None, 24 / 1024])),
            )
        )
    return tuple(made)


@settings(max_examples=150)
@given(loads(), st.integers(1, 5), st.integers(1, 3), st.booleans())
def test_leaping_and_stepping_displace_the_same_and_never_the_more_important(requests, limit, seqs, ahead):
    config = EngineConfig(
        num_gpu_blocks=30,
        block_size=4,
        max_model_len=64,
        max_num_seqs=seqs,
        max_num_batched_tokens=32,
        async_scheduling=ahead,
    )
    logs = []
    for stepping in (False, True):
        log = []
        record = run_world(
            config,
            FixedCost(8 / 1024),
            requests,
            policy=at_most(limit),
            stepping=stepping,
            check=True,
            decision_log=lambda entry, log=log: log.append(json.dumps(entry)),
        )
        logs.append((log, [(r.request_id, r.outcome, r.reason, r.ended_fs, r.retry_after_s) for r in record.requests]))
    assert logs[0] == logs[1]
    for request in record.requests:
        if request.finish_reason == "displaced":
            words = request.reason.split()
            assert int(words[4]) < request.spec.priority
            assert request.scheduled_fs is None


def test_a_scenario_sets_the_limits_of_the_front_door():
    scenario = sim.Scenario(
        model="llama-3.1-8b",
        gpu="h100-sxm-80gb",
        workload={
            "workload": "uniform",
            "input_tokens": 500,
            "output_tokens": 100,
            "num_requests": 80,
            "rate": 200.0,
            "priorities": {0: 0.3, 1: 0.7},
        },
        engine={"max_num_seqs": 8, "max_num_batched_tokens": 2048},
        policy={"scheduling_policy": "priority", "max_num_queued_reqs": 20, "displace_queued": True},
    )
    result = sim.simulate(scenario, check=True)
    assert set(result.summary["rejected_by_reason"]) == {"displaced", "queue_full"}
    table = result.requests
    displaced = table[table.finish_reason == "displaced"]
    assert set(displaced.priority) == {1}
    assert (displaced.retry_after_s > 0).all()
    with pytest.raises(ConfigError, match="displace_queued .* set max_num_queued_reqs"):
        sim.simulate(scenario.with_(max_num_queued_reqs=None))


def test_vllms_flags_for_it_are_understood():
    parsed = parse_vllm_args("--max-num-queued-reqs 20 --max-num-queued-tokens 8k")
    assert parsed.settings == {"max_num_queued_reqs": 20, "max_num_queued_tokens": 8000}
