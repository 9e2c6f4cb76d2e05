"""Golden traces of vLLM V1 semantics, number by number.

Source: engine-policies §1.13, traces T1 to T8 and T12; each docstring repeats the trace. Our pool has block ids 1 to N, all
usable: vLLM's "N=5, usable 1 to 4" is `num_gpu_blocks=4` here, and id 0 stands for "no block". T9 and T10 belong to policies
that reserve and to asynchronous loads, T13 and T14 to SGLang (T13's situation is B15 in test_public_bugs_scheduling.py).
"""

from __future__ import annotations

import pytest

from sim.core.blocks import NO_BLOCK, BlockPool
from sim.core.need import admission_blocks, new_blocks
from sim.core.request import Outcome
from sim.core.tables import BlockTable, BlockTables

A, B, C, D = "a", "b", "c", "d"


def cached_table(tables: BlockTables, owner: str, tokens: int, keys: range) -> BlockTable:
    """A table whose full blocks are registered under `keys`."""
    table = BlockTable(owner)
    assert tables.grow(table, 0, tokens) is not None
    tables.pool.index.add(table.blocks, keys)
    return table


# -- T1: blocks 1, 2, 3 (12 tokens) are freed -> queue [4, 3, 2, 1]; 2 more take 4 and 3, so 3 can no longer be found ------


def test_t1_the_tail_of_a_freed_sequence_is_reused_first():
    tables = BlockTables(BlockPool(4), block_size=4)
    pool = tables.pool
    a = cached_table(tables, "A", 12, range(101, 104))
    assert a.blocks == [1, 2, 3]
    tables.release(a, "A finished")
    assert pool.peek(4) == [4, 3, 2, 1]
    assert pool.find([101, 102, 103]) == [1, 2, 3]

    b = BlockTable("B")
    assert tables.grow(b, 0, 8).new_blocks == [4, 3]
    assert pool.find([101, 102, 103]) == [1, 2]
    assert pool.index.key_of(3) is None
    assert (pool.num_free, pool.num_cached) == (2, 2)
    pool.check([("B", b.blocks)])


def test_t1_through_the_engine(drive):
    """The second visitor brings a 13th token, so that the cap of floor(12 / 4) = 3 blocks is not what limits it to 2."""
    engine = drive(num_gpu_blocks=4, block_size=4)
    shared = {"content_ids": (A, B, C), "content_block_tokens": 4}
    engine.add("first", 12, **shared)
    assert engine.step().tables == {"first": (1, 2, 3)}
    engine.add("other", 8)
    assert engine.step().tables == {"other": (4, 3)}

    again = engine.add("again", 13, **shared)
    step = engine.step()
    assert step.tokens == {"again": 13 - 8}
    assert step.tables["again"][:2] == (1, 2)
    assert again.prefix_hit_tokens == 8


# -- T2: a fully cached 16-token prompt hits 12 tokens and recomputes 4 into a new block; the old 4th block stays cached ----


def test_t2_a_fully_cached_prompt_recomputes_its_last_block_into_a_new_one(drive):
    engine = drive(num_gpu_blocks=5, block_size=4)
    shared = {"content_ids": (A, B, C, D), "content_block_tokens": 4}
    engine.add("first", 16, **shared)
    assert engine.step().tables == {"first": (1, 2, 3, 4)}

    again = engine.add("again", 16, **shared)
    plan = engine.plan()
    (scheduled,) = plan.scheduled(0)
    assert (scheduled.num_tokens, scheduled.context_tokens) == (4, 12)
    assert scheduled.block_table == (1, 2, 3, 5)
    assert again.prefix_hit_tokens == 12
    assert engine.pool.ref_cnt(4) == 0
    assert (engine.pool.num_free, engine.pool.num_cached) == (1, 1)  # the old 4th block, and it can still be found

    engine.commit(plan)
    longer = engine.add("longer", 17, **shared)
    assert engine.step().tokens == {"longer": 1}
    assert longer.prefix_hit_tokens == 16


# -- T3: 3 blocks free, 2 of them the request's hits (nobody holds them); it needs 4 blocks: 2 + 2 = 4 > 3 -> no, no change -


