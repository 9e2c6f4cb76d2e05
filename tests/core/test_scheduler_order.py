"""Who is scheduled in a step, and for how many tokens: order, token and sequence budgets, gate and watermark.

Source: vLLM V1, engine-policies §1.1.2 to §1.1.5.
"""

from __future__ import annotations

import pytest

from sim.core.config import ConfigError, EngineConfig
from sim.core.request import Outcome
from tests.support.engine_driver import tokens_of


def test_running_requests_come_first_and_a_waiting_prompt_gets_what_is_left(drive):
    """Budget 8: one decode token, then 7 of the prompt's 20; the running pass comes before the waiting pass in every step."""
    engine = drive(num_gpu_blocks=50, block_size=4, max_num_batched_tokens=8)
    engine.add("old", 8, output_tokens=5)
    assert engine.step().tokens == {"old": 8}
    engine.add("new", 20, output_tokens=2)
    assert tokens_of(engine.run()) == [
        {"old": 1, "new": 7},
        {"old": 1, "new": 7},
        {"old": 1, "new": 6},
        {"old": 1, "new": 1},
    ]


def test_a_prompt_under_way_is_finished_before_another_is_started(drive):
    """Budget 8, prompts of 12 and 12: 8 | 4 + 4 | 8."""
    engine = drive(num_gpu_blocks=50, block_size=4, max_num_batched_tokens=8)
    engine.add("A", 12)
    engine.add("B", 12)
    assert tokens_of(engine.run()) == [{"A": 8}, {"A": 4, "B": 4}, {"B": 8}]


def test_only_the_chunk_that_ends_a_prompt_samples(drive):
    engine = drive(num_gpu_blocks=50, block_size=4, max_num_batched_tokens=8)
    request = engine.add("A", 20)
    samples, first_tokens = [], []
    while (plan := engine.plan()) is not None:
        samples.append(plan.scheduled(0)[0].samples)
        assert plan.shape.sampled_seqs == samples[-1]
        engine.commit(plan)
        first_tokens.append(request.num_output_tokens)
    assert samples == [False, False, True]
    assert first_tokens == [0, 0, 1]


