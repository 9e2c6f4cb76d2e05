"""Who is tried first, and who gives way: queue orders and victims.

rule                                                    test
VTC, Sheng et al., OSDI 2024                            test_fair_share_…
shortest predicted output first                         test_shortest_…
earliest deadline first, late ones deferred             test_deadlines_…
victims are pure functions (I11)                        test_every_victim_is_a_pure_function_of_what_may_be_seen
SGLang retract order, §1.3.5                            test_victims_by_hand
"""

from __future__ import annotations

import pytest

from sim.core.policies import BackOfTheQueue, FairQueue, arrival_queue, deadline_queue, shortest_predicted_queue
from sim.core.policy import Policy
from sim.core.preemption import VICTIMS
from sim.core.request import Outcome
from sim.core.waiting import aging_queue


def one_at_a_time(drive, queue):
    """An engine that serves one request after the other; a step takes a second."""
    return drive(num_gpu_blocks=100, block_size=16, max_num_seqs=1, policy=Policy(queue=queue))


def order_of(engine) -> list[str]:
    """The order in which the requests in it start."""
    return [name for step in engine.run() for name in step.plan.admitted]


# -- fair share ------------------------------------------------------------------------------------------------------------------


def test_fair_share_serves_a_small_sender_between_the_requests_of_a_large_one(drive) -> None:
    """a sent four requests before b sent two of the same size: after a's first, b's counter is behind; then they alternate."""
    engine = one_at_a_time(drive, FairQueue)
    for index in range(4):
        engine.add(f"a{index}", 10, output_tokens=5, tenant="a")
    engine.step()
    for index in range(2):
        engine.add(f"b{index}", 10, output_tokens=5, tenant="b")
    assert order_of(engine) == ["a1", "b0", "a2", "b1", "a3"]


def test_fair_share_lifts_who_comes_late_to_those_who_wait(drive) -> None:
    """a has been charged 10 + 2 x 5 when b arrives, and waits: b starts from the same counter, not from nought, so it is not b's turn
    until it has caught up. (FCFS among equals: a1 is older.)"""
    engine = one_at_a_time(drive, FairQueue)
    for index in range(3):
        engine.add(f"a{index}", 10, output_tokens=5, tenant="a")
    for _ in range(5):
        engine.step()
    engine.add("b0", 10, output_tokens=5, tenant="b")
    assert order_of(engine) == ["a1", "b0", "a2"]


def test_fair_share_counts_outputs_twice_and_prompts_once(drive) -> None:
    """Prompt 10, 4 output tokens: 10 + 2 x 4."""
    queues = []

    def make(view):
        queues.append(FairQueue(view))
        return queues[-1]

    engine = one_at_a_time(drive, make)
    engine.add("a0", 10, output_tokens=4, tenant="a")
    for _ in range(5):
        engine.step()
    assert queues[0].head() is None
    assert queues[0].counter("a") == 18


def test_fair_share_bounds_the_difference_between_two_busy_tenants(drive) -> None:
    """Whatever they send: between tenants that always wait, service differs by less than two of the largest running batches."""
    seen = []

    def make(view):
        seen.append(FairQueue(view))
        return seen[-1]

    engine = drive(num_gpu_blocks=40, block_size=16, max_num_seqs=4, policy=Policy(queue=make))
    for index in range(120):
        engine.add(f"a{index}", 40, output_tokens=3, tenant="a")
    for index in range(40):
        engine.add(f"b{index}", 20, output_tokens=30, tenant="b")
    queue, worst = seen[0], 0
    while queue._waiting.keys() >= {"a", "b"} or queue._arrived:
        engine.step()
        queue.head()
        worst = max(worst, abs(queue.counter("a") - queue.counter("b")))
    largest = max(40 + 2 * 3, 20 + 2 * 30)
    assert worst <= 2 * 4 * largest  # the paper's bound: 2 max(w_p L_input, w_q M), M being what a batch can hold


def test_fair_share_keeps_a_preempted_request_first_of_its_tenant_and_charges_it_once(drive) -> None:
    seen = []

    def make(view):
        seen.append(FairQueue(view))
        return seen[-1]

    engine = drive(num_gpu_blocks=6, block_size=4, policy=Policy(queue=make), enable_prefix_caching=False)
    requests = [engine.add(name, 8, output_tokens=8, tenant=name) for name in "abc"]
    engine.run()
    seen[0].head()
    assert sum(request.num_preemptions for request in requests) > 0
    assert [seen[0].counter(name) for name in "abc"] == [8 + 2 * 8] * 3


def test_fair_share_forgets_who_left(drive) -> None:
    engine = one_at_a_time(drive, FairQueue)
    for name in ("a0", "a1", "b0"):
        engine.add(name, 10, output_tokens=3, tenant=name[0])
    engine.step()
    assert engine.abort("a1")
    assert engine.core.num_waiting == 1
    assert order_of(engine) == ["b0"]


# -- other orders ----------------------------------------------------------------------------------------------------------------


def test_shortest_predicted_output_by_cap_while_nothing_is_known(drive) -> None:
    engine = one_at_a_time(drive, shortest_predicted_queue)
    for name, cap in (("running", 5), ("long", 90), ("short", 4), ("middle", 20)):
        engine.add(name, 10, output_tokens=3, max_tokens=cap)
        if name == "running":
            engine.step()
    assert order_of(engine) == ["short", "middle", "long"]


