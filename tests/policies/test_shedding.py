"""Shedding and pausing look at the whole queue, whatever its order: by hand, and as properties over every order."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core import ConfigError, EngineConfig, Outcome, Policy, RequestSpec
from sim.core import shedding as shedding_module
from sim.core.admission import AdmissionBase, CanEverFit, Deferral, Every, FreeBlocks
from sim.core.clock import FS_PER_S
from sim.core.draft import Draft
from sim.core.policies import (
    BackOfTheQueue,
    FairQueue,
    arrival_queue,
    deadline_queue,
    shortest_predicted_queue,
)
from sim.core.preemption import worst_priority
from sim.core.rungs import LadderConfig, Rung
from sim.core.waiting import FcfsQueue, aging_queue, priority_queue
from sim.costs.constant import FixedCost
from tests.support.leaping import Scenario, assert_leap_equals_step

ORDERS = {
    "fcfs": FcfsQueue,
    "back": BackOfTheQueue,
    "arrival": arrival_queue,
    "priority": priority_queue,
    "aging": aging_queue(FS_PER_S // 10),
    "shortest": shortest_predicted_queue,
    "fair": FairQueue,
    "deadline": deadline_queue(0.05),
}


def engine(drive, *rungs, queue=FcfsQueue, guard=0, admission=None, **settings):
    ladder = LadderConfig(rungs=rungs, guard_priority=guard)
    policy = Policy(queue=queue, victim=worst_priority, ladder=ladder, swap=settings.get("num_cpu_blocks", 0) > 0)
    if admission is not None:
        policy = Policy(queue=queue, victim=worst_priority, ladder=ladder, admission=admission)
    settings.setdefault("max_num_seqs", 1)
    return drive(20, 4, policy=policy, **settings)


def rejected(world):
    return [name for entry in world.log for name, _ in entry["rejected"]]


def admitted(world):
    return [name for entry in world.log for name in entry["admitted"]]


# -- shed, by hand ----------------------------------------------------------------------------------------------------------------


def test_the_least_important_go_first_from_behind_an_important_head(drive):
    """One runs, an important one is first in line, and has waited 3 s: of those behind it who have, the least important goes first, of
    two equals the older; the one that came a second later stays.
    """
    world = engine(drive, Rung(action="shed", signal="queue_s", on=3.0, off=3.0, hold_s=0.0))
    world.add("runs", 4, 9)
    world.step()
    for name, priority in (("important", 0), ("p1", 1), ("p3", 3), ("p2", 2), ("p3b", 3)):
        world.add(name, 4, 1, priority=priority)
    world.step()
    world.add("late", 4, 1, priority=9)
    world.step()
    world.step()
    assert rejected(world) == []
    world.step()
    world.close()
    assert rejected(world) == ["p3", "p3b", "p2", "p1"]
    assert world.core.num_waiting == 2


def test_who_started_once_is_never_shed_and_who_left_is_not_shed_again(drive):
    """The pool holds two growing requests only for a while: one gives way, waits, and is as old as those who never ran."""
    world = engine(
        drive,
        Rung(action="shed", signal="longest_queue_s", on=6.0, off=6.0, hold_s=0.0),
        max_num_seqs=2,
        max_model_len=80,
    )
    world.add("a", 36, 30, priority=0)
    given_way = world.add("b", 36, 20, priority=1)
    world.step()
    never_ran, left = world.add("c", 4, 1, priority=1), world.add("d", 4, 1, priority=1)
    world.abort("d")
    steps = world.run()
    assert len(steps) > 8
    assert given_way.num_preemptions > 0
    assert given_way.outcome is Outcome.FINISHED
    assert (never_ran.outcome, left.outcome) == (Outcome.REJECTED, Outcome.ABORTED)
    assert rejected(world) == ["c"]


def test_in_strict_priority_the_longest_wait_is_seen_behind_a_stream_of_important_ones(drive):
    """A new important request every second takes every turn. The next to be tried has waited a second at most; the other one, 4 s."""
    for signal, outcome in (("queue_s", None), ("longest_queue_s", Outcome.REJECTED)):
        rung = Rung(action="shed", signal=signal, on=4.0, off=4.0, hold_s=0.0)
        world = engine(drive, rung, queue=priority_queue)
        starved = world.add("starved", 4, 1, priority=1)
        for index in range(6):
            world.add(f"important {index}", 4, 1, priority=0)
            world.step()
        assert starved.outcome is outcome
    assert "waited 4.0 s at priority 1" in starved.reason
    assert "try again in" in starved.reason


def test_with_another_signal_its_value_says_who_has_waited_too_long(drive):
    """12 of 20 blocks are in use: those below the guard go when they have waited 2 s."""
    world = engine(drive, Rung(action="shed", signal="kv_usage", on=0.5, off=0.1, hold_s=0.0, value=2.0))
    world.add("runs", 44, 5)
    world.step()
    world.add("old", 4, 1, priority=1)
    world.step()
    world.add("new", 4, 1, priority=1)
    world.step()
    assert rejected(world) == []
    world.step()
    world.close()
    assert rejected(world) == ["old"]


def test_who_was_set_aside_can_be_shed(drive):
    class NoAdapter(AdmissionBase):
        may_defer = True

        def may_start(self, request, need_blocks, view):
            if request.spec.priority == 0:
                return True
            return Deferral(reason="adapter", why="it is not loaded", give_up_after_s=60.0)

    world = engine(
        drive,
        Rung(action="shed", signal="longest_queue_s", on=2.0, off=2.0, hold_s=0.0),
        admission=lambda config: Every([CanEverFit(config), NoAdapter(), FreeBlocks()]),
        max_num_seqs=2,
    )
    world.add("runs", 4, 6)
    aside = world.add("aside", 4, 1, priority=1)
    world.step()
    assert world.core.num_waiting_by_reason == {"capacity": 0, "adapter": 1}
    world.run()
    assert aside.outcome is Outcome.REJECTED
    assert world.core.num_waiting_by_reason == {"capacity": 0}


def test_a_step_looks_at_few_of_many_who_wait(drive, monkeypatch):
    """Whoever is not sent away is looked at where it stands first, however long the queue is."""
    looked_at = []
    waits = shedding_module._waits
    monkeypatch.setattr(shedding_module, "_waits", lambda request: looked_at.append(request) or waits(request))
    world = engine(drive, Rung(action="shed", signal="longest_queue_s", on=0.5, off=0.5, hold_s=0.0, value=0.0))
    world.add("runs", 4, 9)
    world.step()
    for index in range(300):
        world.add(f"w{index}", 4, 1, priority=0 if index < 280 else 1 + index % 3)
    world.step()
    world.step()
    assert len(rejected(world)) == 20
    looked_at.clear()
    for _ in range(3):
        world.step()
    assert len(looked_at) <= 3 * 3 * 2  # three priorities, asked for the signal and for the action


def test_a_value_that_would_not_be_heard_is_refused():
    with pytest.raises(ConfigError, match="leave value out"):
        Rung(action="shed", signal="queue_s", on=2.0, off=1.0, value=3.0)
    with pytest.raises(ConfigError, match="at least 0"):
        Rung(action="shed", signal="kv_usage", on=0.9, off=0.8, value=-1.0)


# -- pause, by hand ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["fcfs", "back", "arrival", "fair", "deadline", "shortest"])
def test_the_important_pass_those_who_are_paused_and_those_keep_their_places(drive, order):
    """While the first runs admission is paused: the third, which is important, goes past the two before it; they come next, in turn."""
    pause = Rung(action="pause_admission", signal="kv_usage", on=0.3, off=0.3, hold_s=0.0)
    world = engine(drive, pause, queue=ORDERS[order], max_num_seqs=2)
    world.add("runs", 28, 4, max_tokens=4)
    world.step()
    low, lower = (
        world.add(name, 4, 1, priority=priority, max_tokens=1) for name, priority in (("low", 1), ("lower", 2))
    )
    high = world.add("high", 4, 1, priority=0, max_tokens=1)
    steps = world.run()
    assert admitted(world) == ["runs", "high", "low", "lower"]
    assert steps[0].tokens == {"runs": 1, "high": 4}
    assert low.degraded == ["pause_admission"]
    assert (lower.degraded, high.degraded) == ([], [])


def test_an_important_swapped_request_does_not_wait_behind_a_paused_one(drive):
    """Both were swapped out; the later one, which comes back first, is below the guard and paused."""
    pause = Rung(action="pause_admission", signal="kv_usage", on=0.4, off=0.2, hold_s=0.0)
    world = engine(drive, pause, max_num_seqs=3, num_cpu_blocks=20)
    scheduler = world.core._scheduler
    world.add("runs", 20, 9, priority=0)
    high, low = world.add("high", 8, 9, priority=0), world.add("low", 8, 9, priority=1)
    world.step()
    world.step()
    relief = Draft(budget=0)
    for request in (high, low):
        scheduler.shortage.give_way([request], relief, world.now_fs)
    world.core._note(relief, world.now_fs)
    assert [request.request_id for request in scheduler.swapping.swapped] == ["low", "high"]
    assert world.step().tokens == {"runs": 1, "high": 1}
    assert [request.request_id for request in scheduler.swapping.swapped] == ["low"]
    world.run()
    assert (high.outcome, low.outcome) == (Outcome.FINISHED, Outcome.FINISHED)


# -- properties -------------------------------------------------------------------------------------------------------------------


@st.composite
def scenarios(draw):
    config = EngineConfig(
        num_gpu_blocks=draw(st.integers(4, 40)),
        block_size=draw(st.sampled_from([1, 4])),
        max_model_len=64,
        max_num_seqs=draw(st.sampled_from([1, 2, 5])),
        max_num_batched_tokens=16,
        async_scheduling=draw(st.booleans()),
    )
    limit_s = draw(st.sampled_from([0.02, 0.1, 0.3]))
    signal = draw(st.sampled_from(["queue_s", "longest_queue_s"]))
    rungs = [Rung(action="shed", signal=signal, on=limit_s, off=limit_s, hold_s=0.0)]
    if draw(st.booleans()):
        usage = draw(st.sampled_from([0.05, 0.5]))
        hold_s = draw(st.sampled_from([0.0, 0.1]))
        rungs.insert(0, Rung(action="pause_admission", signal="kv_usage", on=usage, off=usage, hold_s=hold_s))
    policy = Policy(
        queue=ORDERS[draw(st.sampled_from(sorted(ORDERS)))],
        victim=worst_priority,
        ladder=LadderConfig(rungs=tuple(rungs), guard_priority=draw(st.integers(-1, 2))),
    )
    requests, time_s = [], 0.0
    for index in range(draw(st.integers(1, 14))):
        time_s += draw(st.sampled_from([0.0, 0.003, 0.01, 0.1]))
        requests.append(
            RequestSpec(
                request_id=str(index),
                arrival_s=time_s,
                input_tokens=draw(st.integers(1, 24)),
                output_tokens=draw(st.integers(1, 20)),
                priority=draw(st.integers(0, 3)),
                tenant=draw(st.sampled_from(["", "x"])),
                cancel_after_s=draw(st.sampled_from([None, None, 0.05])),
            )
        )
    return config, policy, requests, limit_s


@settings(max_examples=150)
@given(scenarios())
def test_leaping_is_stepping_nobody_at_the_guard_is_touched_and_nobody_goes_before_its_time(scenario):
    config, policy, requests, limit_s = scenario
    world = Scenario(config, FixedCost(0.005, per_token_s=0.0001), tuple(requests), policy=policy)
    assert_leap_equals_step(world)
    for request in world.run(stepping=False).requests:
        assert request.outcome is not None
        if request.spec.priority <= policy.ladder.guard_priority:
            assert request.degraded == []
        if request.finish_reason == "shed":
            assert request.degraded[-1] == "shed"
            assert request.scheduled_fs is None
            assert request.num_output_tokens == 0
            assert request.ended_fs - request.arrival_fs >= limit_s * FS_PER_S