def test_t3_hits_that_nobody_holds_cost_capacity():
    tables = BlockTables(BlockPool(5), block_size=4)
    pool = tables.pool
    a = cached_table(tables, "A", 8, range(101, 103))
    holder = BlockTable("holder")
    tables.grow(holder, 0, 8)
    tables.release(a, "A finished")
    hits = pool.find([101, 102, 103, 104])
    assert (hits, pool.num_free) == ([1, 2], 3)

    r = BlockTable("R")
    assert tables.need(r, 0, 8, hits) == 2 + 2
    before = (pool.peek(3), pool.num_free, pool.num_cached, [pool.ref_cnt(block) for block in range(1, 6)])
    assert tables.grow(r, 0, 8, hits) is None
    assert (pool.peek(3), pool.num_free, pool.num_cached, [pool.ref_cnt(block) for block in range(1, 6)]) == before
    assert r.blocks == []
    pool.check([("holder", holder.blocks)])


def test_t3_through_the_engine(drive):
    """Pool of 5: the holder keeps 2 (8 tokens in the batch, decoding into its second block), 2 hits are cached, 1 was never used.

    The prompt of 16 tokens needs 4 blocks; it waits while the holder lives, and starts in the step after the holder is gone.
    """
    engine = drive(num_gpu_blocks=5, block_size=4)
    shared = {"content_ids": (A, B), "content_block_tokens": 4}
    engine.add("first", 8, **shared)
    engine.step()
    engine.add("holder", 5, output_tokens=3)
    assert engine.step().tokens == {"holder": 5}
    engine.add("R", 16, **shared)
    assert engine.pool.num_free == 3
    assert [engine.step().tokens for _ in range(2)] == [{"holder": 1}, {"holder": 1}]
    assert engine.pool.num_owned == 0
    assert engine.step().tokens == {"R": 8}


# -- T4: test of vLLM #11565, bs 16, 10 blocks ------------------------------------------------------------------------------


def test_t4_a_refused_allocation_does_not_touch_its_hits():
    """R0: 48 tokens use 3 blocks; R1: the same 48 and 48 more use 3 more, and is freed -> references {1,1,1}, {0,0,0};
    R2 takes 2, so 5 are free; R3 hits 6 and wants 3 more: 3 new + 3 revived = 6 > 5 -> None, references unchanged."""
    tables = BlockTables(BlockPool(10), block_size=16)
    pool = tables.pool
    keys = range(101, 107)
    r0 = cached_table(tables, "R0", 48, keys[:3])
    r1 = BlockTable("R1")
    assert tables.grow(r1, 0, 48, pool.find(keys)).new_blocks == [4, 5, 6]
    pool.index.add(r1.blocks[3:], keys[3:])
    tables.release(r1, "R1 finished")
    r2 = BlockTable("R2")
    tables.grow(r2, 0, 32)
    assert pool.num_free == 5

    hits = pool.find(keys)
    assert hits == [1, 2, 3, 4, 5, 6]
    r3 = BlockTable("R3")
    assert tables.need(r3, 0, 48, hits) == 6
    queue = pool.peek(5)
    assert tables.grow(r3, 0, 48, hits) is None
    assert [pool.ref_cnt(block) for block in hits] == [1, 1, 1, 0, 0, 0]
    assert (pool.num_free, pool.peek(5), r3.blocks) == (5, queue, [])
    pool.check([("R0", r0.blocks), ("R2", r2.blocks)])


# -- T5: admission gate of a sliding window (test of vLLM #40946) -----------------------------------------------------------

SWA = {"window": 64, "max_num_batched_tokens": 128, "max_model_len": 1024}


def test_t5_a_sliding_window_is_capped_at_the_gate():
    """bs 16, W 64, batched 128, max length 1024: cap = ceil(191 / 16) + 1 = 13. A 512-token prompt in one group of full attention
    and one of windows needs 32 + 13 = 45 of 64 + 13 blocks; without the cap 64. 256 tokens need 16 + 13 of a pool of 5: refused.
    """
    full = {**SWA, "window": None}
    assert admission_blocks(512, 16, **SWA) == 13
    assert admission_blocks(512, 16, **full) == 32
    assert admission_blocks(512, 16, **full) + admission_blocks(512, 16, **SWA) == 45
    assert 2 * admission_blocks(512, 16, **full) == 64
    assert admission_blocks(1024, 16, **full) + admission_blocks(1024, 16, **SWA) == 64 + 13
    assert admission_blocks(256, 16, **full) + admission_blocks(256, 16, **SWA) == 29
    assert admission_blocks(64, 16, **SWA) == 4  # short sequences need what they need


