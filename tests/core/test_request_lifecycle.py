"""How requests end: exactly once, in every state, with every block back."""

from __future__ import annotations

from collections import Counter

import pytest

from sim.core.clock import FS_PER_S
from sim.core.request import Outcome

# -- departures in every state -----------------------------------------------------------------------------------------


# Each of these brings "victim" into a state and returns the plan that is out then, if any. 16 blocks of 4, budget 16, at most 2
# sequences. "other" is there to show that nobody else is harmed.
SETTINGS = {"num_gpu_blocks": 16, "block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 2}


def waiting_at_the_head(engine):
    for name in ("first", "other", "victim", "behind"):
        engine.add(name, 4, output_tokens=5)
    engine.step()


def waiting_in_the_middle(engine):
    for name in ("first", "other", "ahead", "victim", "behind"):
        engine.add(name, 4, output_tokens=5)
    engine.step()


def waiting_while_a_stretch_is_out(engine):
    for name in ("first", "other", "victim", "behind"):
        engine.add(name, 4, output_tokens=5)
    engine.step()
    return engine.plan()


def between_two_chunks_of_its_prompt(engine):
    engine.add("other", 4, output_tokens=5)
    engine.add("victim", 40, output_tokens=5)
    assert engine.step().tokens == {"other": 4, "victim": 12}


def in_flight_in_its_first_chunk(engine):
    engine.add("other", 4, output_tokens=5)
    engine.add("victim", 40, output_tokens=5)
    return engine.plan()


def in_flight_in_a_later_chunk(engine):
    between_two_chunks_of_its_prompt(engine)
    return engine.plan()


def in_flight_in_the_chunk_that_samples_its_first_token(engine):
    engine.add("other", 4, output_tokens=5)
    engine.add("victim", 12, output_tokens=5)
    return engine.plan()


def decoding_between_two_steps(engine):
    engine.add("other", 4, output_tokens=9)
    engine.add("victim", 6, output_tokens=9)
    engine.step()
    engine.step()


def in_flight_in_a_decode_step(engine):
    decoding_between_two_steps(engine)
    return engine.plan(max_repeat=1)


def in_flight_in_a_decode_stretch(engine):
    decoding_between_two_steps(engine)
    plan = engine.plan()
    assert plan.repeat == 7
    return plan


def preempted_and_waiting(engine):
    """Each has 8 blocks, all there are, and needs a ninth for its 33rd token: "victim", the younger, gives way."""
    engine.add("other", 30, output_tokens=20)
    victim = engine.add("victim", 30, output_tokens=20)
    while not victim.num_preemptions:
        engine.step()


def preempted_by_the_plan_that_is_out(engine):
    engine.add("other", 30, output_tokens=20)
    victim = engine.add("victim", 30, output_tokens=20)
    while True:
        plan = engine.plan()
        if victim.num_preemptions:
            return plan
        engine.commit(plan)


def resumed_after_a_preemption_and_in_flight(engine):
    preempted_and_waiting(engine)
    while "victim" not in (plan := engine.plan()).admitted:
        engine.commit(plan)
    return plan


def in_its_last_step(engine):
    engine.add("other", 4, output_tokens=5)
    engine.add("victim", 4, output_tokens=2)
    engine.step()
    return engine.plan(max_repeat=1)


def in_its_only_step(engine):
    engine.add("other", 4, output_tokens=5)
    engine.add("victim", 4, output_tokens=1)
    return engine.plan()


STATES = {
    state.__name__: state
    for state in (
        waiting_at_the_head,
        waiting_in_the_middle,
        waiting_while_a_stretch_is_out,
        between_two_chunks_of_its_prompt,
        in_flight_in_its_first_chunk,
        in_flight_in_a_later_chunk,
        in_flight_in_the_chunk_that_samples_its_first_token,
        decoding_between_two_steps,
        in_flight_in_a_decode_step,
        in_flight_in_a_decode_stretch,
        preempted_and_waiting,
        preempted_by_the_plan_that_is_out,
        resumed_after_a_preemption_and_in_flight,
        in_its_last_step,
        in_its_only_step,
    )
}


def balance(log):
    """By request: blocks the log says were given, less those it says were released."""
    given: dict[str, Counter] = {}
    for entry in log:
        for request_id, blocks in entry["released"]:
            given[request_id].subtract(blocks)
        for request_id, _num_tokens, blocks in entry["scheduled"]:
            given.setdefault(request_id, Counter()).update(blocks)
    return {request_id: +counter + -counter for request_id, counter in given.items()}


@pytest.mark.parametrize("outcome", [Outcome.ABORTED, Outcome.TIMED_OUT])
@pytest.mark.parametrize("state", STATES)
def test_a_departure_ends_a_request_once_and_returns_its_blocks(drive, state, outcome):
    engine = drive(**SETTINGS)
    plan = STATES[state](engine)
    held_before = {ended.request_id for ended in engine.ended}
    left_at_fs = engine.now_fs if plan is None else plan.start_fs + FS_PER_S // 2
    engine.now_fs = left_at_fs

    assert engine.abort("victim", outcome)
    assert not engine.abort("victim", outcome)  # leaving twice changes nothing
    assert not engine.abort("victim", Outcome.ABORTED)
    if plan is not None:
        engine.commit(plan, steps=1)
    assert not engine.abort("victim", outcome)
    assert [ended.request_id for ended in engine.ended if ended.request_id not in held_before] == ["victim"]
    (victim,) = (ended for ended in engine.ended if ended.request_id == "victim")
    assert (victim.outcome, victim.ended_fs) == (outcome, left_at_fs)
    assert (victim.held_blocks, victim.table.blocks) == (0, [])

    engine.run()
    assert engine.pool.num_free == 16
    assert Counter(ended.request_id for ended in engine.ended).most_common(1)[0][1] == 1
    assert engine.core.num_unfinished == 0
    others = [ended for ended in engine.ended if ended is not victim]
    assert others
    assert [(other.outcome, other.num_output_tokens) for other in others] == [
        (Outcome.FINISHED, other.target_tokens - other.spec.input_tokens) for other in others
    ]
    engine.add("last", 1)  # a last step brings every release before it into the log
    engine.run()
    assert not balance(engine.log).get("victim")
    assert not any(request_id == "victim" for entry in engine.log for request_id, _ in entry["rejected"])


@pytest.mark.parametrize(
    ("state", "tokens"),
    [
        ("waiting_at_the_head", 0),
        ("between_two_chunks_of_its_prompt", 0),
        ("in_flight_in_its_first_chunk", 0),
        ("in_flight_in_the_chunk_that_samples_its_first_token", 0),
        ("decoding_between_two_steps", 2),
        ("in_flight_in_a_decode_step", 2),
        ("in_flight_in_a_decode_stretch", 2),
        ("in_its_last_step", 1),
        ("in_its_only_step", 0),
    ],
)
def test_the_token_of_the_step_in_which_a_client_left_was_not_delivered(drive, state, tokens):
    engine = drive(**SETTINGS)
    plan = STATES[state](engine)
    engine.abort("victim")
    if plan is not None:
        engine.commit(plan, steps=1)
    (victim,) = (ended for ended in engine.ended if ended.request_id == "victim")
    assert victim.num_output_tokens == tokens
    assert (victim.first_token_fs is None) is (tokens == 0)


def test_in_a_stretch_the_tokens_of_the_steps_before_the_departure_were_delivered(drive):
    """2 tokens before the stretch; the client leaves in its third step: 2 more."""
    engine = drive(**SETTINGS)
    plan = in_flight_in_a_decode_stretch(engine)
    engine.now_fs = plan.start_fs + 2 * FS_PER_S + 1
    engine.abort("victim")
    engine.commit(plan, steps=3)
    (victim,) = engine.ended
    assert victim.num_output_tokens == 2 + 2


@pytest.mark.parametrize("state", [name for name, state in STATES.items() if "in_flight" in name or "in_its" in name])
def test_blocks_of_a_request_in_flight_stay_until_its_step_is_done(drive, state):
    engine = drive(**SETTINGS)
    plan = STATES[state](engine)
    owned = engine.pool.num_owned
    engine.abort("victim")
    assert engine.pool.num_owned == owned
    assert engine.ended == [] or all(ended.request_id != "victim" for ended in engine.ended)
    tables = {share.request_id: share.block_table for share in plan.scheduled(0)}
    assert "victim" in tables  # the executor still has everything it needs
    engine.commit(plan, steps=1)
    assert all(engine.pool.ref_cnt(block) == 0 for block in tables["victim"])


def test_a_departure_at_time_zero_ended_at_time_zero(drive):
    """A run starts at 0, and a client may leave at that very moment, with its step already out."""
    engine = drive(**SETTINGS)
    plan = in_flight_in_its_first_chunk(engine)
    engine.abort("victim")
    engine.commit(plan)
    assert [(ended.request_id, ended.ended_fs) for ended in engine.ended] == [("victim", 0)]


def test_everybody_may_leave_at_once(drive):
    engine = drive(**SETTINGS)
    names = ("first", "other", "victim", "behind")
    plan = waiting_while_a_stretch_is_out(engine)
    assert all(engine.abort(name) for name in names)
    engine.commit(plan, steps=1)
    assert sorted(ended.request_id for ended in engine.ended) == sorted(names)
    assert engine.plan() is None
    assert engine.pool.num_free == 16


def test_nobody_known_cannot_leave(drive):
    engine = drive(**SETTINGS)
    engine.add("rejected", 100)
    engine.add("finished", 1)
    engine.run()
    assert not engine.abort("rejected")
    assert not engine.abort("finished")
    assert not engine.abort("never seen")
    assert [ended.outcome for ended in engine.ended] == [Outcome.REJECTED, Outcome.FINISHED]


def test_what_an_aborted_request_shared_stays_findable(drive):
    """Its step was computed, so its 3 full blocks are good: the next one of this content hits 12 of 13 tokens."""
    engine = drive(**SETTINGS)
    prompt = {"content_ids": (1, 2, 3, 4), "content_block_tokens": 4}
    engine.add("victim", 13, output_tokens=5, **prompt)
    plan = engine.plan()
    engine.abort("victim")
    engine.commit(plan)
    assert engine.pool.num_cached == 3
    again = engine.add("again", 13, **prompt)
    assert engine.step().tokens == {"again": 1}
    assert again.prefix_hit_tokens == 12


def test_the_log_of_a_whole_run_returns_every_block_it_gave(drive):
    """Also what the last steps released: nobody can verify a log whose end is missing."""
    engine = drive(**SETTINGS)
    engine.add("A", 4, output_tokens=5)
    engine.add("B", 40, output_tokens=2)
    engine.run()
    engine.close()
    assert {request_id: dict(counter) for request_id, counter in balance(engine.log).items()} == {"A": {}, "B": {}}


def test_the_log_of_a_run_shows_rejections_even_if_nothing_else_happens(drive):
    engine = drive(**SETTINGS)
    engine.add("never", 100)
    assert engine.plan() is None
    engine.close()
    assert [request_id for entry in engine.log for request_id, _ in entry["rejected"]] == ["never"]


# -- ends of other kinds -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output_tokens", "max_tokens", "reason", "tokens"),
    [(3, None, "stop", 3), (3, 5, "stop", 3), (5, 3, "length", 3), (3, 3, "length", 3), (1, 1, "length", 1)],
)
def test_a_request_stops_by_itself_or_at_its_cap(drive, output_tokens, max_tokens, reason, tokens):
    engine = drive(**SETTINGS)
    request = engine.add("A", 4, output_tokens=output_tokens, max_tokens=max_tokens)
    engine.run()
    assert (request.outcome, request.finish_reason, request.num_output_tokens) == (Outcome.FINISHED, reason, tokens)


