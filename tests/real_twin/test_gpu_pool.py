"""The real pool: owners, poison, fences, and its books against the core's. Faults that are planted are found."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu import CpuOutOfMemoryError, DeviceBudget, KVLayout, PagedKVPool
from gpu.fences import FenceError
from gpu.kernels.blocks_twin import gather_kv, store_kv_twin
from gpu.owners import ForeignReadError, OwnerTags
from gpu.pool import PoisonedReadError
from sim.core.blocks import BlockPool, DoubleFreeError, IntegrityError
from sim.core.tables import BlockTable, BlockTables

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, block_size=8, dtype="float32")


def write(pool, table, tokens, value=1.0):
    """Write tokens [start, end) of a table in every layer."""
    size = pool.layout.block_size
    slots = torch.tensor([table[token // size] * size + token % size for token in range(*tokens)], dtype=torch.int64)
    new = torch.full((len(slots), pool.layout.num_kv_heads, pool.layout.head_dim), value)
    for layer in range(pool.layout.num_layers):
        store_kv_twin(new, new, pool.layer(layer), slots)


@pytest.fixture
def pool():
    return PagedKVPool(LAYOUT, 8, checked=True)


@pytest.mark.parametrize("order", ["layer", "block"])
@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "float16", "float32", "fp8", "fp8_per_token_head"])
def test_every_layer_s_view_covers_its_own_bytes_and_all_together_the_arena(order, kv_cache_dtype):
    layout = KVLayout(
        num_layers=3, num_kv_heads=2, head_dim=16, block_size=8, kv_cache_dtype=kv_cache_dtype, order=order
    )
    pool = PagedKVPool(layout, 4)
    for layer in range(3):
        view = pool.layer(layer)
        assert tuple(view.kv.shape) == layout.layer_shape(4)
        assert view.kv.untyped_storage().data_ptr() == pool.arena.untyped_storage().data_ptr()
        view.bits.view(torch.uint8).add_(1)
        if view.dynamic:
            pool.rows.strided[:, layer, layout.scale_offset_bytes // 4 :].view(torch.uint8).add_(1)
    assert torch.equal(pool.arena, torch.ones_like(pool.arena))  # each byte once


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "float16", "float32", "fp8", "fp8_per_token_head"])
def test_poison_is_nan_in_every_format(kv_cache_dtype):
    layout = KVLayout(num_layers=1, num_kv_heads=2, head_dim=16, block_size=8, kv_cache_dtype=kv_cache_dtype)
    view = PagedKVPool(layout, 2, checked=True).layer(0)
    assert view.kv.float().isnan().all()
    assert not view.dynamic or view.scale.isnan().all()


def test_an_fp8_layer_has_its_own_scales_also_where_two_have_one_place():
    """As in vLLM, where they are the attention layer's: 8 by a scale of 2 is kept as 4, by one of 4 as 2, and both are read as 8."""
    layout = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, block_size=8, kv_cache_dtype="fp8")
    pool = PagedKVPool(layout, 4, num_model_layers=3)  # layers 0 and 2 have place 0 in the blocks of two groups
    assert (pool.scales == 1.0).all()  # without calibration
    pool.scales[:, 0] = torch.tensor([2.0, 1.0, 4.0])
    eights = torch.full((1, 2, 16), 8.0)
    for layer, block in ((0, 1), (2, 2)):
        store_kv_twin(eights, eights, pool.layer(0, layer), torch.tensor([block * 8]))
    assert [pool.layer(0, 0).kv[block, 0, 0].float().unique().tolist() for block in (1, 2)] == [[4.0], [2.0]]
    assert [pool.layer(0, 0).kv[block, 1, 0].float().unique().tolist() for block in (1, 2)] == [[8.0], [8.0]]
    for layer, block in ((0, 1), (2, 2)):
        found = torch.empty(2, 8, 16)
        gather_kv(pool.layer(0, layer), torch.tensor([block]), found, 0)
        assert (found[:, 0] == 8.0).all()


def test_the_arena_is_taken_once_and_its_bytes_are_counted():
    budget = DeviceBudget(10**6)
    pool = PagedKVPool(LAYOUT, 8, budget=budget)
    assert budget.reserved == {"KV pool": LAYOUT.arena_bytes(8)}
    assert pool.counters().reserved_bytes == LAYOUT.arena_bytes(8) + 2 * 2 * 4
    with pytest.raises(
        CpuOutOfMemoryError, match="CPU out of memory. Tried to allocate .* Asked for by KV pool"
    ) as error:
        PagedKVPool(LAYOUT, 10_000, budget=budget)
    assert isinstance(error.value, torch.OutOfMemoryError)
    assert error.value.wanted_bytes == LAYOUT.arena_bytes(10_000)


def test_what_was_written_is_readable_and_what_was_not_is_named(pool):
    pool.begin_step(3)
    pool.assign("a", [1, 2], 0)
    write(pool, [1, 2], (0, 11))
    pool.check_read("a", [1, 2])
    pool.check_content("a", [1, 2], 11)
    with pytest.raises(
        PoisonedReadError, match=r"a reads block 2 at step 3: token 11 of its table is NaN in layer 0; .* never written"
    ):
        pool.check_content("a", [1, 2], 12)


def test_a_block_released_one_step_early_is_found_with_block_owner_and_step(pool):
    pool.assign("a", [1, 2], 0)
    write(pool, [1, 2], (0, 16))
    pool.begin_step(7)
    pool.release("a", [2])
    with pytest.raises(
        PoisonedReadError, match=r"a reads block 2 at step 7: token 8 .* the block was released by a at step 7"
    ):
        pool.check_content("a", [1, 2], 16)
    with pytest.raises(
        ForeignReadError, match="a uses block 2 at step 7 without holding it: it is held by nobody, last released by a"
    ):
        pool.check_read("a", [1, 2])


