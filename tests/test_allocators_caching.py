"""The model of PyTorch's caching allocator against worked examples from its source and its bug reports, number by number."""

import re

import pytest

from sim.memory.allocators import (
    CachingAllocator,
    CachingSettings,
    DeviceMemory,
    NoRoom,
    Placement,
    UnknownAllocationError,
)
from sim.memory.allocators.caching_sizes import round_size, segment_size
from sim.memory.rounding import allocated_bytes

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def device(total=GIB, settings=None, **memory):
    return CachingAllocator(DeviceMemory(total_bytes=total, **memory), settings)


def held(allocator):
    """(reserved, allocated, active) in bytes."""
    stats = allocator.memory_stats()
    return tuple(stats[f"{name}_bytes.all.current"] for name in ("reserved", "allocated", "active"))


def layout(allocator):
    """Each segment as the (size, state) of its blocks."""
    return [
        [(block["size"], block["state"]) for block in segment["blocks"]] for segment in allocator.snapshot()["segments"]
    ]


A, P, F = "active_allocated", "active_pending_free", "inactive"


# -- sizes --------------------------------------------------------------------------------------------------------------


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


# -- splitting ----------------------------------------------------------------------------------------------------------


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


# -- merging and pinning ------------------------------------------------------------------------------------------------


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


# -- streams ------------------------------------------------------------------------------------------------------------


def test_a_free_waits_for_the_streams_that_were_recorded():
    allocator = device()
    allocator.allocate("a", 20 * MIB)
    allocator.record_stream("a", 1)
    allocator.record_stream("a", 2)
    allocator.record_stream("a", 0)  # its own stream needs no event
    allocator.free("a")
    assert held(allocator) == (20 * MIB, 0, 20 * MIB)
    assert layout(allocator) == [[(20 * MIB, P)]]
    assert allocator.state().pending_bytes == 20 * MIB
    allocator.stream_done(1)
    allocator.allocate("b", 20 * MIB)
    assert held(allocator)[0] == 40 * MIB  # stream 2 still reads the first block
    allocator.stream_done(2)
    assert layout(allocator)[0] == [(20 * MIB, P)]  # nobody has looked
    allocator.allocate("c", 20 * MIB)
    assert held(allocator) == (40 * MIB, 40 * MIB, 40 * MIB)


def test_events_after_the_stream_was_done_are_new_ones():
    allocator = device()
    for name in "ab":
        allocator.allocate(name, 20 * MIB)
        allocator.record_stream(name, 1)
    allocator.free("a")
    allocator.stream_done(1)
    allocator.free("b")
    allocator.allocate("c", 20 * MIB)
    assert layout(allocator) == [[(20 * MIB, A)], [(20 * MIB, P)]]


def test_a_slow_stream_does_not_hold_up_the_others():
    """pytorch#71616: events were one queue up to 2.0; there is one for each stream now."""
    allocator = device()
    for name, stream in (("slow", 1), ("quick", 2)):
        allocator.allocate(name, 20 * MIB)
        allocator.record_stream(name, stream)
        allocator.free(name)
    allocator.stream_done(2)
    allocator.allocate("c", 20 * MIB)
    assert layout(allocator) == [[(20 * MIB, P)], [(20 * MIB, A)]]


def full_card(search_again):
    """80 GiB, full; in one segment of 8 GiB half is alive and half waits for a side stream."""
    settings = CachingSettings(search_again_after_events=search_again)
    allocator = device(80 * GIB, settings)
    allocator.allocate("rest", 72 * GIB)
    allocator.allocate("whole", 8 * GIB)
    allocator.free("whole")
    allocator.allocate("live", 4 * GIB)
    allocator.allocate("waiting", 4 * GIB)
    allocator.record_stream("waiting", 1)
    allocator.free("waiting")
    return allocator


def test_189504_out_of_memory_although_a_fitting_block_became_free_and_the_retry_succeeds():
    allocator = full_card(search_again=False)
    failed = allocator.allocate("x", 4 * GIB)
    assert isinstance(failed, NoRoom)
    assert failed.largest_free_bytes == 4 * GIB == failed.tried_bytes  # it is there, and was not looked for
    assert isinstance(allocator.allocate("x", 4 * GIB), Placement)
    stats = allocator.memory_stats()
    assert (stats["num_ooms"], stats["num_alloc_retries"], stats["num_sync_all_streams"]) == (1, 1, 1)


def test_189504_searching_again_finds_it():
    allocator = full_card(search_again=True)
    assert isinstance(allocator.allocate("x", 4 * GIB), Placement)
    assert allocator.memory_stats()["num_ooms"] == 0


