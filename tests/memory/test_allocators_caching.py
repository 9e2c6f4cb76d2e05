"""The model of PyTorch's caching allocator against worked examples from its source and its bug reports, number by number:
sizes, splits, merges.
"""

import pytest

from sim.memory.allocators import CachingSettings, NoRoom, Placement, UnknownAllocationError
from sim.memory.allocators.caching_sizes import round_size, segment_size
from sim.memory.rounding import allocated_bytes
from tests.support.caching import GIB, KIB, MIB, A, F, device, held, layout

# -- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requested", "rounded", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),  # the largest small request
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),  # the smallest with a segment of its own
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (11_643_387_904, 11_643_387_904, 11_643_387_904),
    ],
)
def test_sizes_of_blocks_and_segments(requested, rounded, segment):
    assert round_size(requested, CachingSettings()) == rounded
    assert segment_size(rounded, CachingSettings()) == segment
    allocator = device(16 * GIB)
    placed = allocator.allocate("a", requested)
    assert held(allocator)[0] == segment
    assert placed.size_bytes == (rounded if segment - rounded > MIB or segment == 2 * MIB else segment)


def test_power_of_two_divisions_as_the_source_has_them():
    # "If we need to round up 1200 and the number of divisions is 4 … 1024, 1280, 1536, 1792. So the function will return 1280."
    settings = CachingSettings(roundup_power2_divisions=(4,) * 16)
    assert round_size(1200, settings) == 1536  # below 512 · 4 the ordinary rounding holds
    assert round_size(1200 * MIB, settings) == 1280 * MIB
    assert round_size(1280 * MIB, settings) == 1280 * MIB
    assert round_size(1281 * MIB, settings) == 1536 * MIB
    assert round_size(1793 * MIB, settings) == 2048 * MIB
    assert round_size(2048 * MIB, settings) == 2048 * MIB


# -- splitting ---------------------------------------------------------------------------------------------------------


def test_a_cached_20_mib_block_serving_19_5_mib_is_not_split():
    allocator = device()
    allocator.allocate("a", 20 * MIB)
    allocator.free("a")
    assert allocator.allocate("b", 19 * MIB + 512 * KIB).size_bytes == 20 * MIB
    assert layout(allocator) == [[(20 * MIB, A)]]
    assert allocator.state().internal_fragmentation == pytest.approx(0.5 / 20)


def test_a_large_block_is_split_only_if_more_than_1_mib_is_left():
    for requested, left in ((19 * MIB, 0), (19 * MIB - 512, MIB + 512)):
        allocator = device()
        allocator.allocate("a", 20 * MIB)
        allocator.free("a")
        allocator.allocate("b", requested)
        assert allocator.state().free_bytes == left


def test_the_small_pool_splits_down_to_512_bytes_and_never_serves_large_requests():
    allocator = device()
    for name in "abcd":
        allocator.allocate(name, 512 * KIB)
    allocator.allocate("e", 1)
    assert layout(allocator) == [[(512 * KIB, A)] * 4, [(512, A), (2 * MIB - 512, F)]]
    for name in "abcd":
        allocator.free(name)
    assert allocator.state().free_bytes == 4 * MIB - 512
    allocator.allocate("large", MIB + 1)
    assert held(allocator)[0] == 2 * 2 * MIB + 20 * MIB


def test_a_rest_of_512_bytes_is_still_a_block_in_the_small_pool():
    allocator = device()
    allocator.allocate("a", MIB)
    allocator.allocate("b", MIB - 512)
    assert layout(allocator) == [[(MIB, A), (MIB - 512, A), (512, F)]]


def test_requests_between_1_and_10_mib_share_20_mib_segments():
    allocator = device()
    for name in "abc":
        allocator.allocate(name, 8 * MIB)
    assert layout(allocator) == [[(8 * MIB, A), (8 * MIB, A), (4 * MIB, F)], [(8 * MIB, A), (12 * MIB, F)]]
    assert allocator.memory_stats()["inactive_split_bytes.all.current"] == 16 * MIB
    assert allocator.memory_stats()["inactive_split.large_pool.current"] == 2


def test_best_fit_takes_the_smallest_block_then_the_lowest_address():
    allocator = device()
    for name, size in (("a", 40), ("b", 30), ("c", 30)):
        allocator.allocate(name, size * MIB)
    first_30 = allocator.alive["b"].address
    for name in "cba":
        allocator.free(name)
    assert allocator.allocate("x", 24 * MIB).address == first_30
    assert layout(allocator) == [[(40 * MIB, F)], [(24 * MIB, A), (6 * MIB, F)], [(30 * MIB, F)]]


