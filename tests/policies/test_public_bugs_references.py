"""Faults that real engines had with references, leaks and aborts, table B of the public-bugs reference: one test a row, or more.

Which tests give which row its right answer, here and elsewhere, is in `test_public_bugs_table.py`.
"""

from __future__ import annotations

import pytest

from sim.core.blocks import BlockPool, DoubleFreeError, IntegrityError
from sim.core.request import Namespace, Outcome
from sim.core.tables import BlockTable, BlockTables
from tests.support.engine_driver import content


def test_b20_a_refused_admission_leaves_its_hits_alone(drive):
    """The engine's view of golden trace T4. bs 16, 10 blocks: R0 (48 tokens) runs; R1 (R0's 48 + 48) came and went; R2 (32) runs: 5
    free. R3 (R1's 96 + 48) needs 3 new + 3 revived = 6 > 5, so it waits, and waiting costs nothing: references stay {1,1,1}, {0,0,0}.
    """
    engine = drive(num_gpu_blocks=10, block_size=16)
    pool = engine.pool
    engine.add("R0", 48, output_tokens=16, **content("a", "b", "c", tokens=16))
    engine.step()
    engine.add("R1", 96, **content(*"abcdef", tokens=16))
    step = engine.step()
    assert step.tokens == {"R0": 1, "R1": 48}
    assert step.tables["R1"] == (1, 2, 3, 5, 6, 7)  # block 4 is R0's next
    engine.add("R2", 16, output_tokens=5)
    engine.step()
    assert pool.num_free == 5
    r3 = engine.add("R3", 144, **content(*"abcdef", tokens=16))
    for _ in range(4):
        assert "R3" not in engine.step().tokens
        assert [pool.ref_cnt(block) for block in (1, 2, 3, 5, 6, 7)] == [1, 1, 1, 0, 0, 0]
    engine.run()
    assert (r3.outcome, r3.prefix_hit_tokens) == (Outcome.FINISHED, 96)
    assert pool.num_free == 10


def test_b21_what_was_evicted_is_not_found():
    """A block that is allocated again has lost its old content for good; the rest of the chain behind it is out of reach."""
    tables = BlockTables(BlockPool(4), block_size=4)
    pool = tables.pool
    table = BlockTable("A")
    tables.grow(table, 0, 16)
    pool.index.add(table.blocks, [101, 102, 103, 104])
    pool.release(table.blocks[::-1], "A finished")  # head first, to evict the head before the tail
    assert pool.allocate(1) == [1]
    assert pool.find([101]) == []
    assert pool.find([101, 102, 103, 104]) == []
    assert pool.index.key_of(1) is None
    assert (pool.num_free, pool.num_cached) == (3, 3)
    assert pool.find([102]) == [2]


def test_b21_a_twin_takes_the_place_of_an_evicted_block():
    """Blocks of equal content: the first registered is found; when it is evicted, the next one is; when all are gone, none."""
    pool = BlockPool(3)
    twins = pool.allocate(3)
    pool.index.add(twins, [101, 101, 101])
    for block in twins:
        assert pool.find([101]) == [block]
        pool.release([block], "somebody")
        assert pool.find([101]) == [block]  # released is not evicted
        assert pool.allocate(1) == [block]
    assert pool.find([101]) == []
    assert len(pool.index) == 0


def test_b24_late_output_of_an_aborted_request_is_ignored_and_its_blocks_return_once(drive):
    """Aborted while its step is out: the blocks stay until the step is done, the late end-of-sequence is ignored, they return
    once, and to release them again would raise with both names (I10)."""
    engine = drive(num_gpu_blocks=8, block_size=4)
    request = engine.add("r", 8, output_tokens=10)
    engine.step()
    plan = engine.plan(max_repeat=1)
    blocks = plan.scheduled(0)[0].block_table
    assert engine.abort("r")
    assert engine.pool.num_owned == len(blocks) == 3
    engine.commit(plan, stopped=("r",))
    assert (request.outcome, request.num_output_tokens) == (Outcome.ABORTED, 1)
    assert engine.pool.num_free == 8
    assert [ended.request_id for ended in engine.ended] == ["r"]
    assert not engine.abort("r")
    with pytest.raises(DoubleFreeError, match=r"first by r \(aborted\), now by a late connector"):
        engine.pool.release(blocks, "a late connector")
    assert engine.pool.num_free == 8


def test_b24_aborted_after_the_next_step_was_planned_it_is_freed_once_and_late(drive):
    """The row's own case: two steps in flight. Aborted in step 1, when step 2 has been planned with it: its client hears at once, its
    blocks return once, when step 2, which still writes them, is done; both outputs that come for it are dropped."""
    engine = drive(num_gpu_blocks=8, block_size=4, async_scheduling=True)
    request = engine.add("r", 8, output_tokens=10)
    engine.add("other", 4, output_tokens=10)
    engine.step()
    plan = engine.plan(max_repeat=1)
    engine.now_fs += 1
    assert engine.abort("r")
    engine.commit(plan, stopped=("r",))
    assert [ended.request_id for ended in engine.ended] == ["r"]
    late = engine.plan(max_repeat=1)
    assert {share.request_id for share in late.scheduled(0)} == {"r", "other"}
    assert engine.pool.num_owned == 3 + 2
    engine.commit(late, stopped=("r",))
    assert engine.pool.num_owned == 2
    engine.run()
    assert [name for entry in engine.log for name, _ in entry["released"]].count("r") == 1
    assert (request.outcome, request.num_output_tokens) == (Outcome.ABORTED, 1)
    assert engine.pool.num_free == 8


