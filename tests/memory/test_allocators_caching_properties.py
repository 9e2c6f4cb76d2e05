"""What holds for the caching allocator after any sequence of calls, under any settings."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.memory.allocators import CachingAllocator, CachingSettings, DeviceMemory, NoRoom, parse_snapshot
from sim.memory.allocators.caching_state import chain

MIB = 1 << 20

SETTINGS = {
    "default": CachingSettings(),
    "max_split": CachingSettings(max_split_size_bytes=24 * MIB),
    "expandable": CachingSettings(expandable_segments=True),
    "garbage": CachingSettings(per_process_memory_fraction=0.9, garbage_collection_threshold=0.4),
    "rounded": CachingSettings(roundup_power2_divisions=(4,) * 16, search_again_after_events=True),
}

SIZES = st.one_of(st.integers(1, 3000), st.integers(1, 2 * MIB), st.integers(MIB, 40 * MIB))
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["toggle"] * 8 + ["record", "done", "empty", "half"]),
        st.integers(0, 9),
        SIZES,
        st.integers(0, 2),
        st.sampled_from([(0, 0), (0, 0), (0, 0), (0, 1)]),
    ),
    max_size=40,
)


def act(allocator, step):
    """One call; what it returned, for comparison."""
    kind, number, size, stream, pool = step
    name = f"t{number}"
    if kind == "toggle":
        if name in allocator.alive:
            return allocator.free(name)
        return (
            allocator.allocate(name, size, stream=stream, pool=pool) if not allocator.pending.is_waiting(name) else None
        )
    if kind == "record" and name in allocator.alive:
        return allocator.record_stream(name, stream)
    if kind == "half":
        if name in allocator.alive:
            return allocator.request_free(name)
        return allocator.complete_free(name) if allocator.pending.is_waiting(name) else None
    if kind == "done":
        return allocator.stream_done(stream)
    return allocator.empty_cache() if kind == "empty" else None


def check(allocator):
    """Every invariant that does not depend on what was called."""
    core = allocator.core
    stats = allocator.memory_stats()
    in_pools = {id(block) for pool in core.pools.values() for block in pool}
    total = {"reserved": 0, "allocated": 0, "active": 0, "split": 0}
    end = 0
    for head in sorted(core.heads.values(), key=lambda block: block.address):
        blocks = chain(head)
        assert head.prev is None and head.address >= end
        position = head.address
        for before, block in zip([None, *blocks], blocks, strict=False):
            assert block.address == position, "blocks fill their segment"
            assert block.size > 0 and block.size % 512 == 0
            position += block.size
            mergeable = (
                before is not None and not before.is_active and not block.is_active and before.mapped == block.mapped
            )
            assert not mergeable, "free neighbours are merged"
            assert (id(block) in in_pools) == (block.mapped and not block.is_active)
            if not block.mapped:
                assert block.virtual is not None and not block.allocated
                assert (block.address - block.virtual.address) % block.virtual.page_bytes == 0
                assert block.size % block.virtual.page_bytes == 0
                continue
            total["reserved"] += block.size
            total["allocated"] += block.size * block.allocated
            total["active"] += block.size * block.is_active
            if not block.is_active and block.is_split and block.virtual is None:
                total["split"] += block.size
            assert block.requested <= block.size
        end = position
    for name, key in (
        ("reserved", "reserved_bytes"),
        ("allocated", "allocated_bytes"),
        ("active", "active_bytes"),
        ("split", "inactive_split_bytes"),
    ):
        assert stats[f"{key}.all.current"] == total[name], name
    assert core.reserved_bytes == total["reserved"] <= core.memory.available_bytes
    for key in (
        "allocation",
        "segment",
        "active",
        "inactive_split",
        "allocated_bytes",
        "reserved_bytes",
        "active_bytes",
        "requested_bytes",
    ):
        for what in ("current", "peak", "allocated", "freed"):
            if what != "peak":
                assert (
                    stats[f"{key}.all.{what}"] == stats[f"{key}.small_pool.{what}"] + stats[f"{key}.large_pool.{what}"]
                )
        assert stats[f"{key}.all.current"] == stats[f"{key}.all.allocated"] - stats[f"{key}.all.freed"]
    state = allocator.state()
    assert state.requested_bytes <= state.allocated_bytes <= state.reserved_bytes
    assert state.allocated_bytes + state.pending_bytes + state.free_bytes == state.reserved_bytes
    assert 0 <= state.external_fragmentation < 1


@pytest.mark.parametrize("name", SETTINGS)
@settings(max_examples=100)
@given(steps=STEPS)
def test_books_layout_and_picture_agree_after_every_call(name, steps):
    memory = DeviceMemory(total_bytes=160 * MIB, non_torch_bytes=7 * MIB)
    allocator, twin = CachingAllocator(memory, SETTINGS[name]), CachingAllocator(memory, SETTINGS[name])
    for step in steps:
        alive = {key: (block.address, block.size) for key, block in allocator.alive.items()}
        result = act(allocator, step)
        assert result == act(twin, step), "the same calls have the same results"
        check(allocator)
        if isinstance(result, NoRoom):
            assert alive == {key: (block.address, block.size) for key, block in allocator.alive.items()}
    assert allocator.snapshot() == twin.snapshot()
    snapshot = parse_snapshot(allocator.snapshot())
    assert sum(segment.total_bytes for segment in snapshot.segments) == allocator.core.reserved_bytes
    for number in range(10):
        if f"t{number}" in allocator.alive:
            allocator.free(f"t{number}")
    allocator.release_pool((0, 1))
    allocator.empty_cache()
    check(allocator)
    assert allocator.core.reserved_bytes == 0, "all that is given back can be returned"
    # Address space that was reserved for pages the device did not have stays, as in PyTorch; it costs nothing.
    assert not any(head.mapped for head in allocator.core.heads.values())
