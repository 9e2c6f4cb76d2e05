"""What comes, leaves or runs short inside a stretch, by hand: the same in a leap as step by step (I13)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.core.clock import to_fs
from sim.core.eviction import EVICTIONS
from sim.core.policy import Policy
from sim.core.request import Outcome, Request, RequestSpec
from sim.costs.constant import FixedCost
from tests.support.leaping import STEP_TICKS, Scenario, assert_leap_equals_step, at, by_hand
from tests.support.roomy import TICK, TICK_S


def served(scenario: Scenario) -> dict[str, Request]:
    """The requests after a leaping run that equals the stepping run."""
    assert_leap_equals_step(scenario)
    return {request.request_id: request for request in scenario.run(stepping=False).requests}


def ticks(time_fs: int | None) -> float | None:
    return None if time_fs is None else time_fs / TICK


@pytest.mark.parametrize(
    ("arrival", "started"),
    [(24, 24), (25, 32), (31, 32), (32, 32)],
    ids=["at the end of a step", "just after it", "just before the next end", "at the next end"],
)
def test_an_arrival_inside_a_stretch_starts_at_the_end_of_the_step_in_progress(arrival: int, started: int) -> None:
    requests = served(by_hand(at(0, "long", 4, 50), at(arrival, "new", 4, 2)))
    assert ticks(requests["new"].scheduled_fs) == started
    assert ticks(requests["new"].ended_fs) == started + 2 * STEP_TICKS
    assert ticks(requests["long"].ended_fs) == 50 * STEP_TICKS


def test_an_arrival_at_the_end_of_a_step_is_heard_however_late_it_was_announced() -> None:
    """The engine is full until tick 24, so that the first arrival cuts nothing; the second is announced at tick 20, long after the end
    of the step was. At tick 24 there is room for both.
    """
    ending = [at(0, "x", 4, 3), at(0, "y", 4, 3)]
    requests = served(by_hand(*ending, at(20, "first", 4, 9), at(24, "second", 4, 9), max_num_seqs=2))
    assert [ticks(requests[name].scheduled_fs) for name in ("first", "second")] == [24, 24]


def test_an_arrival_one_femtosecond_after_a_step_waits_for_the_next() -> None:
    late = RequestSpec(request_id="late", arrival_s=24 * TICK_S + 1e-15, input_tokens=4, output_tokens=2)
    assert to_fs(late.arrival_s) == 24 * TICK + 1
    assert ticks(served(by_hand(at(0, "long", 4, 50), late))["late"].scheduled_fs) == 32


@pytest.mark.parametrize(("cancelled", "tokens"), [(24, 2), (25, 3), (31, 3), (32, 3), (33, 4)])
def test_a_cancel_inside_a_stretch_drops_the_token_of_the_step_in_progress(cancelled: int, tokens: int) -> None:
    """The step that ends at tick 24 gives the third token; a client that leaves at that very moment does not see it."""
    leaves = at(0, "leaves", 4, 50, cancel_after_s=cancelled * TICK_S)
    requests = served(by_hand(leaves, at(0, "stays", 4, 50)))
    assert requests["leaves"].outcome is Outcome.ABORTED
    assert requests["leaves"].num_output_tokens == tokens
    assert ticks(requests["leaves"].ended_fs) == cancelled
    assert ticks(requests["stays"].ended_fs) == 50 * STEP_TICKS


def test_blocks_of_a_cancelled_request_return_when_the_step_in_progress_is_over() -> None:
    """Four blocks: the second request needs what the first holds, and starts with the step after the cancellation."""
    first = at(0, "first", 9, 7, cancel_after_s=20 * TICK_S)
    requests = served(by_hand(first, at(1, "second", 8, 2), num_gpu_blocks=4))
    assert ticks(requests["first"].ended_fs) == 20
    assert ticks(requests["second"].scheduled_fs) == 24


def test_a_time_out_inside_a_stretch_is_a_time_out() -> None:
    requests = served(by_hand(at(0, "slow", 4, 50, timeout_s=20 * TICK_S), at(0, "other", 4, 50)))
    assert requests["slow"].outcome is Outcome.TIMED_OUT
    assert ticks(requests["slow"].ended_fs) == 20


def test_a_cancel_of_a_queued_request_during_a_stretch_moves_nobody_else() -> None:
    queued = at(2, "queued", 4, 4, cancel_after_s=18 * TICK_S)
    requests = served(by_hand(at(0, "running", 4, 10), queued, at(3, "behind", 4, 4), max_num_seqs=1))
    assert requests["queued"].outcome is Outcome.ABORTED
    assert requests["queued"].scheduled_fs is None
    assert ticks(requests["queued"].ended_fs) == 20
    assert ticks(requests["running"].ended_fs) == 10 * STEP_TICKS
    assert ticks(requests["behind"].scheduled_fs) == 10 * STEP_TICKS


def test_a_cancel_of_the_head_of_the_queue_lets_the_next_start_at_the_end_of_the_step() -> None:
    """Ten blocks: the head needs nine and waits, and blocks a small request behind it until it goes away at tick 20."""
    head = at(2, "head", 36, 1, cancel_after_s=18 * TICK_S)
    requests = served(by_hand(at(0, "running", 4, 20), head, at(3, "small", 4, 1), num_gpu_blocks=10))
    assert requests["head"].scheduled_fs is None
    assert ticks(requests["small"].scheduled_fs) == 24


@pytest.mark.parametrize("arrival", [16, 20, 24])
def test_a_rejection_during_a_stretch_is_logged_with_the_next_step(arrival: int) -> None:
    scenario = by_hand(at(0, "running", 4, 10), at(arrival, "too long", 2000, 2000, max_tokens=2000))
    assert served(scenario)["too long"].outcome is Outcome.REJECTED
    log: list[dict[str, object]] = []
    scenario.run(stepping=False, decision_log=log.append)
    logged = [(entry["step"], name) for entry in log for name, _ in entry["rejected"]]
    assert logged == [(-(-arrival // STEP_TICKS), "too long")]


def test_two_cancels_in_one_step_cut_the_stretch_once() -> None:
    requests = served(
        by_hand(
            at(0, "a", 4, 50, cancel_after_s=18 * TICK_S),
            at(0, "b", 4, 50, cancel_after_s=21 * TICK_S),
            at(0, "c", 4, 50),
        )
    )
    assert [ticks(requests[name].ended_fs) for name in "abc"] == [18, 21, 50 * STEP_TICKS]
    assert [requests[name].num_output_tokens for name in "abc"] == [2, 2, 50]


def test_everybody_may_leave_in_the_same_step() -> None:
    leaving = [at(0, name, 4, 50, cancel_after_s=(17 + i) * TICK_S) for i, name in enumerate("abc")]
    requests = served(by_hand(*leaving, at(40, "later", 4, 2)))
    assert [ticks(requests[name].ended_fs) for name in "abc"] == [17, 18, 19]
    assert ticks(requests["later"].scheduled_fs) == 40


@pytest.mark.parametrize("arrival", [73, 79, 80])
def test_an_interruption_in_the_last_step_of_a_stretch_changes_nothing_of_it(arrival: int) -> None:
    """The stretch ends by itself at tick 80, when the running request is done."""
    requests = served(by_hand(at(0, "running", 4, 10), at(arrival, "new", 4, 2)))
    assert ticks(requests["running"].ended_fs) == 80
    assert ticks(requests["new"].scheduled_fs) == 80


def test_a_client_that_leaves_at_the_moment_of_its_last_token_has_left() -> None:
    requests = served(by_hand(at(0, "leaves", 4, 10, cancel_after_s=80 * TICK_S)))
    assert requests["leaves"].outcome is Outcome.ABORTED
    assert requests["leaves"].num_output_tokens == 9


def test_arrivals_at_the_same_moment_start_together_in_their_order() -> None:
    requests = served(by_hand(at(0, "long", 4, 50), at(20, "a", 4, 5), at(20, "b", 4, 5), at(20, "c", 4, 5)))
    assert [ticks(requests[name].scheduled_fs) for name in "abc"] == [24, 24, 24]
    assert requests["a"].order < requests["b"].order < requests["c"].order


@pytest.mark.parametrize("eviction", list(EVICTIONS))
def test_a_queued_prompt_whose_cached_head_is_evicted_may_need_less_than_before(eviction: str) -> None:
    """Six blocks of four, chunks of at most four tokens, and only the next chunk must fit. An important request leaves three blocks of
    a prompt, the first of which an unimportant one holds longer. The last to come finds all three, and cannot start: with its chunk it
    would take four of three free blocks. If the next block taken is the head of what it finds, it finds nothing and needs one.
    """
    prompt = {"content_block_tokens": 4}
    scenario = by_hand(
        at(0, "important", 13, 1, content_ids=tuple("xxx"), **prompt),
        at(4, "unimportant", 5, 3, content_ids=tuple("x"), priority=2, **prompt),
        at(7 * STEP_TICKS, "takes blocks", 1, 30),
        at(17 * STEP_TICKS, "waits", 16, 1, content_ids=tuple("xxxx"), **prompt),
        num_gpu_blocks=6,
        max_num_seqs=3,
        max_num_batched_tokens=4,
        reserve_full_prompt=False,
    )
    assert_leap_equals_step(replace(scenario, policy=Policy(eviction=eviction)))


def test_a_shortage_of_blocks_ends_a_stretch_and_a_preemption_is_the_same_in_both() -> None:
    """Two requests that grow to ten blocks each, in a pool of twelve."""
    scenario = by_hand(at(0, "older", 8, 30), at(0, "younger", 8, 30), num_gpu_blocks=12)
    requests = served(scenario)
    assert requests["older"].num_preemptions == 0
    assert requests["younger"].num_preemptions > 0
    assert all(request.num_output_tokens == 30 for request in requests.values())


def test_steps_that_cost_nothing_are_the_same_in_both() -> None:
    served(by_hand(at(0, "a", 4, 20), at(1, "b", 4, 20, cancel_after_s=0.0), at(1, "c", 8, 3), cost=FixedCost(0.0)))


def test_a_router_by_kv_use_counts_the_blocks_taken_since_a_stretch_began() -> None:
    """After 39 steps the first replica's request is at eleven blocks, but its stretch began at two; the second's is at six."""
    grows, newer, third = at(0, "grows", 4, 60), at(300, "newer", 20, 60), at(39 * STEP_TICKS + 4, "third", 4, 2)
    config = by_hand().config
    scenario = Scenario(config, FixedCost(STEP_TICKS * TICK_S), (grows, newer, third), replicas=2, router="least-kv")
    expected = {"grows": 0, "newer": 1, "third": 1}
    assert scenario.run(stepping=True).replica_of == expected
    assert scenario.run(stepping=False).replica_of == expected
