"""The model of PyTorch's caching allocator against worked examples from its source and its bug reports, number by number:
streams.
"""

from sim.memory.allocators import CachingSettings, NoRoom, Placement
from tests.support.caching import GIB, MIB, A, P, device, held, layout


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
