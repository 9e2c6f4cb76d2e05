"""Faults that real engines had, on the real pool: rows of the public-bugs reference that are marked P. One test a row, or more.

Blocks referenced, leaked, aborted or shared wrongly.

row  test
B20  test_b20_a_refused_admission_leaves_the_device_alone
B21  test_b21_what_slid_out_of_a_window_costs_nothing; …what_was_evicted_is_computed_again
B23  test_b23_an_aborted_load_keeps_its_blocks_until_it_has_arrived
B24  test_b24_the_late_output_of_an_aborted_request_is_dropped_and_its_blocks_return_once
B26  test_kernels_on_gpu: …a_copy_to_the_cpu_waits_for_the_kernel_that_writes_the_block, and without that wait (`gpu`)
B28  test_b28_all_samples_of_a_client_who_leaves_return_their_blocks
B29  test_b29_what_is_missing_is_counted_and_named
B47  test_b47_namespaces_share_no_block
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpu.cpu_pool import CpuBlockPool
from gpu.fences import FenceError
from gpu.layout import KVLayout
from gpu.ops import Ops
from gpu.owners import OwnerTags
from gpu.pool import PagedKVPool
from gpu.swap import BlockMover
from sim.core.blocks import DoubleFreeError, IntegrityError
from sim.core.request import Namespace, Outcome
from tests.support.real_driver import RealDriver, spec

# -- B. references, leaks, aborts --------------------------------------------------------------------------------------


def test_b20_a_refused_admission_leaves_the_device_alone():
    """bs 16, 10 blocks: R3 hits six blocks and needs six more of five free. While it waits the device's book does not change for it,
    and what it hits in the end is what R1 wrote."""

    def content(*names: str) -> dict[str, object]:
        return {"content_ids": names, "content_block_tokens": 16}

    specs = [
        spec("R0", 48, 16, **content("a", "b", "c")),
        spec("R1", 96, **content(*"abcdef")),
        spec("R2", 16, 5),
        spec("R3", 144, 4, **content(*"abcdef")),
    ]
    driver = RealDriver(specs, num_gpu_blocks=10, block_size=16)
    for name in ("R0", "R1", "R2"):
        driver.add(name)
        driver.step()
    assert driver.core.pool.num_free == 5
    r3 = driver.add("R3")
    for _ in range(4):
        assert "R3" not in driver.step().tokens
        assert not any("R3" in driver.executor.pool.tags.holders(block) for block in range(1, 11))
    driver.run()
    assert (r3.outcome, r3.prefix_hit_tokens) == (Outcome.FINISHED, 96)
    assert driver.right_answers()


def test_b21_what_slid_out_of_a_window_costs_nothing():
    """A long decode in a window of 8 holds a bounded number of blocks, on the device too, and null blocks are never read."""
    driver = RealDriver([spec("r", 12, 60)], num_gpu_blocks=40, block_size=4, window=8)
    driver.add()
    held = []
    while driver.core.num_unfinished:
        driver.step()
        held.append(driver.executor.pool.tags.num_held)
    driver.executor.close(driver.core.untold)
    assert max(held[5:]) <= 8 // 4 + 2
    assert driver.right_answers()


def test_b21_what_was_evicted_is_computed_again():
    named = {"content_ids": ("a", "b"), "content_block_tokens": 8}
    specs = [spec("first", 16, 2, **named), spec("filler", 40, 2), spec("again", 16, 2, **named)]
    driver = RealDriver(specs, num_gpu_blocks=6, block_size=8)
    for name in ("first", "filler", "again"):
        driver.add(name)
        driver.serve()
    driver.run()
    assert driver.requests["again"].prefix_hit_tokens == 0
    assert driver.answer("again") == driver.answer("first") == driver.undisturbed("first")


def test_b23_an_aborted_load_keeps_its_blocks_until_it_has_arrived():
    """A loads four blocks over a slow bus and is aborted; B may not have them before the copy is done, and keeps what it writes."""
    layout = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, block_size=8, dtype="float32")
    pool = PagedKVPool(layout, 8, checked=True)
    mover = BlockMover(pool, CpuBlockPool(layout, 8, pinned=False), Ops("cpu"))
    pool.begin_step(0)
    pool.assign("A", [1, 2, 3, 4], 32)
    pool.rows.strided[1:5].fill_(1)
    mover.save([1, 2, 3, 4], [0, 1, 2, 3])
    pool.release("A", [1, 2, 3, 4])
    mover.latency_steps = 2
    pool.assign("A", [5, 6, 7, 8], 32)
    load = mover.load([5, 6, 7, 8], [0, 1, 2, 3])
    pool.release("A", [5, 6, 7, 8], fence=load.fence)  # aborted with the copy under way
    with pytest.raises(
        FenceError, match=r"block 5 was given to B at step 0 before the fence of its release by A at step 0"
    ):
        pool.assign("B", [5], 0)
    for step in (0, 1):
        pool.begin_step(step)
        pool.end_step()
        mover.poll()
    pool.begin_step(2)
    pool.assign("B", [5, 6, 7, 8], 0)
    pool.rows.strided[5:9].fill_(2)
    mover.poll()
    assert (pool.rows.strided[5:9] == 2).all()


def test_b24_the_late_output_of_an_aborted_request_is_dropped_and_its_blocks_return_once():
    """Aborted with its step on the device: the step computes, its token counts for nobody, and the blocks come back once."""
    driver = RealDriver([spec("r", 8, 10), spec("other", 8, 10)], num_gpu_blocks=12, block_size=4)
    driver.add()
    driver.step()
    plan = driver.core.plan(driver.now_fs, 1)
    result = driver.executor.execute(plan)
    blocks = plan.scheduled(0)[0].block_table
    assert driver.core.abort("r", driver.now_fs, Outcome.ABORTED)
    driver.now_fs += result.durations.total_fs
    driver.core.commit(plan, result, driver.now_fs)
    driver.run()
    request = driver.requests["r"]
    assert (request.outcome, request.num_output_tokens) == (Outcome.ABORTED, 1)
    assert driver.right_answers()
    with pytest.raises(
        DoubleFreeError, match=r"block \d+ is released twice: first by r at step \d+, now by r at step \d+"
    ):
        driver.executor.pool.release("r", blocks)


def test_b28_all_samples_of_a_client_who_leaves_return_their_blocks():
    from sim.core.request import samples

    made = list(samples(replace(spec("r", 10, 9), n=4)))
    driver = RealDriver(made, num_gpu_blocks=40, block_size=4)
    driver.add()
    for _ in range(3):
        driver.step()
    held = driver.executor.pool.tags
    assert held.num_held == 2 + 4 * 1  # two whole prompt blocks shared, one more block each
    assert any(len(held.holders(block)) == 4 for block in range(1, 41))
    for sample in made:
        assert driver.core.abort(sample.request_id, driver.now_fs, Outcome.ABORTED)
    driver.run()
    assert driver.core.pool.num_free == 40
    assert held.num_held == 0


def test_b29_what_is_missing_is_counted_and_named():
    """A pool of 270,331: at idle 59 are missing. The report's count, and who had them."""
    tags = OwnerTags(270_331)
    tags.hold("a", range(1, 60), 7)
    tags.hold("b", range(100, 400), 8)
    tags.release("b", range(100, 400), 9)
    assert tags.num_held == 59
    with pytest.raises(
        IntegrityError,
        match=r"^59 blocks differ: block 1 is held by a \(since step 7\) on the device and by nobody in the tables",
    ):
        tags.compare([])


# -- D. allocator, namespaces ------------------------------------------------------------------------------------------


def test_b47_namespaces_share_no_block():
    """The same tokens in the base model, with LoRA "X" and with salt "X": no hit across, and three copies in the pool."""
    named = {"content_ids": ("a", "b", "c"), "content_block_tokens": 4}
    spaces = {"base": Namespace(), "lora": Namespace(lora="X"), "salt": Namespace(salt="X")}
    specs = [
        spec(f"{name}{turn}", 12, 2, namespace=space, **named) for turn in (1, 2) for name, space in spaces.items()
    ]
    driver = RealDriver(specs, num_gpu_blocks=64, block_size=4)
    for turn in (1, 2):
        for name in spaces:
            driver.add(f"{name}{turn}")
            driver.serve()
    driver.run()
    assert [driver.requests[f"{name}1"].prefix_hit_tokens for name in spaces] == [0, 0, 0]
    assert [driver.requests[f"{name}2"].prefix_hit_tokens for name in spaces] == [8, 8, 8]
    assert driver.right_answers()
