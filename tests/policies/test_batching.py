"""What may share a step: turns of prompts and decodes, and how much of each a step takes. By hand; blocks hold 4 tokens."""

from __future__ import annotations

import pytest

import sim
from sim.core.batching import Batching, BatchLimits
from sim.core.config import ConfigError
from sim.core.policy import Policy
from sim.core.request import Outcome
from tests.support.engine_driver import tokens_of

ROOMY = {"num_gpu_blocks": 100, "block_size": 4}


def with_limits(batching=Batching.MIXED, **limits):
    return Policy(batching=batching, limits=BatchLimits(**limits))


# -- turns -----------------------------------------------------------------------------------------------------------------


def test_a_prompt_waits_for_the_end_of_the_decodes_turn(drive):
    """Turns of 3: after A's prompt three steps are decodes; B, which came during the first of them, has its step then."""
    engine = drive(**ROOMY, policy=with_limits(Batching.DECODE_FIRST, continuous_decode_steps=3))
    engine.add("A", 4, output_tokens=8)
    engine.step()
    engine.step()
    engine.add("B", 6, output_tokens=2)
    assert tokens_of(engine.step() for _ in range(4)) == [{"A": 1}, {"A": 1}, {"B": 6}, {"A": 1, "B": 1}]


def test_a_long_prompt_and_the_decodes_take_turns(drive):
    """10 tokens in chunks of 4, turns of 2: between two chunks every decode gets two tokens, so its gap is at most one chunk."""
    engine = drive(
        **ROOMY, max_num_batched_tokens=4, policy=with_limits(Batching.DECODE_FIRST, continuous_decode_steps=2)
    )
    engine.add("A", 4, output_tokens=20)
    engine.step()
    engine.add("B", 10, output_tokens=3)
    a, b4, both = {"A": 1}, {"B": 4}, {"A": 1, "B": 1}
    assert tokens_of(engine.step() for _ in range(10)) == [a, a, b4, a, a, b4, a, a, {"B": 2}, both]


def test_nobody_waits_for_a_turn_in_which_nothing_decodes(drive):
    engine = drive(**ROOMY, policy=with_limits(Batching.DECODE_FIRST, continuous_decode_steps=50))
    engine.add("A", 4, output_tokens=1)
    engine.step()
    engine.add("B", 4, output_tokens=1)
    assert engine.step().tokens == {"B": 4}


def test_decodes_are_leapt_over_to_the_end_of_their_turn_and_on_when_nobody_waits(drive):
    engine = drive(**ROOMY, policy=with_limits(Batching.DECODE_FIRST, continuous_decode_steps=6))
    engine.add("A", 4, output_tokens=60)
    engine.commit(engine.plan())
    engine.add("B", 4, output_tokens=2)
    turn = engine.plan()
    assert turn.repeat == 6
    engine.commit(turn)
    engine.commit(engine.plan())  # B's prompt
    engine.commit(engine.plan())  # B ends in the first step of the next turn
    assert engine.plan().repeat > 6


# -- budgets of their own --------------------------------------------------------------------------------------------------


def test_prompts_have_a_token_budget_of_their_own(drive):
    """8 prompt tokens a step, though a step could take 64: A's decode and 8 tokens of B and C."""
    engine = drive(**ROOMY, max_num_batched_tokens=64, policy=with_limits(max_prefill_tokens=8))
    engine.add("A", 4, output_tokens=9)
    engine.step()
    engine.add("B", 12)
    engine.add("C", 10)
    assert tokens_of(engine.step() for _ in range(3)) == [{"A": 1, "B": 8}, {"A": 1, "B": 4, "C": 4}, {"A": 1, "C": 6}]


def test_at_most_so_many_prompts_share_a_step(drive):
    engine = drive(**ROOMY, max_num_batched_tokens=64, policy=with_limits(max_prefill_seqs=2))
    for name in "ABCDE":
        engine.add(name, 4, output_tokens=1)
    assert tokens_of(engine.run()) == [{"A": 4, "B": 4}, {"C": 4, "D": 4}, {"E": 4}]