def test_a_wrong_slot_in_a_neighbour_s_block_is_found(pool):
    pool.assign("a", [1], 0)
    pool.assign("b", [2], 0)
    write(pool, [2], (0, 8), 5.0)  # a's tokens, written by mistake into b's block
    with pytest.raises(PoisonedReadError, match="a reads block 1"):
        pool.check_content("a", [1], 8)
    with pytest.raises(ForeignReadError, match="a uses block 2 .* it is held by b, never released"):
        pool.check_read("a", [2])


def test_a_double_release_names_both(pool):
    pool.begin_step(1)
    pool.assign("a", [1, 2], 0)
    pool.release("a", [1])
    pool.begin_step(4)
    with pytest.raises(DoubleFreeError, match="block 1 is released twice: first by a at step 1, now by a at step 4"):
        pool.release("a", [2, 1])
    assert pool.tags.holders(2) == ("a",)  # nothing was changed
    with pytest.raises(DoubleFreeError, match="block 2 is released twice: first by nobody"):
        pool.release("b", [2])


def test_a_shared_block_is_kept_for_its_last_holder(pool):
    pool.assign("a", [1], 0)
    write(pool, [1], (0, 8))
    pool.assign("b", [1, 2], 8)  # a prefix hit: nothing is poisoned
    pool.release("a", [1])
    pool.check_content("b", [1], 8)
    assert pool.counters().allocated_blocks == 2
    pool.release("b", [1, 2])
    assert pool.counters().free_blocks == 8


def test_content_that_a_prefix_cache_may_find_survives_release_until_the_block_is_taken_anew(pool):
    pool.assign("a", [1], 0)
    write(pool, [1], (0, 8))
    pool.release("a", [1], keep_content=True)
    pool.assign("b", [1], 8)
    pool.check_content("b", [1], 8)
    pool.release("b", [1], keep_content=True)
    pool.assign("c", [1], 0)  # not as a hit
    with pytest.raises(PoisonedReadError, match="c reads block 1"):
        pool.check_content("c", [1], 1)


def test_a_released_block_waits_behind_its_fence(pool):
    pool.begin_step(5)
    pool.assign("a", [1, 2], 0)
    write(pool, [1, 2], (0, 16))
    pool.release("a", [1, 2], fence=pool.fence())
    counted = pool.counters()
    assert (counted.allocated_blocks, counted.quarantined_blocks, counted.free_blocks) == (0, 2, 6)
    assert not pool.layer(0).kv[1].isnan().any()  # somebody may still read it
    with pytest.raises(
        FenceError, match="block 2 was given to b at step 5 before the fence of its release by a at step 5"
    ):
        pool.assign("b", [3, 2], 0)
    assert pool.tags.holders(3) == ()  # nothing was changed
    pool.end_step()
    pool.begin_step(6)
    assert pool.counters().quarantined_blocks == 0
    assert pool.layer(0).kv[1].isnan().all()
    pool.assign("b", [3, 2], 0)


def test_blocks_that_were_never_in_the_pool_are_refused(pool):
    with pytest.raises(IntegrityError, match="a was given block 9 of a pool of 8"):
        pool.assign("a", [9], 0)


def test_a_leak_is_counted_and_every_missing_block_is_named_with_its_owner():
    # SGLang #11970 had 59 missing slots and no way to tell whose
    pool = PagedKVPool(LAYOUT, 100)
    pool.begin_step(3)
    pool.assign("gone", range(1, 30), 0)
    pool.begin_step(5)
    pool.assign("gone", range(1, 60), 0)  # 29 of them it has had since step 3
    pool.assign("here", [60, 61], 0)
    with pytest.raises(
        IntegrityError, match=r"59 blocks differ: block 1 is held by gone \(since step 3\) on the device and by nobody"
    ) as error:
        pool.check([("here", [0, 60, 61])])
    assert "and 49 more" in str(error.value)
    pool.release("gone", range(1, 30))
    with pytest.raises(IntegrityError, match=r"30 blocks differ: block 30 is held by gone \(since step 5\)"):
        pool.check([("here", [0, 60, 61])])
    pool.release("gone", range(30, 60))
    pool.check([("here", [0, 60, 61])])


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=40))
def test_the_device_s_book_agrees_with_the_core_s_whatever_happens(events):
    core, tags = BlockPool(12), OwnerTags(12)
    tables = BlockTables(core, 8, window=20)
    held: dict[str, BlockTable] = {}
    for step, (who, tokens) in enumerate(events):
        name = f"r{who}"
        table = held.get(name)
        if tokens == 0 and table is not None:
            tags.release(name, tables.release(held.pop(name), name), step)
        elif tokens:
            table = held.setdefault(name, BlockTable(name))
            done = len(table) * 8
            before = set(table.blocks)
            if tables.grow(table, done, tokens) is not None:
                tags.hold(name, table.blocks, step)
            tags.release(name, before - set(table.blocks), step)  # what slid out of the window
        tags.compare([(owner, each.blocks) for owner, each in held.items()])
        assert tags.num_held == core.num_owned


def test_the_null_block_is_never_held_and_reading_it_is_named(pool):
    pool.assign("a", [0, 1], 8)
    assert pool.counters().allocated_blocks == 1
    with pytest.raises(PoisonedReadError, match="a reads NO_BLOCK, which holds nothing, at step 0: token 3"):
        pool.check_content("a", [0, 1], 8, first_token=3)
