"""Faults that real engines had, on the real pool: rows of the public-bugs reference that are marked P. One test a row, or more.

Admission and preemption.

row  test
B02  test_b02_a_chunk_takes_the_blocks_that_were_predicted
B09  test_b09_nobody_starts_while_somebody_is_swapped_out_and_a_full_cpu_pool_kills_nobody
B10  test_b10_a_decode_without_room_ends_that_request_alone
B11  test_b11_a_prompt_of_whole_blocks_always_computes_something
B12  test_b12_after_a_resume_the_device_holds_what_the_length_needs
B15  test_b15_victims_are_taken_one_by_one_and_nobody_s_answer_changes
"""

from __future__ import annotations

import pytest

from sim.core.need import blocks_for
from sim.core.request import Outcome
from tests.support.real_driver import RealDriver, spec


def test_b02_a_chunk_takes_the_blocks_that_were_predicted():
    """bs 2, W 8: at lengths 4, 8, 12 and 16 two new blocks each, and the answer is that of a whole prompt."""
    driver = RealDriver(
        [spec("r", 16, 3)], num_gpu_blocks=12, block_size=2, window=8, max_num_batched_tokens=4, max_num_seqs=2
    )
    driver.add()
    seen: set[int] = set()
    for _ in range(4):
        (share,) = driver.step().shares
        table = set(share.block_table) - {0}
        assert len(table - seen) == 2
        seen |= table
        assert driver.executor.pool.tags.num_held == len(table)
    driver.run()
    assert driver.right_answers()


def test_b09_nobody_starts_while_somebody_is_swapped_out_and_a_full_cpu_pool_kills_nobody():
    specs = [spec(f"r{i}", 10 + i, 24) for i in range(8)]
    driver = RealDriver(
        specs, num_gpu_blocks=14, block_size=4, preset="vllm-v0", num_cpu_blocks=6, max_num_seqs=6, max_num_batched_tokens=64,
        enable_prefix_caching=False,
    )  # fmt: skip
    driver.add()
    away: set[str] = set()
    preempted: set[str] = set()
    swaps = recomputed = 0
    while driver.core.num_unfinished:
        plan = driver.step().plan
        away -= {name for name, _ in plan.swap_ins}
        starting = set(plan.admitted) - {name for name, _ in plan.swap_ins}
        assert not (away and starting), f"{starting} start while {away} are swapped out"
        saved = {name for name, _ in plan.swap_outs}
        swaps += len(saved)
        recomputed += len(set(plan.preempted) - saved)
        preempted |= set(plan.preempted)
        away |= saved
    driver.executor.close(driver.core.untold)
    assert swaps and recomputed, "the CPU pool is to be used, and to be too small"
    assert {request.outcome for request in driver.requests.values()} == {Outcome.FINISHED}
    assert driver.executor.leaked_blocks == 0
    assert driver.right_answers(*preempted)


def test_b10_a_decode_without_room_ends_that_request_alone():
    """2 blocks of 256, a prompt that fills both: the first decode needs a third."""
    driver = RealDriver([spec("r", 512, 2), spec("other", 500, 3)], num_gpu_blocks=2, block_size=256)
    first = driver.add("r")
    driver.step()
    driver.add("other")
    driver.run()
    assert first.outcome is Outcome.FAILED
    assert "3 KV blocks of a pool of 2" in first.reason
    assert driver.requests["other"].outcome is Outcome.FINISHED
    assert driver.right_answers()


def test_b11_a_prompt_of_whole_blocks_always_computes_something():
    """bs 256, a prompt of 512 twice: the second finds 256 tokens and computes 256. No kernel is launched for no tokens."""
    named = {"content_ids": ("p", "q"), "content_block_tokens": 256}
    driver = RealDriver(
        [spec("first", 512, 2, **named), spec("second", 512, 2, **named)], num_gpu_blocks=8, block_size=256
    )
    driver.add("first")
    driver.serve()
    second = driver.add("second")
    assert driver.step().tokens == {"second": 256}
    driver.run()
    assert second.prefix_hit_tokens == 256
    assert driver.answer("first") == driver.answer("second") == driver.undisturbed("second")


def test_b11_many_copies_of_a_prompt_of_one_block():
    """The real row has 513 copies of 256 tokens; here 33 of 16."""
    specs = [spec(f"copy {i}", 16, 1, content_ids=("p",), content_block_tokens=16) for i in range(33)]
    driver = RealDriver(specs, num_gpu_blocks=40, block_size=16)
    driver.add()
    steps = driver.run()
    assert [count for step in steps for count in step.tokens.values()] == [16] * 33
    assert len({tuple(driver.answer(name)) for name in driver.requests}) == 1
    assert driver.answer("copy 0") == driver.undisturbed("copy 0")


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_b12_after_a_resume_the_device_holds_what_the_length_needs(enable_prefix_caching):
    """bs 256, 5 blocks: the younger is preempted with 257 tokens computed, and resumes with 258 to compute."""
    driver = RealDriver(
        [spec("older", 761, 20), spec("younger", 250, 15)],
        num_gpu_blocks=5, block_size=256, enable_prefix_caching=enable_prefix_caching,
    )  # fmt: skip
    driver.add()
    resumed = False
    while driver.core.num_unfinished:
        step = driver.step()
        resumed |= "younger" in step.plan.admitted and step.plan.step > 0
        for share in step.shares:
            assert len(share.block_table) == blocks_for(share.context_tokens + share.num_tokens, 256)
    driver.executor.close(driver.core.untold)
    assert resumed
    assert driver.requests["younger"].num_preemptions == 1
    assert driver.executor.leaked_blocks == 0
    assert driver.right_answers()


def test_b15_victims_are_taken_one_by_one_and_nobody_s_answer_changes():
    """Pages of 8, 37 requests at a page boundary, 8 free: a deficit of 29. Each victim lowers the need by 1 and frees 1, so 15 go."""
    specs = [spec(f"r{i}", 8, 2) for i in range(37)]
    driver = RealDriver(specs, num_gpu_blocks=37 + 8, block_size=8, enable_prefix_caching=False)
    driver.add()
    driver.step()
    assert driver.core.pool.num_free == 8
    step = driver.step()
    names = [item.request_id for item in specs]
    assert list(step.plan.preempted) == names[:21:-1]
    assert list(step.tokens) == names[:22]
    driver.run()
    assert {request.outcome for request in driver.requests.values()} == {Outcome.FINISHED}
    assert driver.right_answers("r0", "r21", "r22", "r36")
