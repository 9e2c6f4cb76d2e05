"""The model of PyTorch's caching allocator against worked examples from its source and its bug reports, number by number:
expandable segments.
"""

from sim.memory.allocators import CachingSettings, NoRoom, Placement
from tests.support.caching import GIB, MIB, A, F, device, held, layout

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