@pytest.mark.parametrize("prompt", [1, 7, 8, 9, 16, 23])
@pytest.mark.parametrize("output", [1, 2, 9])
def test_every_token_but_the_last_is_computed_exactly_once(drive, prompt, output):
    """Without pressure a request computes prompt + output - 1 tokens: the last sampled token is never fed back."""
    engine = drive(num_gpu_blocks=20, block_size=4, max_num_batched_tokens=8)
    request = engine.add("A", prompt, output_tokens=output)
    assert sum(step.tokens["A"] for step in engine.run()) == prompt + output - 1
    assert request.num_output_tokens == output
    assert request.peak_blocks == -(-(prompt + output - 1) // 4)


def test_the_head_of_the_queue_is_not_overtaken_when_blocks_are_short(drive):
    """6 blocks, 4 in use. The head needs 3; a request of 1 block behind it would fit, and waits."""
    engine = drive(num_gpu_blocks=6, block_size=4)
    engine.add("running", 13, output_tokens=3)
    engine.step()
    engine.add("head", 12)
    engine.add("small", 4)
    assert tokens_of(engine.run()) == [{"running": 1}, {"running": 1}, {"head": 12, "small": 4}]


def test_the_head_of_the_queue_is_not_overtaken_when_tokens_are_short(drive):
    """Without chunked prefill a prompt needs its whole length of the budget; of 32, 12 are left: neither the head's 16 tokens nor,
    behind it, 4 are started."""
    engine = drive(
        num_gpu_blocks=50, block_size=4, max_num_batched_tokens=32, max_model_len=32, enable_chunked_prefill=False
    )
    engine.add("first", 20)
    engine.add("head", 16)
    engine.add("small", 4)
    assert tokens_of(engine.run()) == [{"first": 20}, {"head": 16, "small": 4}]


def test_with_chunked_prefill_the_head_takes_what_is_left(drive):
    """The same three prompts with it: 20 + 12 of 16, then the last 4 and the 4 behind."""
    engine = drive(num_gpu_blocks=50, block_size=4, max_num_batched_tokens=32, max_model_len=32)
    engine.add("first", 20)
    engine.add("head", 16)
    engine.add("small", 4)
    assert tokens_of(engine.run()) == [{"first": 20, "head": 12}, {"head": 4, "small": 4}]


def test_without_chunked_prefill_a_prompt_longer_than_a_step_is_a_contradiction():
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(64\) must be at least max_model_len \(65\)"):
        EngineConfig(
            num_gpu_blocks=10,
            max_num_batched_tokens=64,
            max_num_seqs=4,
            max_model_len=65,
            enable_chunked_prefill=False,
        )


def test_no_more_than_max_num_seqs_run(drive):
    """2 of 3 start; the third starts in the step after the first is done."""
    engine = drive(num_gpu_blocks=50, block_size=4, max_num_seqs=2)
    engine.add("A", 4, output_tokens=2)
    engine.add("B", 4, output_tokens=4)
    engine.add("C", 4)
    assert tokens_of(engine.run()) == [{"A": 4, "B": 4}, {"A": 1, "B": 1}, {"B": 1, "C": 4}, {"B": 1}]


@pytest.mark.parametrize(("prompt", "starts"), [(16, True), (17, False)])
def test_the_last_free_block_can_be_had(drive, prompt, starts):
    """8 blocks, 4 in use, 4 free: 16 tokens start, 17 do not."""
    engine = drive(num_gpu_blocks=8, block_size=4)
    engine.add("running", 13, output_tokens=2)
    engine.step()
    engine.add("new", prompt)
    assert ("new" in engine.step().tokens) is starts


@pytest.mark.parametrize(("reserve_full_prompt", "chunks"), [(True, [0, 0, 8, 8, 4]), (False, [7, 7, 6])])
def test_the_full_prompt_gate_asks_for_all_of_a_prompt_not_for_its_first_chunk(drive, reserve_full_prompt, chunks):
    """Budget 8, 6 blocks of 4, 2 in use: of a 20-token prompt (5 blocks) the chunks 7, 14 and 20 need 2, 4 and 5 blocks. The running
    request ends in the second step, so the third chunk finds room; the gate waits for that from the start."""
    engine = drive(num_gpu_blocks=6, block_size=4, max_num_batched_tokens=8, reserve_full_prompt=reserve_full_prompt)
    engine.add("running", 5, output_tokens=3)
    engine.step()
    engine.add("long", 20)
    assert [step.tokens.get("long", 0) for step in engine.run()] == chunks


@pytest.mark.parametrize(("prompt", "starts"), [(16, True), (17, False)])
def test_the_watermark_stays_free_for_running_requests(drive, prompt, starts):
    """20 blocks, watermark 0.25: 5 stay free. 11 in use, 9 free: a prompt of 4 blocks starts, one of 5 does not."""
    engine = drive(num_gpu_blocks=20, block_size=4, watermark=0.25)
    engine.add("running", 41, output_tokens=2)
    engine.step()
    engine.add("new", prompt)
    assert ("new" in engine.step().tokens) is starts


def test_the_watermark_is_waived_when_nothing_runs(drive):
    """20 blocks, watermark 0.25: the first prompt may have all 20; the second, no longer alone, waits until the first is done."""
    engine = drive(num_gpu_blocks=20, block_size=4, watermark=0.25)
    engine.add("whole pool", 80)
    engine.add("next", 4)
    assert tokens_of(engine.run()) == [{"whole pool": 80}, {"next": 4}]


def test_the_watermark_does_not_hold_running_requests_back(drive):
    """5 blocks, watermark 0.8: a request of 1 block grows to all 5."""
    engine = drive(num_gpu_blocks=5, block_size=4, watermark=0.8)
    request = engine.add("A", 4, output_tokens=17)
    engine.run()
    assert (request.outcome, request.peak_blocks, request.num_preemptions) == (Outcome.FINISHED, 5, 0)


def test_a_free_engine_has_nothing_to_plan(drive):
    engine = drive(num_gpu_blocks=5, block_size=4)
    assert engine.plan() is None
    engine.add("A", 4)
    engine.run()
    assert engine.plan() is None
    assert engine.core.steps == 1
