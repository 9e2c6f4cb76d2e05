"""Micro-batches of decodes (`max_decode_seqs`): whose turn it is, and that a step of some decodes is a decode step like any other.

By hand; blocks hold 4 tokens unless a test says otherwise, and a step takes a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.batching import Batching, BatchLimits
from sim.core.clock import FS_PER_S
from sim.core.config import EngineConfig
from sim.core.forking import Forking
from sim.core.policies import NewTokenRatio, RatioSettings
from sim.core.policy import Policy
from sim.core.request import Outcome, Request, RequestSpec
from sim.core.rungs import LadderConfig, Rung
from sim.costs.constant import FixedCost
from sim.world import run_world

ROOMY = {"num_gpu_blocks": 400, "block_size": 4}


def micro_batches(most: int, batching: Batching = Batching.MIXED, **fields: object) -> Policy:
    steps = 6 if batching is Batching.DECODE_FIRST else None
    return Policy(batching=batching, limits=BatchLimits(max_decode_seqs=most, continuous_decode_steps=steps), **fields)


# -- whose turn it is ----------------------------------------------------------------------------------------------------


@dataclass
class Expected:
    """A request of the reference below."""

    name: str
    wanted: int
    token_ends_s: list[int]
    """When it got its tokens."""


def by_the_rule(
    arrivals: Sequence[tuple[int, int, int]], most: int
) -> tuple[list[dict[str, int]], dict[str, list[int]]]:
    """The rule, written down: tokens by request in each step, and when each request got its tokens. `arrivals` are `(step, prompt,
    output tokens)`. Everybody who comes starts in the next step, with the whole prompt; of the others those decode who have waited
    longest for a token, of them those with the fewest, of them the oldest.
    """
    running: list[Expected] = []
    steps, ends = [], {}
    step = 0
    while running or step <= max(at for at, _, _ in arrivals):
        turn = sorted(running, key=lambda each: (each.token_ends_s[-1], len(each.token_ends_s)))  # stable: oldest first
        going = turn[:most]
        tokens = {each.name: 1 for each in running if each in going}
        for number, (at, prompt, wanted) in enumerate(arrivals):
            if at == step:
                going.append(Expected(f"r{number}", wanted, []))
                running.append(going[-1])
                tokens[f"r{number}"] = prompt
        for each in going:
            each.token_ends_s.append(step + 1)
            ends[each.name] = each.token_ends_s
        running = [each for each in running if len(each.token_ends_s) < each.wanted]
        steps.append(tokens)
        step += 1
    return steps, ends


def gaps_s(request: Request) -> list[int]:
    """All gaps between a request's tokens; the decode set computes once a second."""
    assert all(
        start < stop for start, stop in request.decode_spans
    )  # who decodes for one step at a time leaves no empty ones
    gaps = [gap_fs // FS_PER_S for gap_fs in request.other_gaps_fs]
    return sorted(gaps + [1] * sum(stop - start for start, stop in request.decode_spans))


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9), st.integers(1, 14)), min_size=1, max_size=9),
    st.integers(1, 5),
)
def test_decodes_take_turns_by_the_rule_and_their_gaps_are_the_time_between_turns(arrivals, most) -> None:
    arrivals = sorted(arrivals)
    steps, ends = by_the_rule(arrivals, most)
    config = EngineConfig(num_gpu_blocks=400, block_size=4, max_num_seqs=16, max_num_batched_tokens=256)
    requests = [
        RequestSpec(request_id=f"r{number}", arrival_s=at, input_tokens=prompt, output_tokens=wanted)
        for number, (at, prompt, wanted) in enumerate(arrivals)
    ]
    log: list[dict[str, object]] = []
    record = run_world(
        config, FixedCost(1.0), requests, policy=micro_batches(most), check=True, decision_log=log.append
    )
    done = [{request_id: tokens for request_id, tokens, _ in entry["scheduled"]} for entry in log]
    assert [tokens for tokens in done if tokens] == [tokens for tokens in steps if tokens]
    for request in record.requests:
        token_ends = ends[request.request_id]
        assert gaps_s(request) == sorted(after - before for before, after in pairwise(token_ends))
        assert (request.first_token_fs, request.last_token_fs) == (token_ends[0] * FS_PER_S, token_ends[-1] * FS_PER_S)


