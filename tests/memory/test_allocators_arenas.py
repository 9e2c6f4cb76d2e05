"""Contiguous reservation, best fit, buddy and paged pools: where things go, and what is wasted."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.memory.allocators import (
    BestFit,
    Buddy,
    Contiguous,
    DuplicateAllocationError,
    NoRoom,
    PagedPool,
    Placement,
    UnknownAllocationError,
)

KIB = 1024


def with_two_holes(allocator):
    """A 10 KiB arena in which `[1, 4)` KiB and `[6, 8)` KiB are free."""
    for name, size in (("a", 1), ("b", 3), ("c", 2), ("d", 2), ("e", 2)):
        assert isinstance(allocator.allocate(name, size * KIB), Placement)
    allocator.free("b")
    allocator.free("d")
    assert allocator.holes() == [(1 * KIB, 3 * KIB), (6 * KIB, 2 * KIB)]
    return allocator


def test_first_fit_takes_the_lowest_hole_and_best_fit_the_smallest():
    assert with_two_holes(Contiguous(10 * KIB)).allocate("x", 2 * KIB) == Placement(address=1 * KIB, size_bytes=2 * KIB)
    assert with_two_holes(BestFit(10 * KIB)).allocate("x", 2 * KIB) == Placement(address=6 * KIB, size_bytes=2 * KIB)


def test_five_free_kibibytes_in_two_pieces_do_not_serve_four():
    arena = with_two_holes(BestFit(10 * KIB))
    failed = arena.allocate("x", 4 * KIB)
    assert isinstance(failed, NoRoom) and failed.is_fragmentation
    assert (failed.tried_bytes, failed.free_bytes, failed.largest_free_bytes) == (4 * KIB, 5 * KIB, 3 * KIB)
    assert arena.state().external_fragmentation == pytest.approx(1 - 3 / 5)
    assert "4096 B" in failed.message and "5120 B" in failed.message and "3072 B" in failed.message


def test_a_freed_neighbour_on_either_side_is_joined():
    arena = with_two_holes(BestFit(10 * KIB))
    arena.free("c")
    assert arena.holes() == [(1 * KIB, 7 * KIB)]
    assert arena.allocate("x", 7 * KIB) == Placement(address=1 * KIB, size_bytes=7 * KIB)


def test_a_worst_case_reservation_takes_the_same_whatever_is_asked_for():
    arena = Contiguous(10 * KIB, reserve_bytes=4 * KIB)
    arena.allocate("a", 1 * KIB)
    arena.allocate("b", 4 * KIB)
    state = arena.state()
    assert (state.requested_bytes, state.allocated_bytes) == (5 * KIB, 8 * KIB)
    assert state.internal_fragmentation == pytest.approx(1 - 5 / 8)
    assert isinstance(arena.allocate("c", 1 * KIB), NoRoom)  # 2 KiB are free, and would do
    with pytest.raises(ValueError, match="more than the worst case"):
        arena.allocate("d", 5 * KIB)


def test_buddy_halves_the_smallest_block_that_is_large_enough():
    # Knowlton's example: 1 MiB, requests of 100, 240, 64 and 256 KiB.
    arena = Buddy(1024 * KIB)
    addresses = [
        arena.allocate(name, size * KIB).address // KIB for name, size in zip("abcd", (100, 240, 64, 256), strict=True)
    ]
    assert addresses == [0, 256, 128, 512]
    assert arena.free_blocks() == [(192 * KIB, 64 * KIB), (768 * KIB, 256 * KIB)]
    state = arena.state()
    assert (state.allocated_bytes, state.free_bytes) == ((128 + 256 + 64 + 256) * KIB, 320 * KIB)


def test_buddy_joins_twins_only_and_comes_back_to_one_block():
    arena = Buddy(1024 * KIB)
    for name in "abcd":
        arena.allocate(name, 256 * KIB)
    arena.free("b")
    arena.free("c")  # neighbours, 512 KiB in a row, but not twins
    assert arena.free_blocks() == [(256 * KIB, 256 * KIB), (512 * KIB, 256 * KIB)]
    assert isinstance(arena.allocate("x", 512 * KIB), NoRoom)
    arena.free("a")
    arena.free("d")
    assert arena.free_blocks() == [(0, 1024 * KIB)]


def test_buddy_uses_a_capacity_that_is_no_power_of_two():
    arena = Buddy(13 * 512 + 100)
    assert arena.free_blocks() == [(0, 8 * 512), (8 * 512, 4 * 512), (12 * 512, 512)]
    assert arena.state().reserved_bytes == 13 * 512
    assert arena.allocate("a", 4 * 512).address == 8 * 512


def test_a_paged_pool_wastes_the_rest_of_the_last_block_and_nothing_else():
    pool = PagedPool(10 * KIB, block_bytes=KIB)
    for name in "abcde":
        pool.allocate(name, 1500)
    pool.free("b")
    pool.free("d")
    assert pool.state().free_bytes == pool.state().largest_free_bytes == 4 * KIB
    assert isinstance(pool.allocate("x", 4 * KIB), Placement)  # two pieces that do not touch
    assert sorted(pool.blocks_of("x")) == [3, 4, 7, 8]
    assert pool.state().external_fragmentation == 0.0


@pytest.mark.parametrize("make", [Contiguous, BestFit, Buddy, lambda capacity: PagedPool(capacity, block_bytes=512)])
def test_misuse_is_an_error_and_lateness_is_not(make):
    arena = make(16 * KIB)
    arena.allocate("a", 8 * KIB)
    with pytest.raises(DuplicateAllocationError):
        arena.allocate("a", 1)
    with pytest.raises(UnknownAllocationError, match="'b' is not alive"):
        arena.free("b")
    with pytest.raises(ValueError, match="at least 1"):
        arena.allocate("c", 0)
    arena.request_free("a")
    assert arena.state().pending_bytes == 8 * KIB
    assert isinstance(arena.allocate("d", 16 * KIB), NoRoom)  # somebody may still read it
    arena.complete_free("a")
    assert isinstance(arena.allocate("d", 16 * KIB), Placement)
    with pytest.raises(UnknownAllocationError):
        arena.complete_free("a")
    with pytest.raises(NotImplementedError, match="knows no streams"):
        arena.record_stream("d", 1)


def make_arenas():
    capacity = 40 * 512
    return [Contiguous(capacity), BestFit(capacity), Buddy(capacity), PagedPool(capacity, block_bytes=2 * 512)]


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(1, 12 * 512)), max_size=60))
def test_nothing_overlaps_and_every_byte_is_accounted_for(steps):
    for arena in make_arenas():
        alive = {}
        for name, size in steps:
            before = arena.state()
            if name in alive:
                arena.free(str(name))
                del alive[name]
                continue
            placed = arena.allocate(str(name), size)
            if isinstance(placed, NoRoom):
                assert arena.state() == before
                assert placed.largest_free_bytes < placed.tried_bytes
                continue
            alive[name] = placed
            state = arena.state()
            assert placed.size_bytes >= size
            assert state.requested_bytes <= state.allocated_bytes <= state.reserved_bytes
            assert state.allocated_bytes + state.free_bytes == state.reserved_bytes
            assert state.largest_free_bytes <= state.free_bytes
            if not isinstance(arena, PagedPool):
                ranges = sorted((placed.address, placed.address + placed.size_bytes) for placed in alive.values())
                assert all(left[1] <= right[0] for left, right in pairwise(ranges))
                assert ranges[-1][1] <= arena.capacity_bytes
            else:
                held = [block for name in alive for block in arena.blocks_of(str(name))]
                assert len(held) == len(set(held))
        for name in list(alive):
            arena.free(str(name))
        state = arena.state()
        assert state.free_bytes == arena.capacity_bytes
        if isinstance(arena, Contiguous):
            assert arena.holes() == [(0, arena.capacity_bytes)]
        if isinstance(arena, Buddy):
            assert arena.free_blocks() == [(0, 32 * 512), (32 * 512, 8 * 512)]