def test_shortest_predicted_output_by_what_the_tenant_did_before(drive) -> None:
    """Eight requests of each tenant teach that "chat" answers in 2 tokens and "essay" in 9; max_tokens is the same."""
    engine = one_at_a_time(drive, shortest_predicted_queue)
    for index in range(8):
        engine.add(f"chat{index}", 10, output_tokens=2, max_tokens=100, tenant="chat")
        engine.add(f"essay{index}", 10, output_tokens=9, max_tokens=100, tenant="essay")
    engine.run()
    engine.add("running", 10, output_tokens=3)
    engine.step()
    for name, tenant in (("e", "essay"), ("unknown", "new"), ("c", "chat")):
        engine.add(name, 10, output_tokens=3, max_tokens=100, tenant=tenant)
    assert order_of(engine) == ["c", "unknown", "e"]


def test_deadlines_first_come_by_urgency(drive) -> None:
    engine = one_at_a_time(drive, deadline_queue({0: 20.0, 1: 60.0}, late_last=False))
    engine.add("running", 10, output_tokens=5)
    engine.step()
    for name, priority in (("never", 2), ("calm", 1), ("urgent", 0)):
        engine.add(name, 10, output_tokens=2, priority=priority)
    assert order_of(engine) == ["urgent", "calm", "never"]


@pytest.mark.parametrize(("late_last", "order"), [(True, ["later", "sooner"]), (False, ["sooner", "later"])])
def test_deadlines_that_have_passed_are_deferred_behind_those_that_can_be_met(drive, late_last, order) -> None:
    """ "sooner" was due after 5 s; at 10 s it is late whatever happens, and "later" still has its chance."""
    engine = one_at_a_time(drive, deadline_queue({0: 5.0, 1: 30.0}, late_last=late_last))
    engine.add("running", 10, output_tokens=10, priority=1)
    engine.step()
    engine.add("sooner", 10, output_tokens=2, priority=0)
    engine.add("later", 10, output_tokens=2, priority=1)
    assert order_of(engine) == order


def test_deadlines_deferred_requests_can_still_be_cancelled(drive) -> None:
    engine = one_at_a_time(drive, deadline_queue(2.0))
    engine.add("running", 10, output_tokens=6)
    engine.step()
    for name in ("a", "b"):
        engine.add(name, 10)
    for _ in range(5):
        engine.step()
    assert engine.core.num_waiting == 2
    assert engine.abort("a")
    assert order_of(engine) == ["b"]


def test_aging_lets_a_patient_request_pass_an_important_one(drive) -> None:
    """A level is worth 3 s: priority 1 after 4 s goes before priority 0 that has just come."""
    engine = one_at_a_time(drive, aging_queue(3 * 10**15))
    engine.add("running", 10, output_tokens=6)
    engine.step()
    engine.add("patient", 10, priority=1)
    for _ in range(4):
        engine.step()
    engine.add("important", 10, priority=0)
    assert order_of(engine) == ["patient", "important"]


@pytest.mark.parametrize(
    ("queue", "order"),
    [(BackOfTheQueue, ["waits", "young"]), (arrival_queue, ["young", "waits"])],
    ids=["back of the queue", "by arrival"],
)
def test_where_a_preempted_request_goes(drive, queue, order) -> None:
    engine = drive(num_gpu_blocks=4, block_size=4, policy=Policy(queue=queue), enable_prefix_caching=False)
    engine.add("old", 7, output_tokens=6)
    engine.add("young", 7, output_tokens=6)
    engine.step()
    engine.add("waits", 5)
    assert order_of(engine) == order


# -- victims -----------------------------------------------------------------------------------------------------------------------


class Someone:
    """What a victim policy may look at, and nothing else: asking for more fails."""

    def __init__(self, order, prompt, output, held, priority=0):
        self.order = self.seq = order
        self.arrival_fs, self.held_blocks = order, held
        self.output = output
        self.spec = type("Spec", (), {"input_tokens": prompt, "priority": priority})()


RUNNING = {
    someone.order: someone
    for someone in (
        Someone(1, prompt=100, output=50, held=10),
        Someone(2, prompt=900, output=10, held=57, priority=2),
        Someone(3, prompt=400, output=10, held=26),
        Someone(4, prompt=90, output=15, held=7, priority=1),
        Someone(5, prompt=30, output=70, held=7, priority=1),
    )
}


def known(someone: Someone) -> int:
    return someone.spec.input_tokens + someone.output


@pytest.mark.parametrize(
    ("name", "victim"),
    [
        ("last-admitted", 5),
        ("worst-priority", 2),
        ("fewest-generated", 2),
        ("least-lost-work", 5),
        ("largest-holder", 2),
    ],
)
def test_victims_by_hand(name, victim) -> None:
    """Of the two with ten generated tokens SGLang takes the longer prompt; 30 + 70 tokens are the least to compute again."""
    assert VICTIMS[name](RUNNING, known).order == victim


@pytest.mark.parametrize("name", VICTIMS)
def test_every_victim_is_a_pure_function_of_what_may_be_seen(name) -> None:
    """The same whatever it was asked before, and in whatever order the running are listed that is not their order of admission."""
    first = VICTIMS[name](RUNNING, known).order
    assert [VICTIMS[name](RUNNING, known).order for _ in range(3)] == [first] * 3
    if name != "last-admitted":  # which means the last in the dictionary
        assert VICTIMS[name](dict(reversed(RUNNING.items())), known).order == first


def test_the_youngest_of_equals_gives_way(drive) -> None:
    """In the step in which blocks run out the oldest are served first; so then the largest holder is one that has just been served."""
    for name in VICTIMS.keys() - {"largest-holder"}:
        engine = drive(num_gpu_blocks=5, block_size=4, policy=Policy(victim=VICTIMS[name]), enable_prefix_caching=False)
        for request in "abc":
            engine.add(request, 3, output_tokens=9)
        steps = engine.run()
        assert next(victim for step in steps for victim in step.plan.preempted) == "c", name
        assert {request.outcome for request in engine.ended} == {Outcome.FINISHED}