def test_what_the_model_says_ends_a_request_before_its_time(drive):
    """An end-of-sequence token in the third step: 3 tokens, reason stop; the other goes on."""
    engine = drive(**SETTINGS)
    stopped = engine.add("A", 4, output_tokens=50, max_tokens=50)
    other = engine.add("B", 4, output_tokens=5)
    engine.step()
    engine.step()
    engine.commit(engine.plan(max_repeat=1), stopped=("A",))
    assert (stopped.outcome, stopped.finish_reason, stopped.num_output_tokens) == (Outcome.FINISHED, "stop", 3)
    engine.run()
    assert other.num_output_tokens == 5
    assert engine.pool.num_free == 16


def test_times_of_a_request_are_those_of_its_steps(drive):
    """A second a step: scheduled at 2, first token at 3, finished with 4 tokens at 6; blocks held: 1 for 1 s, then 2 for 3 s."""
    engine = drive(**SETTINGS)
    engine.now_fs = 2 * FS_PER_S
    request = engine.add("A", 4, output_tokens=4)
    engine.run()
    times = (request.arrival_fs, request.scheduled_fs, request.first_token_fs, request.ended_fs)
    assert [time_fs // FS_PER_S for time_fs in times] == [2, 2, 3, 6]
    assert request.kv_block_fs == (1 * 1 + 2 * 3) * FS_PER_S
