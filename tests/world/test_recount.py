"""What the simulator says of random runs is what a second, naive accounting finds, token by token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings

from sim.core.clock import FS_PER_S
from sim.core.request import Outcome
from sim.costs.constant import FixedCost
from sim.results.summary import timeline_columns
from sim.world import run_world
from tests.support.recount import Recount, Run, every_run, runs
from tests.support.roomy import TICK_S, engine, request, summary_of


def assert_statistics(found: dict[str, float], values: Sequence[float]) -> None:
    """Mean, percentiles and maximum of `found` are those of `values`, one by one."""
    if not len(values):
        assert found == {}
        return
    expected = {"mean": np.mean(values), "max": np.max(values)}
    expected |= {f"p{percent}": np.percentile(values, percent) for percent in (50, 90, 95, 99)}
    assert found == {name: pytest.approx(value, rel=1e-12, abs=1e-15) for name, value in expected.items()}


@settings(max_examples=100)
@given(every_run)
def test_latencies_are_those_of_the_tokens_one_by_one(run: Run) -> None:
    recount = Recount(run)
    finished = [r for r in recount.record.requests if r.outcome is Outcome.FINISHED]
    tokens = recount.token_times_fs
    for r in finished:
        times_fs = tokens[r.request_id]
        assert len(times_fs) == r.num_output_tokens == min(r.spec.output_tokens, 128 - r.spec.input_tokens)
        assert (r.first_token_fs, r.ended_fs) == (times_fs[0], times_fs[-1])
        assert r.scheduled_fs == recount.scheduled_fs[r.request_id]
    summary = summary_of(recount.record)
    assert_statistics(summary["itl_s"], [gap / FS_PER_S for gap in recount.gaps_fs()])
    arrival = {r.request_id: r.arrival_fs for r in finished}
    assert_statistics(summary["ttft_s"], [(tokens[name][0] - arrival[name]) / FS_PER_S for name in arrival])
    assert_statistics(summary["e2el_s"], [(tokens[name][-1] - arrival[name]) / FS_PER_S for name in arrival])
    spans = [tokens[name] for name in arrival if len(tokens[name]) > 1]
    assert_statistics(summary["tpot_s"], [(t[-1] - t[0]) / (len(t) - 1) / FS_PER_S for t in spans])


@settings(max_examples=100)
@given(every_run)
def test_blocks_held_are_those_of_the_steps_one_by_one(run: Run) -> None:
    recount = Recount(run)
    for r in recount.record.requests:
        name = r.request_id
        assert (r.kv_block_fs, r.num_preemptions) == (recount.held_fs[name], recount.preemptions[name])
        assert r.prefix_hit_tokens == recount.first_hits.get(name, 0)
        assert r.peak_blocks >= recount.peak[name]
    summary, times = summary_of(recount.record), recount.time_by_owned_fs
    assert summary["kv_block_seconds"] == pytest.approx(sum(n * t for n, t in times.items()) / FS_PER_S, rel=1e-12)
    assert recount.record.recorders[0].integrals.time_by_used_blocks == times
    expected_max = max(times) / run.config.num_gpu_blocks if times else 0.0
    assert summary["kv_usage"]["max"] == expected_max


@settings(max_examples=100)
@given(runs(aborts=False))
def test_kv_usage_is_the_time_average_with_idle_time_as_unused(run: Run) -> None:
    recount = Recount(run)
    times, total = recount.time_by_owned_fs, max(r.ended_fs for r in recount.record.requests)
    usage = summary_of(recount.record)["kv_usage"]
    if not times:
        assert usage == {"mean": 0.0, "max": 0.0, "p99": 0.0}
        return
    blocks = run.config.num_gpu_blocks
    assert usage["mean"] == pytest.approx(sum(n * t for n, t in times.items()) / (total * blocks), rel=1e-9)
    above = {n: sum(t for m, t in times.items() if m > n) for n in [0, *times]}
    p99 = min(n for n, above_fs in above.items() if 100 * above_fs <= total)
    assert usage["p99"] == pytest.approx(p99 / blocks)


@settings(max_examples=100)
@given(runs())
def test_internal_fragmentation_is_that_of_the_steps_one_by_one(run: Run) -> None:
    recount = Recount(run)
    if recount.slots_fs:
        fragmentation = summary_of(recount.record)["internal_fragmentation"]
        assert fragmentation["mean"] == pytest.approx(recount.unfilled_fs / recount.slots_fs, rel=1e-12)
        assert fragmentation["max"] == pytest.approx(recount.worst_unfilled, rel=1e-12)


def test_internal_fragmentation_counts_only_blocks_that_are_held() -> None:
    """A window of 8 over blocks of 4: a request of 40 tokens and more holds at most four blocks, never less than none of them filled."""
    run = Run(engine(block_size=4, sliding_window=8), FixedCost(TICK_S), (request("a", 0.0, 40, 20),))
    recount = Recount(run)
    fragmentation = summary_of(recount.record)["internal_fragmentation"]
    assert 0.0 <= fragmentation["mean"] <= fragmentation["max"] <= 1.0
    assert fragmentation["mean"] == pytest.approx(recount.unfilled_fs / recount.slots_fs, rel=1e-12)


@settings(max_examples=100)
@given(runs())
def test_the_timeline_runs_as_many_requests_as_the_log_for_as_long(run: Run) -> None:
    recount = Recount(run)
    rows = recount.record.recorders[0].rows
    assert sum(row.running * (row.end_fs - row.start_fs) for row in rows) == recount.running_fs
    assert sum(row.prefill_tokens + row.decode_tokens for row in rows) == sum(recount.scheduled_tokens.values())
    assert sum(row.steps for row in rows) == recount.record.recorders[0].core.steps


def test_the_timeline_of_a_sliding_window_has_a_row_for_each_composition_of_the_batch() -> None:
    """Two requests decode together for 9 steps and one alone for 10 more."""
    requests = (request("short", 0.0, 4, 10), request("long", 0.0, 4, 20))
    recount = Recount(Run(engine(block_size=4, sliding_window=8), FixedCost(TICK_S), requests))
    timeline = timeline_columns(recount.record)
    assert list(zip(timeline["running"], timeline["steps"], strict=True)) == [(2, 1), (2, 9), (1, 10)]


def test_a_request_that_comes_and_goes_in_one_step_has_its_row_of_the_timeline() -> None:
    """Its first 8 tokens are cached and it asks for one: it computes a single token, like a decode, and is done."""
    shared = {"content_ids": ("x", "y"), "content_block_tokens": 4}
    requests = (
        request("seed", 0.0, 8, 1, **shared),
        request("long", 0.0, 3, 20),
        request("quick", 5 * TICK_S, 9, 1, **shared),
    )
    recount = Recount(Run(engine(block_size=4), FixedCost(TICK_S), requests))
    assert recount.first_hits["quick"] == 8
    timeline = timeline_columns(recount.record)
    assert list(zip(timeline["running"], timeline["steps"], strict=True)) == [(2, 1), (1, 4), (2, 1), (1, 14)]


def test_nobody_waits_in_a_row_of_the_timeline_that_ended_before_they_came() -> None:
    """Two requests come together when the engine has long been idle, and are both started at once."""
    requests = [request("first", 0.0, 4, 5), request("a", 1.0, 4, 5), request("b", 1.0, 4, 5)]
    record = run_world(engine(), FixedCost(TICK_S), requests, check=True)
    assert timeline_columns(record)["waiting"] == [0, 0, 0, 0]


def test_blocks_taken_and_taken_back_in_one_decision_are_no_peak() -> None:
    """Three blocks of 4; the least important request was admitted first. At the third step both need a second block and one is left:
    it is given first to the one, and then, with everything the one had, to the other. The first never computed with two blocks.
    """
    low = request("low", 0.0, 3, 9, priority=1, cancel_after_s=2.5 * TICK_S)
    high = request("high", 0.5 * TICK_S, 4, 3, priority=0)
    config = engine(num_gpu_blocks=3, block_size=4, scheduling_policy="priority")
    recount = Recount(Run(config, FixedCost(TICK_S), (low, high)))
    assert recount.preemptions == {"low": 1}
    assert recount.peak == {"low": 1, "high": 2}
    assert {r.request_id: r.peak_blocks for r in recount.record.requests} == recount.peak