def test_gaps_of_three_that_decode_two_at_a_time(drive) -> None:
    """A and B, then C and A, then B and C, and so on: who goes twice in a row waits 1 s, who rests in between 2 s."""
    engine = drive(**ROOMY, policy=micro_batches(2))
    made = [engine.add(name, 4, output_tokens=5) for name in "ABC"]
    assert [set(step.tokens) for step in engine.run()[1:]] == [set("AB"), set("AC"), set("BC")] * 2
    assert [gaps_s(request) for request in made] == [[1, 1, 1, 2], [1, 1, 2, 2], [1, 1, 2, 2]]


def test_a_turn_of_decodes_is_not_leapt_over_while_some_of_them_rest(drive) -> None:
    """Turns of six decode steps: with three that go two at a time the next step has others; with two it is the same six times."""
    engine = drive(**ROOMY, policy=micro_batches(2, Batching.DECODE_FIRST))
    for name, output_tokens in (("A", 30), ("B", 30), ("C", 3)):
        engine.add(name, 4, output_tokens=output_tokens)
    engine.step()
    for _ in range(3):
        plan = engine.plan()
        assert plan.repeat == 1
        engine.commit(plan)
    assert [request.request_id for request in engine.ended] == ["C"]
    engine.step()  # who rested in the last step catches up
    assert engine.plan().repeat > 1


# -- a decode step like any other ---------------------------------------------------------------------------------------


def test_the_new_token_ratio_falls_with_every_step_of_some_decodes(drive) -> None:
    """SGLang lowers it with each decode batch, however many decode in it (engine-policies §1.3.4)."""
    ratio = NewTokenRatio(RatioSettings())
    engine = drive(**ROOMY, policy=micro_batches(1, admission=lambda config: ratio))
    for name in "ABC":
        engine.add(name, 4, output_tokens=40, max_tokens=40)
    assert engine.step().tokens == {"A": 4, "B": 4, "C": 4}
    first = ratio.ratio(engine.core._scheduler.view)
    for _ in range(10):
        engine.step()
    assert ratio.ratio(engine.core._scheduler.view) == pytest.approx(first - 10 * ratio.settings.step)


def test_a_preemption_is_forgotten_after_64_steps_of_some_decodes(drive) -> None:
    """60 blocks; D's prompt takes 50, and when the others have grown to more than ten D gives way. The signal counts preemptions within
    64 decode steps: the rung is on from the next step to the 64th after it.
    """
    rung = Rung(action="micro_batch", signal="preemptions", on=1, off=1, hold_s=0.0, value=2)
    engine = drive(num_gpu_blocks=60, block_size=4, policy=micro_batches(2, ladder=LadderConfig(rungs=(rung,))))
    for name in "ABC":
        engine.add(name, 4, output_tokens=70)
    engine.add("D", 199, output_tokens=30)
    while not engine.log or not engine.log[-1]["preempted"]:
        engine.step()
    preempted_at = engine.log[-1]["step"]
    assert engine.log[-1]["preempted"] == ["D"]
    for _ in range(70):
        engine.step()
    moved = [(entry["step"] - preempted_at, *state) for entry in engine.log for state in entry["ladder"]]
    assert moved == [(1, "micro_batch", "on"), (64, "micro_batch", "off")]


def test_an_aborted_decode_of_a_micro_batch_does_not_get_the_token_of_its_last_step(drive) -> None:
    engine = drive(**ROOMY, policy=micro_batches(2))
    a, _, c = (engine.add(name, 4, output_tokens=9) for name in "ABC")
    engine.step()
    plan = engine.plan(max_repeat=1)
    assert engine.abort("A")
    assert engine.abort("C")
    engine.commit(plan)
    assert (a.num_output_tokens, c.num_output_tokens) == (1, 1)
    assert [set(step.tokens) for step in engine.run()] == [{"B"}] * 7


# -- who decodes alone ---------------------------------------------------------------------------------------------------


def test_a_block_that_a_decode_fills_can_be_found_at_once_if_its_content_is_named(drive) -> None:
    """What A will produce is named: once its eighth token is computed, a prompt that begins like that finds two blocks."""
    engine = drive(**ROOMY, policy=micro_batches(1))
    named = {"content_ids": ("x", "y", "z"), "content_block_tokens": 4}
    engine.add("A", 5, output_tokens=30, **named)
    engine.add("B", 5, output_tokens=30)
    for _ in range(6):  # the prompts, then A, B, A, B, A: A has computed its eighth token
        engine.step()
    found = engine.add("C", 9, **named)
    engine.step()
    assert found.prefix_hit_tokens == 8


