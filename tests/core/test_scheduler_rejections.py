"""What can never be served is refused at arrival; what outgrows the pool fails alone.

Source: vLLM V1, engine-policies §1.1.2 to §1.1.5.
"""

from __future__ import annotations

import pytest

from sim.core.request import Outcome


@pytest.mark.parametrize(
    ("input_tokens", "max_tokens", "code", "numbers"),
    [
        (30, 11, "exceeds_max_model_len", "30 prompt + 11 output tokens = 41, but max_model_len is 40 tokens"),
        (40, None, "exceeds_max_model_len", "40 prompt + 1 output tokens = 41, but max_model_len is 40 tokens"),
        (
            30,
            4,
            "exceeds_kv_pool",
            "30 prompt + 4 output tokens need 9 KV blocks of 4 tokens, but the whole pool has 8 (32 tokens)",
        ),
        (
            33,
            None,
            "exceeds_kv_pool",
            "33 prompt + 1 output tokens need 9 KV blocks of 4 tokens, but the whole pool has 8 (32 tokens)",
        ),
    ],
)
def test_what_can_never_be_served_is_rejected_at_arrival_with_the_numbers(
    drive, input_tokens, max_tokens, code, numbers
):
    engine = drive(num_gpu_blocks=8, block_size=4, max_model_len=40)
    request = engine.add("never", input_tokens, output_tokens=20, max_tokens=max_tokens)
    assert request.outcome is Outcome.REJECTED
    assert (request.finish_reason, request.reason, request.retry_after_s) == (code, numbers, None)
    assert request.ended_fs == request.arrival_fs == 0
    assert engine.core.num_unfinished == 0
    engine.add("next", 4)
    engine.step()
    assert engine.log[0]["rejected"] == [("never", numbers)]


@pytest.mark.parametrize(("input_tokens", "max_tokens"), [(30, 3), (32, 1), (32, None), (1, 32)])
def test_what_just_fits_is_served(drive, input_tokens, max_tokens):
    """8 blocks of 4: prompt + output - 1 = 32 tokens are kept."""
    engine = drive(num_gpu_blocks=8, block_size=4, max_model_len=40)
    request = engine.add("fits", input_tokens, output_tokens=max_tokens or 1, max_tokens=max_tokens)
    engine.run()
    assert (request.outcome, request.peak_blocks) == (Outcome.FINISHED, 8)


def test_a_request_without_a_cap_ends_at_the_longest_sequence(drive):
    """max_model_len 40, prompt 30: 10 tokens, and the reason is length."""
    engine = drive(num_gpu_blocks=20, block_size=4, max_model_len=40)
    request = engine.add("long", 30, output_tokens=500)
    engine.run()
    assert (request.outcome, request.num_output_tokens, request.finish_reason) == (Outcome.FINISHED, 10, "length")


def test_a_request_that_outgrows_the_pool_fails_with_numbers_and_all_others_finish(drive):
    """10 blocks of 4. "endless" never stops; when it alone would need an 11th block, for its 41st token, it fails. Older requests are
    never touched; younger ones may have to wait or start again, and finish with every token they asked for."""
    engine = drive(num_gpu_blocks=10, block_size=4)
    older = engine.add("older", 4, output_tokens=12)
    endless = engine.add("endless", 8, output_tokens=1000)
    younger = [engine.add(f"younger {index}", 6, output_tokens=9) for index in range(5)]
    engine.run()
    assert endless.outcome is Outcome.FAILED
    assert endless.reason == "grew to 41 tokens, which need 11 KV blocks of a pool of 10"
    assert endless.num_output_tokens == 33  # 40 tokens are in the cache, the 41st is known
    assert (older.outcome, older.num_output_tokens, older.num_preemptions) == (Outcome.FINISHED, 12, 0)
    assert [(request.outcome, request.num_output_tokens) for request in younger] == [(Outcome.FINISHED, 9)] * 5
    assert engine.pool.num_free == 10


def test_blocks_of_a_request_that_fails_are_released_in_the_log(drive):
    engine = drive(num_gpu_blocks=2, block_size=4)
    engine.add("endless", 8, output_tokens=1000)
    engine.add("next", 4)
    engine.run()
    assert engine.log[1]["released"] == [("endless", [1, 2])]
    assert engine.log[1]["admitted"] == ["next"]
    assert engine.log[1]["preempted"] == []
