"""The answer of a run in words: whether it kept up, which limit it met, what became of its requests."""

import pytest

from sim.results.report_answers import answer, binding_limit
from tests.support.results import good, make, request, step


def test_a_run_without_a_queue_kept_up_and_met_no_limit():
    found = answer(good())
    assert (found.status, found.verdict, found.limit) == ("good", "Kept up", "nothing")
    assert found.headline.startswith("All 40 requests finished. Half had their first token within 50.0 ms")


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({"waiting": 3, "running": 8}, "sequences"),
        ({"waiting": 3, "running": 4, "prefill_tokens": 240, "decode_tokens": 16}, "token budget"),
        (
            {
                "waiting": 3,
                "running": 4,
                "used_blocks": 90,
                "used_blocks_end": 95,
                "free_blocks": 5,
                "cached_blocks": 5,
            },
            "KV blocks",
        ),
        ({"waiting": 3, "running": 2, "used_blocks": 5, "used_blocks_end": 5, "free_blocks": 75}, "admission"),
    ],
)
def test_the_limit_is_what_the_waiting_steps_had_used_up(changes, limit):
    result = make([request(0)], [step(0), *(step(n, **changes) for n in range(1, 9)), step(9)])
    assert binding_limit(result)[0] == limit
    assert "80.0 % of the busy time" in binding_limit(result)[1]


@pytest.mark.parametrize("waiting", [0, 3])
def test_steps_that_ran_out_of_memory_are_a_limit_whoever_waits(waiting):
    few = {"waiting": waiting, "running": 2, "used_blocks": 5, "used_blocks_end": 5, "free_blocks": 75}
    found = answer(make([request(0)], [step(n, **few) for n in range(10)], oom_events=3))
    assert found.limit_title == "Limited by step memory"
    assert found.limit_detail.startswith("3 steps ran out of memory. Requests were left in the queue")


def test_the_limit_weighs_time_and_not_rows():
    blocked = {
        "waiting": 1,
        "running": 4,
        "used_blocks": 99,
        "used_blocks_end": 99,
        "free_blocks": 0,
        "cached_blocks": 1,
    }
    rows = [step(n, waiting=1, duration_s=0.001) for n in range(20)]
    result = make([request(0)], [*rows, step(20, duration_s=9.0, **blocked)])
    assert binding_limit(result)[0] == "KV blocks"


def test_a_request_that_comes_while_a_step_runs_was_not_left_waiting():
    requests = [request(n, arrival_s=0.1 * n + 0.05) for n in range(10)]
    assert binding_limit(make(requests, [step(n, waiting=1, running=8) for n in range(10)]))[0] == "nothing"
    assert binding_limit(make(requests, [step(n, waiting=2, running=8) for n in range(10)]))[0] == "sequences"


def test_no_steady_state_is_said_first():
    result = make([request(0)], [step(0)], warnings=["no steady state: the queue grew by 0.3 requests/s"])
    assert answer(result).verdict == "Did not keep up"
    assert "no steady state" in answer(result).headline


def test_rejections_time_outs_and_preemptions_are_told_apart():
    finished = [request(n) for n in range(5)]
    assert answer(make([*finished, request(5, "rejected")], [step(0)])).verdict == "Turned requests away"
    assert answer(make([*finished, request(5, "timed_out")], [step(0)])).verdict == "Clients gave up waiting"
    pressed = answer(
        make(finished, [step(0)], num_preemptions=3, recomputed_tokens=10, input_tokens=900, output_tokens=100)
    )
    assert pressed.verdict == "Kept up, under memory pressure"
    assert "3 preemptions, which cost 1.0 % of all tokens again." in pressed.headline
    assert answer(make(finished, [step(0)], slo_attainment=0.9)).verdict == "Kept up, but missed its objectives"