def test_b25_aborted_in_their_last_step_they_count_as_aborted_and_free_at_once(drive):
    """10 requests of 10 % of the pool each, all cancelled while their last token is computed: aborted, usage 0 % right after."""
    engine = drive(num_gpu_blocks=100, block_size=16)
    requests = [engine.add(f"r{index}", 160) for index in range(10)]
    plan = engine.plan()
    assert engine.pool.num_owned == 100
    for request in requests:
        assert engine.abort(request.request_id)
    engine.commit(plan)
    assert engine.pool.num_owned == engine.pool.num_quarantined == 0
    assert [request.outcome for request in engine.ended] == [Outcome.ABORTED] * 10
    assert engine.step() is None


def test_b28_all_sequences_that_share_a_prompt_return_it():
    """n = 4 over one prompt block, reference count 4; each has a block of its own; the parent leaves at step 3, then the children."""
    tables = BlockTables(BlockPool(8), block_size=4)
    pool = tables.pool
    parent = BlockTable("parent")
    tables.grow(parent, 0, 4)
    family = [parent, *(tables.fork(parent, f"child {index}") for index in range(3))]
    assert pool.ref_cnt(1) == 4
    for step in range(3):
        for table in family:
            tables.grow(table, 4 + step, 1)
    assert pool.num_owned == 1 + 4
    for table in family:
        tables.release(table, f"{table.owner} (aborted)")
        pool.check([(member.owner, member.blocks) for member in family])
    assert pool.ref_cnt(1) == 0
    assert pool.num_free == 8


def test_b29_the_books_name_what_is_missing():
    """59 blocks lost on the way: the check says 59, names blocks, and who had them last."""
    pool = BlockPool(1000)
    lost = pool.allocate(59)
    pool.release(lost, "the request before")
    lost = pool.allocate(1000)[-59:]
    table = [block for block in range(1, 1001) if block not in lost]
    with pytest.raises(IntegrityError, match="59 faults in a pool of 1000 blocks") as caught:
        pool.check([("R", table)])
    assert f"block {min(lost)} is missing: its reference count is 1, held by nobody" in str(caught.value)
    assert "last released by the request before" in str(caught.value)


@pytest.mark.parametrize("scheduling_policy", ["fcfs", "priority"])
def test_b31_what_has_finished_is_no_victim(drive, scheduling_policy):
    """3 blocks of 4, one each. The last admitted, and least important, finishes in step 0. In step 1 two blocks are needed and one is
    free: the victim is "worse", the next after it, and the blocks of what has finished are released once."""
    engine = drive(num_gpu_blocks=3, block_size=4, scheduling_policy=scheduling_policy)
    best = engine.add("best", 4, output_tokens=4, priority=0)
    worse = engine.add("worse", 4, output_tokens=4, priority=5)
    gone = engine.add("gone", 4, output_tokens=1, priority=9)
    assert list(engine.step().tokens) == ["best", "worse", "gone"]
    assert gone.outcome is Outcome.FINISHED
    step = engine.step()
    assert step.tokens == {"best": 1}
    assert step.plan.preempted == ("worse",)
    assert [request_id for request_id, _ in step.plan.releases] == ["gone", "worse"]
    engine.run()
    assert [ended.request_id for ended in engine.ended] == ["gone", "best", "worse"]
    assert (best.num_preemptions, worse.num_preemptions, gone.num_preemptions) == (0, 1, 0)
    assert engine.pool.num_free == 3


def test_b47_a_lora_and_a_salt_of_one_name_share_nothing(drive):
    """The same tokens in the base model, with LoRA "X", with salt "X", and in a model called "X": no hit across, full hit within."""
    engine = drive(num_gpu_blocks=64, block_size=4)
    prompt = content("a", "b", "c", tokens=4)
    spaces = [
        Namespace(),
        Namespace(lora="X"),
        Namespace(salt="X"),
        Namespace(model="X"),
        Namespace(lora="X", salt="X"),
    ]
    strangers = [engine.add(f"stranger {i}", 12, namespace=space, **prompt) for i, space in enumerate(spaces)]
    engine.run()
    assert [request.prefix_hit_tokens for request in strangers] == [0] * 5
    returning = [engine.add(f"returning {i}", 12, namespace=space, **prompt) for i, space in enumerate(spaces)]
    engine.run()
    assert [request.prefix_hit_tokens for request in returning] == [8] * 5