def test_a_pending_block_with_a_segment_of_its_own_is_no_problem():
    allocator = device(80 * GIB)
    allocator.allocate("rest", 76 * GIB)
    allocator.allocate("waiting", 4 * GIB)
    allocator.record_stream("waiting", 1)
    allocator.free("waiting")
    assert isinstance(allocator.allocate("x", 4 * GIB), Placement)  # freed to the device, and taken anew
    stats = allocator.memory_stats()
    assert (stats["num_alloc_retries"], stats["num_device_free"], stats["num_device_alloc"]) == (1, 1, 3)


# -- the retry ladder ---------------------------------------------------------------------------------------------------


def test_all_cached_segments_are_returned_before_giving_up():
    allocator = device(100 * MIB)
    for index, size in enumerate((20, 30, 40)):
        allocator.allocate(f"t{index}", size * MIB)
    for index in range(3):
        allocator.free(f"t{index}")
    allocator.allocate("x", 60 * MIB)
    assert layout(allocator) == [[(60 * MIB, A)]]
    stats = allocator.memory_stats()
    assert (stats["num_alloc_retries"], stats["num_device_free"], stats["num_ooms"]) == (1, 3, 0)


def test_a_failure_empties_the_cache_but_touches_nothing_alive():
    allocator = device(100 * MIB)
    for name, size in (("alive", 30), ("cached", 30)):
        allocator.allocate(name, size * MIB)
    allocator.free("cached")
    failed = allocator.allocate("x", 80 * MIB)
    assert isinstance(failed, NoRoom) and not failed.is_fragmentation
    assert layout(allocator) == [[(30 * MIB, A)]]
    assert failed.device_free_bytes == 70 * MIB


def test_oversize_blocks_are_kept_for_oversize_requests_that_waste_little():
    allocator = device(settings=CachingSettings(max_split_size_bytes=50 * MIB))
    allocator.allocate("a", 100 * MIB)
    assert allocator.memory_stats()["oversize_allocations.current"] == 1
    allocator.free("a")
    allocator.allocate("small", 40 * MIB)  # below the limit: may not take it
    assert held(allocator)[0] == 140 * MIB
    allocator.allocate("far", 80 * MIB)  # 100 ≥ 80 + 20: too much would be wasted
    assert held(allocator)[0] == 220 * MIB
    assert allocator.allocate("near", 80 * MIB + 1).size_bytes == 100 * MIB  # taken whole, not split
    assert held(allocator)[0] == 220 * MIB
    assert allocator.memory_stats()["oversize_segments.current"] == 2


def test_a_block_of_exactly_the_split_limit_is_oversize():
    allocator = device(settings=CachingSettings(max_split_size_bytes=50 * MIB))
    allocator.allocate("a", 50 * MIB)
    allocator.free("a")
    allocator.allocate("b", 48 * MIB)
    assert held(allocator)[0] == 98 * MIB
    allocator.allocate("c", 50 * MIB)
    assert held(allocator)[0] == 98 * MIB


def test_no_more_oversize_blocks_are_returned_than_needed():
    allocator = device(210 * MIB, CachingSettings(max_split_size_bytes=50 * MIB))
    for name, size in (("a", 60), ("b", 70), ("c", 80)):
        allocator.allocate(name, size * MIB)
    for name in "abc":
        allocator.free(name)
    allocator.allocate("x", 150 * MIB)  # 80 + 70, exactly
    assert sorted(segment[0] for segment in layout(allocator)) == [(60 * MIB, F), (150 * MIB, A)]


def test_just_enough_oversize_blocks_are_returned_first():
    allocator = device(300 * MIB, CachingSettings(max_split_size_bytes=50 * MIB))
    for name, size in (("a", 60), ("b", 70), ("c", 80), ("d", 40)):
        allocator.allocate(name, size * MIB)
    for name in "abcd":
        allocator.free(name)
    allocator.allocate("x", 145 * MIB)
    # 50 MiB are free; no single block of 145: the largest go first, 80 and 70, and the rest stays cached.
    assert sorted(segment[0] for segment in layout(allocator)) == [(40 * MIB, F), (60 * MIB, F), (146 * MIB, A)]
    assert allocator.memory_stats()["num_alloc_retries"] == 0