def swa_engine(drive, num_gpu_blocks):
    return drive(
        num_gpu_blocks,
        block_size=16,
        sliding_window=64,
        max_num_batched_tokens=128,
        max_model_len=1024,
        enable_prefix_caching=False,
    )


def test_t5_a_pool_of_the_capped_size_is_enough_for_every_length(drive):
    """With windows everywhere 13 blocks serve a 512-token prompt and the longest sequence, without a preemption."""
    engine = swa_engine(drive, 13)
    prompt = engine.add("512", 512, output_tokens=100)
    longest = engine.add("1024", 900, output_tokens=124)
    engine.run()
    assert [request.outcome for request in engine.ended] == [Outcome.FINISHED, Outcome.FINISHED]
    assert prompt.num_preemptions == longest.num_preemptions == 0
    assert max(prompt.peak_blocks, longest.peak_blocks) <= 13
    assert engine.pool.num_free == 13


@pytest.mark.parametrize("num_gpu_blocks", [5, 12])
def test_t5_a_pool_below_the_cap_refuses_at_arrival(drive, num_gpu_blocks):
    engine = swa_engine(drive, num_gpu_blocks)
    refused = engine.add("256", 256)
    assert refused.outcome is Outcome.REJECTED
    assert f"need 13 KV blocks of 16 tokens, but the whole pool has {num_gpu_blocks}" in refused.reason
    assert engine.step() is None


# -- T6: null blocks among the hits (vLLM #19031) ---------------------------------------------------------------------------


@pytest.mark.parametrize(("null_hits", "need"), [(5, 15), (0, 20)])
def test_t6_null_blocks_among_the_hits_cost_nothing(null_hits, need):
    """20 blocks wanted, 10 hits: 5 of them null -> 20 - 10 + 5 = 15; none of them null -> 20 - 10 + 10 = 20."""
    assert (
        new_blocks(total_tokens=40, block_size=2, hits=10, unreferenced_hits=10 - null_hits, skipped=null_hits) == need
    )


@pytest.mark.parametrize(("window", "null_hits", "need"), [(11, 5, 15), (None, 0, 20)])
def test_t6_the_table_counts_likewise(window, null_hits, need):
    """bs 2: 10 hit blocks are 20 tokens; with W = 11 the first (20 - 11 + 1) // 2 = 5 of them are out of the window."""
    tables = BlockTables(BlockPool(30), block_size=2, window=window)
    pool = tables.pool
    first = cached_table(tables, "first", 20, range(101, 111))
    tables.release(first, "first finished")
    found = pool.find(range(101, 111))
    hits = [NO_BLOCK] * null_hits + found[null_hits:]
    table = BlockTable("R")
    assert tables.need(table, 0, 20, hits) == need
    free = pool.num_free
    allocation = tables.grow(table, 0, 20, hits)
    assert free - pool.num_free == need
    assert len(allocation.new_blocks) == 10
    assert table.blocks == [*hits, *allocation.new_blocks]
    pool.check([("R", table.blocks)])


# -- T7: predictor = allocator (vLLM #41282) --------------------------------------------------------------------------------


def test_t7_the_predictor_equals_the_allocator_while_the_window_slides():
    """bs 2, W 8: lengths 4, 8, 12, 16 take 2 new blocks each; from 12 on, (12 - 8 + 1) // 2 = 2 slide out for them."""
    tables = BlockTables(BlockPool(6), block_size=2, window=8)
    pool = tables.pool
    table = BlockTable("R")
    held = []
    for computed in (0, 4, 8, 12):
        predicted = tables.need(table, computed, 4)
        allocation = tables.grow(table, computed, 4)
        assert predicted == len(allocation.new_blocks) == 2
        held.append(pool.num_owned)
        pool.check([("R", table.blocks)])
    assert held == [2, 4, 6, 6]
    assert table.blocks[:2] == [NO_BLOCK, NO_BLOCK]
    assert len(table) == 8


