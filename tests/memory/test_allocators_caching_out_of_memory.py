"""The model of PyTorch's caching allocator against worked examples from its source and its bug reports, number by number:
what it tries before it gives up, private pools, and what it says.
"""

import re

from sim.memory.allocators import CachingAllocator, CachingSettings, DeviceMemory, NoRoom, Placement
from tests.support.caching import GIB, MIB, A, F, P, device, held, layout

# -- the retry ladder --------------------------------------------------------------------------------------------------


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


# -- private pools -----------------------------------------------------------------------------------------------------


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


# -- the message -------------------------------------------------------------------------------------------------------


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
