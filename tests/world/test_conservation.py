"""What every run conserves: requests, their time and their tokens; and that only differences of time matter."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.request import Outcome
from sim.results.recorder import RunRecord
from sim.results.summary import request_columns, timeline_columns
from tests.support.recount import Recount, Run, every_run, runs
from tests.support.roomy import TICK, TICK_S, request, summary_of

# -- conservation ------------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(every_run)
def test_requests_and_their_time_are_conserved(run: Run) -> None:
    """Arrived = finished + rejected + aborted + timed out + failed, and L = lambda W, from the columns of the two tables alone.

    Time in the system is time in the queue, from the request table, and time running, from the timeline: with neither preemptions
    nor departures inside a step, which end for the client before they end for the engine, the two tables must agree.
    """
    record = run.go()
    table, timeline, summary = request_columns(record), timeline_columns(record), summary_of(record)
    assert Counter(table["outcome"]) == {
        outcome.value: summary[outcome.value] for outcome in Outcome if summary[outcome.value]
    }
    assert sum(summary[outcome.value] for outcome in Outcome) == len(run.requests) == summary["num_requests"]
    if set(table["outcome"]) - {"finished", "rejected"} or any(table["preemptions"]) or run.config.sliding_window:
        return
    rows = [i for i, outcome in enumerate(table["outcome"]) if outcome == "finished"]
    in_system_s = sum(table["finished_s"][i] - table["arrival_s"][i] for i in rows)
    queued_s = sum(table["queued_s"][i] for i in rows)
    running_s = sum(n * t for n, t in zip(timeline["running"], timeline["duration_s"], strict=True))
    assert queued_s + running_s == pytest.approx(in_system_s, rel=1e-9, abs=1e-12)


@settings(max_examples=100)
@given(runs(shared=False, windows=(None, 4), growing=True))
def test_every_token_of_a_finished_request_is_computed_once_and_again_only_when_it_was_lost(run: Run) -> None:
    """Nothing is shared between requests here; the last token of each is never fed back."""
    recount = Recount(run)
    for r in recount.record.requests:
        if r.outcome is Outcome.FINISHED:
            needed = r.spec.input_tokens + r.num_output_tokens - 1
            assert recount.scheduled_tokens[r.request_id] == needed + r.recomputed_tokens
        if r.num_preemptions == 0:
            assert r.recomputed_tokens == 0


# -- time --------------------------------------------------------------------------------------------------------------


def times_fs(record: RunRecord) -> list[tuple[int | None, ...]]:
    return [(r.arrival_fs, r.scheduled_fs, r.first_token_fs, r.ended_fs) for r in record.requests]


@settings(max_examples=100)
@given(every_run)
def test_doubling_every_time_doubles_every_latency_exactly(run: Run) -> None:
    slower = tuple(
        request(
            spec.request_id,
            2 * spec.arrival_s,
            spec.input_tokens,
            spec.output_tokens,
            priority=spec.priority,
            content_ids=spec.content_ids,
            content_block_tokens=spec.content_block_tokens,
            cancel_after_s=None if spec.cancel_after_s is None else 2 * spec.cancel_after_s,
        )
        for spec in run.requests
    )
    doubled = times_fs(replace(run, cost=run.cost.scaled(2), requests=slower).go())
    assert doubled == [tuple(None if t is None else 2 * t for t in times) for times in times_fs(run.go())]


@settings(max_examples=60)
@given(every_run, st.integers(10**4, 10**6))
def test_idle_time_before_the_first_arrival_shifts_everything_and_changes_nothing(run: Run, idle_ticks: int) -> None:
    later = tuple(
        request(
            spec.request_id,
            spec.arrival_s + idle_ticks * TICK_S,
            spec.input_tokens,
            spec.output_tokens,
            priority=spec.priority,
            content_ids=spec.content_ids,
            content_block_tokens=spec.content_block_tokens,
            cancel_after_s=spec.cancel_after_s,
        )
        for spec in run.requests
    )
    shifted = times_fs(replace(run, requests=later).go())
    expected = [tuple(None if t is None else t + idle_ticks * TICK for t in times) for times in times_fs(run.go())]
    assert shifted == expected