@pytest.mark.parametrize("window", [None, 1, 3, 8, 64])
@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_t7_predictor_equals_allocator_for_every_chunking(window, block_size):
    """Whatever the chunks, `need` is what `grow` takes from the free queue once the window has slid."""
    for chunks in ([1] * 40, [7, 1, 1, 1, 30, 1], [16, 16, 1, 1], [40]):
        tables = BlockTables(BlockPool(100), block_size, window)
        table = BlockTable("R")
        computed = 0
        for chunk in chunks:
            predicted = tables.need(table, computed, chunk)
            tables.slide(table, computed)
            free = tables.pool.num_free
            assert tables.grow(table, computed, chunk) is not None
            assert predicted == free - tables.pool.num_free
            computed += chunk


# -- T8: preemption order ---------------------------------------------------------------------------------------------------


def test_t8_everybody_is_preempted_last_first_and_the_queue_keeps_the_order_of_arrival(drive):
    """Running [A, B, C], no block free; A needs one, and does not get it even alone: preempt C, B, A; waiting = [A, B, C].

    That A cannot go on alone is the doing of somebody who still reads what is released: it stays behind a fence.
    """
    engine = drive(num_gpu_blocks=3, block_size=4)
    requests = [engine.add(name, 4, output_tokens=2) for name in "ABC"]
    assert engine.step().tokens == {"A": 4, "B": 4, "C": 4}
    release = engine.core.tables.release
    engine.core.tables.release = lambda table, by, **_: release(table, by, fence=7)

    assert engine.plan() is None
    assert (engine.core.num_running, engine.core.num_waiting) == (0, 3)
    assert (engine.pool.num_quarantined, engine.pool.num_free) == (3, 0)
    assert [request.num_preemptions for request in requests] == [1, 1, 1]
    assert engine.plan() is None  # still waiting for the fence; nobody is preempted twice

    engine.core.tables.release = release
    engine.pool.pass_fence(7)
    step = engine.step()
    assert step.plan.preempted == ("C", "B", "A")
    assert step.plan.admitted == ("A",)  # 5 tokens, 2 blocks; B needs 2 of the 1 left
    assert [request_id for step in engine.run() for request_id in step.plan.admitted] == ["B", "C"]
    assert [request.request_id for request in engine.ended] == ["A", "B", "C"]
    assert engine.pool.num_free == 3


def test_t8_preemption_stops_as_soon_as_the_oldest_can_go_on(drive):
    """The same three in a pool of 3 without a fence: C's one block is enough for A; B, next in order, then gives up its own."""
    engine = drive(num_gpu_blocks=3, block_size=4)
    for name in "ABC":
        engine.add(name, 4, output_tokens=2)
    engine.step()
    step = engine.step()
    assert step.plan.preempted == ("C", "B")
    assert step.tokens == {"A": 1}
    assert [request_id for step in engine.run() for request_id in step.plan.admitted] == ["B", "C"]


# -- T12: nano-vllm #274, our engine's answer -------------------------------------------------------------------------------


def test_t12_a_first_decode_that_needs_a_third_of_two_blocks_fails_that_request_only(drive):
    """2 blocks of 256; the 512-token prompt fills both, so its first token comes; the second needs block 3: FAILED, with numbers."""
    engine = drive(num_gpu_blocks=2, block_size=256)
    nano = engine.add("nano", 512, output_tokens=10)
    other = engine.add("other", 16, output_tokens=5)
    assert engine.step().tokens == {"nano": 512}
    assert engine.step().tokens == {"other": 16}
    assert nano.outcome is Outcome.FAILED
    assert nano.reason == "grew to 513 tokens, which need 3 KV blocks of a pool of 2"
    assert nano.num_output_tokens == 1
    engine.run()
    assert (other.outcome, other.num_output_tokens, other.num_preemptions) == (Outcome.FINISHED, 5, 0)
    assert engine.pool.num_free == 2


def test_t12_is_seen_at_arrival_when_the_client_names_its_output(drive):
    """512 + 10 tokens keep 521 in the cache: 3 blocks. With one output token 512 do, and nothing is wrong."""
    engine = drive(num_gpu_blocks=2, block_size=256)
    nano = engine.add("nano", 512, output_tokens=10, max_tokens=10)
    assert nano.outcome is Outcome.REJECTED
    assert nano.reason == (
        "512 prompt + 10 output tokens need 3 KV blocks of 256 tokens, but the whole pool has 2 (512 tokens)"
    )
    single = engine.add("single", 512, output_tokens=10, max_tokens=1)
    engine.run()
    assert (single.outcome, single.num_output_tokens, single.finish_reason) == (Outcome.FINISHED, 1, "length")