def test_blocks_are_taken_in_order_of_admission_whoever_decodes_with_the_set(drive) -> None:
    """Blocks of one token. The older fills a block that others may find, and is served by itself; it takes its block first all the same."""
    engine = drive(num_gpu_blocks=40, block_size=1, policy=micro_batches(2))
    engine.add("A", 2, output_tokens=9, content_ids=tuple("abcdefgh"), content_block_tokens=1)
    engine.add("B", 2, output_tokens=9)
    engine.add("C", 2, output_tokens=9)
    engine.step()
    blocks = engine.step().tables
    assert (blocks["A"], blocks["B"]) == ((1, 2, 7), (3, 4, 8))


def test_a_sequence_that_shares_its_last_block_copies_it_when_its_turn_comes(drive) -> None:
    """Two samples of a prompt of 5 tokens share two blocks, the second with one token in it; whoever writes there first gets a copy."""
    engine = drive(**ROOMY, policy=micro_batches(1))
    for slot in (0, 1):
        fields = {"sample_of": "r", "slot": slot, "forking": Forking(width=2, change=0.0, seed=0)}
        engine.add(f"r#{slot}", 5, output_tokens=9, **fields)
    engine.step()
    first, second = engine.step(), engine.step()
    assert (first.plan.copies, second.plan.copies) == (((2, 3),), ())
    assert (first.tables, second.tables) == ({"r#0": (1, 3)}, {"r#1": (1, 2)})


def test_a_token_computed_for_a_request_that_had_ended_is_counted_as_discarded(drive) -> None:
    """The next step is planned before it is known that A stopped: A's turn, which nobody hears of."""
    engine = drive(**ROOMY, policy=micro_batches(2), async_scheduling=True)
    for name, output_tokens in (("A", 2), ("B", 9), ("C", 9)):
        engine.add(name, 4, output_tokens=output_tokens)
    engine.step()
    assert [engine.step().tokens for _ in range(3)] == [{"A": 1, "B": 1}, {"A": 1, "C": 1}, {"B": 1, "C": 1}]
    assert engine.ended[0].num_output_tokens == 2
    assert engine.core.discarded_tokens == 1


@st.composite
def forking_requests(draw: st.DrawFn) -> tuple[RequestSpec, ...]:
    made = []
    for number in range(draw(st.integers(1, 4))):
        width = draw(st.sampled_from([1, 2, 3]))
        made.append(
            RequestSpec(
                request_id=f"r{number}",
                arrival_s=draw(st.integers(0, 5)) * 1.0,
                input_tokens=draw(st.integers(1, 14)),
                output_tokens=draw(st.integers(1, 16)),
                n=width,
                forking=None if width == 1 else Forking(width=width, change=draw(st.sampled_from([0.0, 0.4])), seed=3),
                cancel_after_s=draw(st.sampled_from([None, None, 4.0, 9.0])),
            )
        )
    return tuple(made)


@settings(max_examples=100)
@given(
    forking_requests(),
    st.integers(1, 3),
    st.sampled_from(Batching),
    st.sampled_from([12, 16, 40]),
    st.sampled_from([None, 6]),
)
def test_beams_and_windows_decode_in_turns_and_give_everything_back(requests, most, batching, blocks, window) -> None:
    """The books are checked after every event; whoever stays gets all its tokens."""
    config = EngineConfig(
        num_gpu_blocks=blocks,
        block_size=4,
        max_model_len=32,
        max_num_seqs=8,
        max_num_batched_tokens=40,
        sliding_window=window,
        enable_prefix_caching=window is None,
    )
    record = run_world(config, FixedCost(1.0), requests, policy=micro_batches(most, batching), check=True)
    assert {request.outcome for request in record.requests} <= {Outcome.FINISHED, Outcome.ABORTED}
    for request in record.requests:
        if request.outcome is Outcome.FINISHED:
            assert request.num_output_tokens == request.spec.output_tokens
    assert record.recorders[0].core.pool.num_owned == 0
