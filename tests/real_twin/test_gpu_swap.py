"""Swapping: bytes come back, and nothing is reused before its copy is done."""

import pytest
import torch

from gpu import BlockMover, CpuBlockPool, KVLayout, Ops, PagedKVPool
from gpu.cpu_pool import runs
from gpu.fences import FenceError, StepClock, StepFence

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=16, block_size=8, dtype="float32")


def mover(num_blocks=8, cpu_blocks=8, *, layout=LAYOUT, **options):
    pool = PagedKVPool(layout, num_blocks, checked=True)
    return BlockMover(pool, CpuBlockPool(layout, cpu_blocks, pinned=False), Ops(), **options)


def fill(pool, block_id, value):
    pool.layer(0).kv[block_id] = value
    pool.layer(1).kv[block_id] = value


def checksums(pool, blocks):
    return Ops().block_checksum(pool.rows, torch.tensor(blocks), torch.empty(len(blocks), dtype=torch.int32)).tolist()


@pytest.mark.parametrize("order", ["layer", "block"])
@pytest.mark.parametrize("kv_cache_dtype", ["float32", "bfloat16", "fp8_per_token_head"])
def test_blocks_come_back_to_other_places_byte_for_byte(order, kv_cache_dtype):
    layout = KVLayout(
        num_layers=3, num_kv_heads=2, head_dim=16, block_size=8, kv_cache_dtype=kv_cache_dtype, order=order
    )
    move = mover(layout=layout)
    move.pool.arena.random_(0, 256)
    before = checksums(move.pool, [3, 7, 1])
    transfer = move.save([3, 7, 1], [5, 0, 4])
    assert (transfer.num_blocks, transfer.num_bytes) == (3, 3 * layout.block_bytes)
    move.pool.poison([3, 7, 1])
    move.load([2, 4, 6], [5, 0, 4])
    assert checksums(move.pool, [2, 4, 6]) == before


def test_blocks_are_saved_and_loaded_by_addresses_that_the_caller_owns():
    """The core gives the slots out: the same one may be loaded twice, and is overwritten when it is given to another."""
    move = mover()
    for block in (1, 2, 3):
        fill(move.pool, block, float(block))
    assert move.save([1, 3], [7, 2]).num_blocks == 2
    for block in (1, 2, 3):
        fill(move.pool, block, 9.0)
    move.load([5, 6, 2], [2, 7, 2])
    assert [float(move.pool.layer(1).kv[block].max()) for block in (5, 6, 2, 1)] == [3.0, 1.0, 3.0, 9.0]
    with pytest.raises(ValueError, match="2 blocks of the device and 1 slots of the CPU pool do not match"):
        move.save([1, 2], [0])
    with pytest.raises(ValueError, match=r"NO_BLOCK cannot be moved.*\[0, 4\]"):
        move.save([0, 4], [1, 2])
    with pytest.raises(ValueError, match="NO_BLOCK cannot be moved"):
        move.load([0], [1])


def test_a_block_freed_behind_its_copy_s_fence_is_saved_intact():
    move = mover(latency_steps=2)
    pool = move.pool
    pool.begin_step(0)
    pool.assign("a", [1], 0)
    fill(pool, 1, 1.0)
    transfer = move.save([1], [0])
    pool.release("a", [1], fence=transfer.fence)
    with pytest.raises(FenceError, match="block 1 was given to b at step 0 before the fence of its release by a"):
        pool.assign("b", [1], 0)
    for step in (0, 1):
        pool.begin_step(step)
        pool.end_step()
        move.poll()  # the copy is done when its fence passes, before anybody can be given the block
    pool.begin_step(2)
    pool.assign("b", [1], 0)
    fill(pool, 1, 2.0)
    pool.assign("a", [5], 8)
    move.latency_steps = 0
    move.load([5], [0])
    assert (pool.layer(0).kv[5] == 1.0).all() and (pool.layer(1).kv[5] == 1.0).all()


def test_without_its_fence_the_same_copy_saves_the_next_owner_s_data():
    # The fault planted: vLLM #32255. The checksum taken before shows it.
    move = mover(latency_steps=2)
    pool = move.pool
    pool.begin_step(0)
    pool.assign("a", [1], 0)
    fill(pool, 1, 1.0)
    before = checksums(pool, [1])
    move.save([1], [0])
    pool.release("a", [1])  # no fence
    pool.assign("b", [1], 0)
    fill(pool, 1, 2.0)
    for step in (0, 1):
        pool.begin_step(step)
        pool.end_step()
        move.poll()
    pool.assign("a", [5], 8)
    move.latency_steps = 0
    move.load([5], [0])
    assert checksums(pool, [5]) != before
    assert (pool.layer(0).kv[5] == 2.0).all()


def test_an_abort_during_a_load_keeps_the_destination_until_the_load_is_done():
    # vLLM #32255: A loads four blocks, is aborted, B is given the blocks and writes: the late copy must not hit B.
    move = mover(latency_steps=3)
    pool = move.pool
    pool.begin_step(0)
    move.latency_steps = 0
    pool.assign("a", [1, 2, 3, 4], 0)
    for block in (1, 2, 3, 4):
        fill(pool, block, 1.0)
    move.save([1, 2, 3, 4], [0, 1, 2, 3])
    pool.release("a", [1, 2, 3, 4])
    move.latency_steps = 3
    pool.assign("a", [5, 6, 7, 8], 32)
    transfer = move.load([5, 6, 7, 8], [0, 1, 2, 3])
    pool.release("a", [5, 6, 7, 8], fence=transfer.fence)  # aborted
    pool.assign("b", [1, 2, 3], 0)  # blocks that no copy uses
    with pytest.raises(FenceError):
        pool.assign("b", [5], 0)
    for step in (0, 1, 2):
        pool.begin_step(step)
        pool.end_step()
        move.poll()
    pool.begin_step(3)
    pool.assign("b", [5], 0)
    fill(pool, 5, 9.0)
    assert (pool.layer(0).kv[5] == 9.0).all()


def test_neighbouring_slots_are_one_copy():
    assert runs([0, 1, 2]) == [(0, 0, 3)]
    assert runs([0, 1, 2, 5, 6]) == [(0, 0, 3), (3, 5, 2)]
    assert runs([6, 5]) == [(0, 6, 1), (1, 5, 1)]
    assert runs([]) == []


def test_a_step_fence_passes_at_the_end_of_its_step_and_is_never_waited_for_in_vain():
    clock = StepClock()
    clock.begin(4)
    fence = StepFence(clock, 4)
    assert not fence.passed()
    with pytest.raises(FenceError, match="step 4 is not done .* waiting would not end"):
        fence.wait()
    clock.end()
    assert fence.passed()
    fence.order()