def test_a_micro_batch_of_decodes_goes_round(drive):
    """Three decode, two at a time: who has waited longest for a token goes first, and all end with all their tokens."""
    engine = drive(**ROOMY, policy=with_limits(max_decode_seqs=2))
    for name in "ABC":
        engine.add(name, 4, output_tokens=5)
    assert engine.step().tokens == {"A": 4, "B": 4, "C": 4}
    assert [set(step.tokens) for step in (engine.step() for _ in range(3))] == [{"A", "B"}, {"A", "C"}, {"B", "C"}]
    engine.run()
    assert [request.num_output_tokens for request in engine.ended] == [5, 5, 5]


def test_under_block_pressure_those_who_rest_may_give_way(drive):
    """4 blocks; A decodes, C computes a long prompt and rests in A's turn. When A needs a block, C gives its up, and ends later."""
    engine = drive(
        num_gpu_blocks=4,
        block_size=4,
        max_num_batched_tokens=4,
        policy=with_limits(Batching.DECODE_FIRST, continuous_decode_steps=2),
        reserve_full_prompt=False,
    )
    a = engine.add("A", 4, output_tokens=8)
    engine.step()
    c = engine.add("C", 11, output_tokens=1)
    engine.run()
    assert (a.outcome, c.outcome) == (Outcome.FINISHED, Outcome.FINISHED)
    assert (a.num_preemptions, c.num_preemptions) == (0, 1)


# -- what cannot be ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "settings", "words"),
    [
        ({"max_prefill_seqs": 0}, {}, "max_prefill_seqs is 0; it must be at least 1"),
        ({"continuous_decode_steps": 4}, {}, "continuous_decode_steps is 4, but batching mixed takes no turns"),
        ({"max_decode_seqs": 9}, {"max_num_seqs": 8}, r"max_decode_seqs \(9\) is above max_num_seqs \(8\)"),
        ({"max_prefill_seqs": 9}, {"max_num_seqs": 8}, r"max_prefill_seqs \(9\) is above max_num_seqs \(8\)"),
        (
            {"max_prefill_tokens": 100},
            {"enable_chunked_prefill": False, "max_model_len": 128, "max_num_batched_tokens": 128},
            r"max_prefill_tokens \(100\) must be at least max_model_len \(128\)",
        ),
    ],
)
def test_impossible_limits_are_refused_with_the_reason(drive, limits, settings, words):
    with pytest.raises(ConfigError, match=words):
        drive(**ROOMY, **settings, policy=with_limits(**limits))


SCENARIO = sim.Scenario(
    model="llama-3.1-8b",
    gpu="h100-sxm-80gb",
    workload={"workload": "uniform", "input_tokens": 3000, "output_tokens": 60, "num_requests": 40, "rate": 20.0},
    engine={"max_num_seqs": 32, "max_num_batched_tokens": 4096},
)


def test_a_scenario_file_sets_them_and_they_do_what_they_are_for():
    """Chunks of 512 beside the decodes, or turns, keep the gaps between tokens shorter than whole prompts do."""
    whole, small, turns = (
        sim.simulate(SCENARIO.with_(policy=policy)).summary
        for policy in (
            {"policy": "vllm-v1"},
            {"policy": "vllm-v1", "max_prefill_tokens": 512, "max_prefill_seqs": 2},
            {"policy": "vllm-v1", "batching": "decode_first", "max_prefill_tokens": 512, "continuous_decode_steps": 4},
        )
    )
    assert small["itl_s"]["p99"] < whole["itl_s"]["p99"]
    assert turns["itl_s"]["p50"] < whole["itl_s"]["p50"]
    assert turns["finished"] == whole["finished"] == 40


def test_a_scenario_with_impossible_limits_is_refused_before_anything_runs():
    with pytest.raises(ConfigError, match=r"max_decode_seqs \(64\) is above max_num_seqs \(32\)"):
        sim.simulate(SCENARIO.with_(max_decode_seqs=64))
