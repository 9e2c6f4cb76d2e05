"""Who runs and who gives way: by arrival or priority, a bounded number of times, and nobody starves."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.engine import EngineCore
from sim.core.preemption import worst_priority
from sim.core.request import Outcome, Request
from sim.results.summary import summarize
from tests.support.pressed_engines import Load, loads, watched
from tests.support.roomy import engine, request


@settings(max_examples=100)
@given(loads(policies=["fcfs"], planned_ahead=[False]))
def test_first_come_first_served_runs_the_oldest_in_the_system(load: Load) -> None:
    """Nobody waits who came before somebody that runs: admission never overtakes, and whoever gives way is the last that came."""
    record, watcher = watched(load)
    for seen in watcher.seen:
        in_system = [r.request_id for r in record.requests if r.arrival_fs <= seen.start_fs < r.ended_fs]
        assert seen.after == set(in_system[: len(seen.after)])


@settings(max_examples=100)
@given(loads(policies=["priority"], planned_ahead=[False]))
def test_under_priority_scheduling_whoever_gives_way_is_the_least_important_that_runs(load: Load) -> None:
    rank = {spec.request_id: (spec.priority, spec.arrival_s, i) for i, spec in enumerate(load.requests)}
    for seen in watched(load)[1].seen:
        stayed = seen.before - set(seen.preempted)
        assert all(rank[victim] > rank[other] for victim in seen.preempted for other in stayed)


@settings(max_examples=100)
@given(loads(policies=["fcfs"]))
def test_preemptions_of_a_request_are_bounded_by_the_growth_of_those_before_it(load: Load) -> None:
    """First come, first served preempts the last of the running only. Between two preemptions of a request, it or one that came before
    it must have taken a block; one that came before takes at most its whole length once, and again after each preemption of its own.
    """
    record = load.run()
    bound = 0
    for r in record.requests:
        length = math.ceil((r.spec.input_tokens + r.spec.target_tokens) / load.config.block_size)
        assert r.num_preemptions <= length + bound
        bound += length * (r.num_preemptions + 1)


@settings(max_examples=100)
@given(loads(policies=["fcfs"]))
def test_the_first_to_come_is_never_preempted(load: Load) -> None:
    record = load.run()
    served = [r for r in record.requests if r.outcome is not Outcome.REJECTED]
    if served:
        assert served[0].num_preemptions == 0


def test_preemptions_stay_few_under_heavy_pressure() -> None:
    """Two hundred requests of 24 tokens growing to 120, in a pool that holds five of them: real engines preempt a request a handful of
    times at most, and a simulator that preempts without progress shows here.
    """
    requests = [request(i, i * 0.004, 24, 96, max_tokens=96) for i in range(200)]
    load = Load(
        engine(num_gpu_blocks=40, block_size=16, max_num_batched_tokens=256, max_model_len=128), tuple(requests)
    )
    summary = summarize(load.run(), scenario={}, seed=0, version="")
    assert summary["finished"] == 200
    assert summary["num_preemptions"] > 20, "no pressure, no test"
    assert summary["max_preemptions_per_request"] <= 8
    assert summary["kv_blocks_at_end"]["owned"] == 0


def test_a_less_important_victim_is_the_same_in_whatever_order_the_running_are_listed() -> None:
    core = EngineCore(engine(scheduling_policy="priority"))
    made = [core.add(request(i, 0.0, 4, 4, priority=p), i // 2).request for i, p in enumerate([0, 2, 1, 2, 2])]

    def known(request: Request) -> int:
        return request.num_tokens

    chosen = {worst_priority(dict(enumerate(order)), known) for order in (made, made[::-1], made[2:] + made[:2])}
    assert chosen == {made[4]}


@settings(max_examples=50)
@given(loads(), st.integers(0, 3))
def test_a_pool_for_everybody_at_once_preempts_nobody(load: Load, spare: int) -> None:
    needed = sum(math.ceil((spec.input_tokens + spec.output_tokens) / load.config.block_size) for spec in load.requests)
    needed *= len(load.config.groups)
    enough = Load(replace(load.config, num_gpu_blocks=needed + spare), load.requests)
    assert all(r.num_preemptions == 0 for r in enough.run().requests)