def test_blocks_of_one_stream_or_pool_do_not_serve_another():
    allocator = device()
    allocator.allocate("a", 20 * MIB)
    allocator.free("a")
    allocator.allocate("b", 20 * MIB, stream=7)
    allocator.allocate("c", 20 * MIB, pool=(0, 1))
    assert held(allocator)[0] == 60 * MIB
    assert allocator.memory_stats()["reserved_bytes_by_private_pools.0_1.large_pool.current"] == 20 * MIB


# -- merging and pinning -----------------------------------------------------------------------------------------------


def test_one_live_512_byte_block_pins_its_2_mib_segment():
    allocator = device()
    allocator.allocate("pin", 1)
    for index in range(4):
        allocator.allocate(f"t{index}", 500 * KIB)
    for index in range(4):
        allocator.free(f"t{index}")
    assert layout(allocator) == [[(512, A), (2 * MIB - 512, F)]]
    allocator.empty_cache()
    assert held(allocator) == (2 * MIB, 512, 512)
    assert allocator.memory_stats()["inactive_split_bytes.small_pool.current"] == 2 * MIB - 512
    allocator.free("pin")
    assert held(allocator) == (2 * MIB, 0, 0)  # cached, not returned
    assert allocator.memory_stats()["inactive_split_bytes.all.current"] == 0
    allocator.empty_cache()
    assert held(allocator) == (0, 0, 0)


def test_free_blocks_merge_inside_their_segment_and_not_across():
    allocator = device()
    for name in "abcde":
        allocator.allocate(name, 4 * MIB)
    allocator.allocate("next", 20 * MIB)
    for name in ("b", "d", "c", "next", "a", "e"):
        allocator.free(name)
    assert layout(allocator) == [[(20 * MIB, F)], [(20 * MIB, F)]]
    allocator.allocate("x", 21 * MIB)
    assert held(allocator)[0] == 62 * MIB  # 40 MiB are free, in two segments


def test_35901_a_freed_segment_that_was_split_cannot_hold_its_tensor_again():
    """pytorch#35901: 499,214,336 B inside a freed segment of 11,643,387,904 B."""
    big, small = 11_643_387_904, 499_214_336

    def run(settings):
        allocator = device(16 * GIB, settings, non_torch_bytes=GIB)
        allocator.allocate("big", big)
        allocator.free("big")
        allocator.allocate("small", small)
        return allocator, allocator.allocate("big again", big)

    allocator, failed = run(CachingSettings())
    assert isinstance(failed, NoRoom)
    assert layout(allocator) == [[(small, A), (big - small, F)]]
    assert (failed.largest_free_bytes, failed.tried_bytes) == (11_144_173_568, big)
    assert failed.device_free_bytes == 15 * GIB - big
    assert failed.is_fragmentation
    stats = allocator.memory_stats()
    assert (stats["num_alloc_retries"], stats["num_ooms"]) == (1, 1)

    allocator, placed = run(CachingSettings(max_split_size_bytes=512 * MIB))
    assert isinstance(placed, Placement)
    # The small tensor may not take the oversize block, so it has a segment of its own: 478 MiB, with 2,004,992 B left over.
    assert layout(allocator) == [[(big, A)], [(small, A), (2_004_992, F)]]

    allocator, placed = run(CachingSettings(expandable_segments=True))
    assert isinstance(placed, Placement)
    assert held(allocator)[0] == -(-(big + small) // (20 * MIB)) * 20 * MIB


# -- misuse ------------------------------------------------------------------------------------------------------------


def test_an_allocation_that_is_not_alive_cannot_be_touched():
    allocator = device()
    for act in (
        allocator.free,
        allocator.request_free,
        allocator.complete_free,
        lambda name: allocator.record_stream(name, 1),
    ):
        with pytest.raises(UnknownAllocationError, match="'a' is not alive"):
            act("a")
    with pytest.raises(ValueError, match="at least 1"):
        allocator.allocate("a", 0)


def test_the_counters_have_pytorchs_names():
    stats = device().memory_stats()
    kinds = ("allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes", "active_bytes",
             "inactive_split_bytes", "requested_bytes")  # fmt: skip
    expected = {f"{kind}.{pool}.{what}" for kind in kinds for pool in ("all", "large_pool", "small_pool")
                for what in ("current", "peak", "allocated", "freed")}  # fmt: skip
    expected |= {
        f"oversize_{kind}.{what}"
        for kind in ("allocations", "segments")
        for what in ("current", "peak", "allocated", "freed")
    }
    expected |= {"num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free", "num_oom_rejections",
                 "max_split_size"}  # fmt: skip
    assert set(stats) == expected


@pytest.mark.parametrize(
    "requested", [1, 700, MIB, MIB + 1, 7 * MIB + 3, 10 * MIB - 1, 10 * MIB, 31 * MIB + MIB // 2, 50 * MIB + MIB - 512]
)
def test_the_ledger_rounds_a_tensor_as_the_allocator_does(requested):
    assert device().allocate("a", requested).size_bytes == allocated_bytes(requested)