def test_garbage_collection_returns_the_oldest_cached_segments():
    settings = CachingSettings(per_process_memory_fraction=1.0, garbage_collection_threshold=0.5)
    allocator = device(200 * MIB, settings)
    for name in ("old", "young"):
        allocator.allocate(name, 50 * MIB)
    allocator.free("old")
    for _ in range(3):  # searches that make the first segment old
        allocator.allocate("other", 20 * MIB, stream=5)
        allocator.free("other")
    allocator.free("young")
    allocator.allocate("x", 60 * MIB)  # 120 MiB are reserved, 100 is the threshold
    assert sorted(segment[0] for segment in layout(allocator)) == [(20 * MIB, F), (50 * MIB, F), (60 * MIB, A)]
    assert allocator.memory_stats()["num_alloc_retries"] == 0


def test_a_memory_fraction_limits_what_is_reserved():
    allocator = device(GIB, CachingSettings(per_process_memory_fraction=0.25))
    allocator.allocate("a", 200 * MIB)
    failed = allocator.allocate("b", 100 * MIB)
    assert isinstance(failed, NoRoom)
    assert "256.00 MiB allowed; Of the allocated memory 200.00 MiB" in failed.message
    assert isinstance(allocator.allocate("c", 56 * MIB), Placement)


# -- private pools ------------------------------------------------------------------------------------------------------


def test_a_private_pool_keeps_its_high_water_mark_until_it_is_released():
    allocator = device(100 * MIB)
    allocator.allocate("graph", 60 * MIB, pool=(0, 1))
    allocator.free("graph")
    failed = allocator.allocate("x", 50 * MIB)
    assert isinstance(failed, NoRoom)
    assert (
        "Of the allocated memory 60.00 MiB is allocated by PyTorch, with 60.00 MiB allocated in private pools"
        in failed.message
    )
    assert "and 0 bytes is reserved by PyTorch but unallocated." in failed.message
    allocator.release_pool((0, 1))
    assert isinstance(allocator.allocate("x", 50 * MIB), Placement)


def test_an_allocation_under_capture_neither_waits_nor_empties_the_cache():
    allocator = device(100 * MIB)
    allocator.allocate("a", 60 * MIB)
    allocator.free("a")
    assert isinstance(allocator.allocate("graph", 50 * MIB, pool=(0, 1)), NoRoom)
    assert layout(allocator) == [[(60 * MIB, F)]]


def test_an_allocation_under_capture_does_not_look_at_events():
    allocator = device()
    allocator.allocate("a", 20 * MIB)
    allocator.record_stream("a", 1)
    allocator.free("a")
    allocator.stream_done(1)
    allocator.allocate("graph", 20 * MIB, pool=(0, 1))
    assert layout(allocator) == [[(20 * MIB, P)], [(20 * MIB, A)]]
    allocator.allocate("b", 30 * MIB)
    assert layout(allocator)[0] == [(20 * MIB, F)]


# -- the message --------------------------------------------------------------------------------------------------------

GRAMMAR = re.compile(
    r"CUDA out of memory\. Tried to allocate (?P<tried>[\d.]+ \w+)\. GPU (?P<gpu>\d+) has a total capacity of (?P<total>[\d.]+ \w+) "
    r"of which (?P<free>[\d.]+ \w+) is free\. (?P<others>(?:Process \d+ has [\d.]+ \w+ memory in use\. )*)"
    r"(?:Including non-PyTorch memory, this process has (?P<own>[\d.]+ \w+) memory in use\. )?(?:(?P<allowed>[\d.]+ \w+) allowed; )?"
    r"Of the allocated memory (?P<allocated>[\d.]+ \w+) is allocated by PyTorch, "
    r"(?:with (?P<private>[\d.]+ \w+) allocated in private pools \(e\.g\., CUDA Graphs\), )?"
    r"and (?P<unallocated>[\d.]+ \w+) is reserved by PyTorch but unallocated\. If reserved but unallocated memory is large .*"
)


