"""Blocks that slide out of a sliding window: when, in whose books, and what it saves.

Source: vLLM V1, engine-policies §1.1.2 to §1.1.5.
"""

from __future__ import annotations

import pytest

from sim.core.need import skipped_blocks
from sim.core.request import Outcome
from tests.support.engine_driver import content


@pytest.mark.parametrize("window", [1, 2, 7, 8, 9, 100])
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_a_block_is_skipped_when_no_later_token_attends_to_any_of_its_tokens(window, block_size):
    """The token at position p attends to (p - window, p]; with C tokens computed the next one is at position C."""
    for computed in range(60):
        seen_from = max(computed - window + 1, 0)
        skipped = sum(
            all(token < seen_from for token in range(block * block_size, (block + 1) * block_size))
            for block in range(60 // block_size)
        )
        assert skipped_blocks(computed, block_size, window) == skipped
        assert skipped_blocks(computed, block_size, None) == 0


def test_hits_that_are_out_of_the_window_are_not_taken(drive):
    """Window 8, blocks of 4: of 4 hit blocks (16 tokens), (16 - 8 + 1) // 4 = 2 are out of sight: no block stands in their place."""
    engine = drive(num_gpu_blocks=20, block_size=4, sliding_window=8, max_num_batched_tokens=32)
    prompt = content("a", "b", "c", "d", "e", tokens=4)
    engine.add("first", 20, **prompt)
    assert engine.step().tables == {"first": (1, 2, 3, 4, 5)}
    again = engine.add("again", 20, **prompt)
    step = engine.step()
    assert step.tokens == {"again": 4}
    assert step.tables == {"again": (0, 0, 3, 4, 6)}
    assert again.prefix_hit_tokens == 16


def test_a_window_gives_blocks_back_while_the_request_runs(drive):
    """Window 8, blocks of 4: with C tokens computed, (C - 7) // 4 blocks have slid out, so 3 are enough for any decode."""
    engine = drive(num_gpu_blocks=20, block_size=4, sliding_window=8, max_num_batched_tokens=4)
    request = engine.add("A", 4, output_tokens=60)
    held = []
    while (step := engine.step()) is not None:
        held.append(sum(1 for block in step.tables["A"] if block))
    assert max(held) == 3
    assert (request.peak_blocks, request.num_output_tokens) == (3, 60)
    assert engine.pool.num_free == 20


def test_a_preemption_does_not_fail_a_windowed_request_that_the_pool_can_hold(drive):
    """Window 8, blocks of 2, budget 4: decoding holds at most 5 blocks, a restart in chunks of 4 at most 6, and 6 are there. The cap of
    the gate, ceil(11 / 2) + 1 = 7, is a bound, not a need: it may turn the request away at arrival, not kill it on the way."""
    engine = drive(
        num_gpu_blocks=6,
        block_size=2,
        sliding_window=8,
        max_num_batched_tokens=4,
        scheduling_policy="priority",
        enable_prefix_caching=False,
    )
    request = engine.add("low", 4, output_tokens=40, priority=9)
    for _ in range(20):
        engine.step()
    engine.add("top", 1, output_tokens=20, priority=0)
    engine.run()
    assert request.outcome in (Outcome.FINISHED, Outcome.REJECTED)


def test_the_log_shows_the_blocks_that_slid_out_of_the_window_as_released(drive):
    """A block is given to nobody who reads the log before the log says that its holder gave it back."""
    engine = drive(
        num_gpu_blocks=4, block_size=4, sliding_window=8, max_num_batched_tokens=4, enable_prefix_caching=False
    )
    engine.add("A", 4, output_tokens=30)
    engine.run()
    held = set()
    for entry in engine.log:
        held.difference_update(block for _, blocks in entry["released"] for block in blocks)
        for _request_id, _num_tokens, blocks in entry["scheduled"]:
            assert held.isdisjoint(blocks)
            held.update(blocks)


def test_tokens_that_slid_out_of_the_window_do_not_fill_slots(drive):
    """Slots in block tables and the tokens in them are counted for fragmentation: never more tokens than slots."""
    engine = drive(num_gpu_blocks=20, block_size=4, sliding_window=8, max_num_batched_tokens=4)
    engine.add("A", 4, output_tokens=20)
    while (plan := engine.plan()) is not None:
        committed = engine.commit(plan)
        assert 0 < committed.written_tokens <= committed.table_slots[0]