def test_the_message_follows_the_grammar_and_adds_up():
    memory = DeviceMemory(total_bytes=24 * GIB, non_torch_bytes=GIB // 2, other_processes=((4711, 2 * GIB),), index=1)
    allocator = CachingAllocator(memory)
    allocator.allocate("a", 19 * GIB)
    allocator.allocate("b", 3 * MIB)
    failed = allocator.allocate("c", 2 * GIB + 513 * MIB)
    parts = GRAMMAR.fullmatch(failed.message).groupdict()
    assert parts == {
        "tried": "2.50 GiB",  # 2,562 MiB: the segment, rounded to 2 MiB, not the tensor
        "gpu": "1",
        "total": "24.00 GiB",
        "free": "2.48 GiB",
        "others": "Process 4711 has 2.00 GiB memory in use. ",
        "own": "19.52 GiB",
        "allowed": None,
        "allocated": "19.00 GiB",
        "private": None,
        "unallocated": "17.00 MiB",
    }


def test_without_nvml_the_message_names_no_process():
    allocator = device(100 * MIB, shows_processes=False)
    assert GRAMMAR.fullmatch(allocator.allocate("a", 200 * MIB).message)["own"] is None


# -- expandable segments ------------------------------------------------------------------------------------------------

EXPANDABLE = CachingSettings(expandable_segments=True)


def test_an_expandable_segment_grows_by_20_mib_pages_and_splits_to_512_bytes():
    allocator = device(settings=EXPANDABLE)
    allocator.allocate("a", 30 * MIB)
    assert held(allocator)[0] == 40 * MIB
    assert layout(allocator) == [[(30 * MIB, A), (10 * MIB, F)]]
    allocator.allocate("b", 25 * MIB)  # 10 MiB are there, one more page is enough
    assert held(allocator)[0] == 60 * MIB
    assert layout(allocator) == [[(30 * MIB, A), (25 * MIB, A), (5 * MIB, F)]]
    allocator.allocate("small", 1)
    assert held(allocator)[0] == 62 * MIB  # pages of the small pool have 2 MiB
    assert [record.action for record in allocator.history if record.action.startswith("segment")] == ["segment_map"] * 3
    stats = allocator.memory_stats()
    assert stats["inactive_split_bytes.all.current"] == 0  # not meaningful here, and not counted
    assert stats["num_device_alloc"] == 3


def test_pages_are_unmapped_from_the_middle_and_the_gap_is_filled_first():
    allocator = device(settings=EXPANDABLE)
    for name in "abc":
        allocator.allocate(name, 50 * MIB)  # [0, 50) [50, 100) [100, 150), mapped to 160
    allocator.free("b")
    allocator.empty_cache()
    # Whole pages inside [50, 100): [60, 100). And nothing of the tail [150, 160), which shares a page with c.
    assert held(allocator)[0] == 120 * MIB
    assert layout(allocator) == [[(50 * MIB, A), (10 * MIB, F)], [(50 * MIB, A), (10 * MIB, F)]]
    base = allocator.alive["a"].address
    assert allocator.allocate("d", 45 * MIB).address == base + 50 * MIB
    assert held(allocator)[0] == 160 * MIB
    assert layout(allocator) == [[(50 * MIB, A), (45 * MIB, A), (5 * MIB, F), (50 * MIB, A), (10 * MIB, F)]]


def test_the_end_of_a_range_counts_with_what_it_can_grow_to():
    allocator = device(settings=EXPANDABLE)
    for name, size in (("a", 50), ("b", 15), ("c", 5)):
        allocator.allocate(name, size * MIB)
    hole = allocator.alive["b"].address
    allocator.free("b")
    assert layout(allocator) == [[(50 * MIB, A), (15 * MIB, F), (5 * MIB, A), (10 * MIB, F)]]
    # The 10 MiB at the end would fit better; but they can grow, so the hole is the smaller block.
    assert allocator.allocate("x", 8 * MIB).address == hole


def test_an_expandable_segment_without_pages_goes_away():
    allocator = device(settings=EXPANDABLE)
    allocator.allocate("a", 30 * MIB)
    allocator.free("a")
    allocator.empty_cache()
    assert held(allocator) == (0, 0, 0) and not allocator.core.heads
    allocator.allocate("a", 30 * MIB)
    assert held(allocator)[0] == 40 * MIB


def test_a_device_that_is_full_fails_with_expandable_segments_too():
    allocator = device(100 * MIB, EXPANDABLE)
    allocator.allocate("a", 50 * MIB)
    failed = allocator.allocate("b", 60 * MIB)
    assert isinstance(failed, NoRoom)
    assert held(allocator) == (60 * MIB, 50 * MIB, 50 * MIB)
    assert isinstance(allocator.allocate("c", 40 * MIB), Placement)


def test_slivers_cost_segments_and_not_an_expandable_range():
    """The note in the source: a batch that grows by one leaves a sliver behind in every segment."""

    def run(settings):
        allocator = device(16 * GIB, settings)
        for batch in range(1, 40):
            allocator.allocate("x", batch * 12 * MIB)
            allocator.allocate("y", batch * 25 * MIB)
            allocator.free("x")
            allocator.free("y")
        return allocator.memory_stats()["reserved_bytes.all.current"]

    assert run(EXPANDABLE) == 1460 * MIB  # the largest step, 39 · 37 = 1443 MiB, in pages of 20 MiB
    assert run(CachingSettings()) > 2.8 * 1460 * MIB


# -- misuse -------------------------------------------------------------------------------------------------------------


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
