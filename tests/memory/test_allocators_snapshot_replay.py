"""A snapshot's own history, replayed: the recorded end under the recorded settings, another one under others."""

import random

import pytest

from sim.memory.allocators import (
    CachingAllocator,
    CachingSettings,
    DeviceMemory,
    NoRoom,
    SnapshotError,
    parse_snapshot,
    replay_snapshot,
    what_if,
)

MIB = 1 << 20
BASE = 0x7F00_0000_0000
MEMORY = DeviceMemory(total_bytes=160 * MIB)


def entry(action, offset, size, time_us=0, **more):
    return {
        "action": action,
        "addr": BASE + offset,
        "size": size,
        "stream": 0,
        "time_us": time_us,
        "frames": [],
        **more,
    }


def segment(offset, total, blocks, **more):
    """A segment from `(size, requested, state)` of its blocks."""
    made, position = [], BASE + offset
    for size, requested, state in blocks:
        made.append({"address": position, "size": size, "requested_size": requested, "state": state, "frames": []})
        position += size
    return {"address": BASE + offset, "total_size": total, "stream": 0, "segment_type": "large", "blocks": made, **more}


def hand_made(segments, trace, **settings):
    return parse_snapshot({"segments": segments, "device_traces": [trace], "allocator_settings": settings})


A, P, F = "active_allocated", "active_pending_free", "inactive"

# A history by hand: 20 MiB cached, 19.5 MiB served from it unsplit, another segment for a tensor of 30 MiB, freed.
WHOLE = hand_made(
    [segment(0, 20 * MIB, [(20 * MIB, 20 * MIB - MIB // 2, A)]), segment(64 * MIB, 30 * MIB, [(30 * MIB, 0, F)])],
    [
        entry("segment_alloc", 0, 20 * MIB, 10),
        entry("alloc", 0, 20 * MIB, 10),
        entry("free_requested", 0, 20 * MIB, 20),
        entry("free_completed", 0, 20 * MIB, 20),
        entry("alloc", 0, 20 * MIB - MIB // 2, 30),
        entry("segment_alloc", 64 * MIB, 30 * MIB, 40),
        entry("alloc", 64 * MIB, 30 * MIB, 40),
        entry("free_requested", 64 * MIB, 30 * MIB, 50),
        entry("free_completed", 64 * MIB, 30 * MIB, 50),
    ],
)


def test_a_history_from_the_beginning_reproduces_the_recorded_end():
    result = replay_snapshot(WHOLE)
    assert result.is_exact and result.start_bytes == 0
    assert result.difference == dict.fromkeys(
        ("reserved_bytes", "allocated_bytes", "active_bytes", "largest_free_bytes", "num_segments"), 0
    )
    assert [sample.memory.reserved_bytes // MIB for sample in result.replay.samples] == [20, 20, 20, 50, 50]
    assert [sample.memory.allocated_bytes // MIB for sample in result.replay.samples] == [20, 0, 20, 50, 20]
    assert [sample.memory.largest_free_bytes // MIB for sample in result.replay.samples] == [0, 20, 0, 0, 30]
    assert [round(sample.time_s * 1e6) for sample in result.replay.samples] == [0, 10, 20, 30, 40]
    assert "capacity is not known" in result.notes[0]


def test_a_record_that_is_not_what_the_allocator_does_is_reported_as_a_difference():
    odd = hand_made(
        [segment(0, 24 * MIB, [(24 * MIB, 20 * MIB, A)])],
        [entry("segment_alloc", 0, 24 * MIB), entry("alloc", 0, 20 * MIB)],
    )
    result = replay_snapshot(odd)
    assert not result.is_exact
    assert result.difference == {
        "reserved_bytes": -4 * MIB, "allocated_bytes": -4 * MIB, "active_bytes": -4 * MIB, "largest_free_bytes": 0, "num_segments": 0,
    }  # fmt: skip


# The history begins when much has happened: two blocks live in one segment (one is freed later), one segment is idle and is
# returned later, one block waits for a stream, and one block is never mentioned.
MIDDLE = hand_made(
    [
        segment(0, 40 * MIB, [(12 * MIB, 12 * MIB, A), (28 * MIB, 0, F)]),
        segment(64 * MIB, 20 * MIB, [(8 * MIB, 0, F), (4 * MIB, 4 * MIB - 7, A), (8 * MIB, 0, F)]),
    ],
    [
        entry("free_requested", 12 * MIB, 9 * MIB, 100),  # allocated before the history
        entry("free_completed", 12 * MIB, 9 * MIB, 100),
        entry("free_completed", 64 * MIB, 8 * MIB, 110),  # requested before the history
        entry("segment_free", 128 * MIB, 50 * MIB, 120),  # idle before the history
        entry("alloc", 64 * MIB, 6 * MIB, 130),
        entry("free_requested", 64 * MIB, 6 * MIB, 140),
        entry("free_completed", 64 * MIB, 6 * MIB, 140),
    ],
)


def test_a_history_from_the_middle_starts_with_what_was_there():
    result = replay_snapshot(MIDDLE)
    assert result.started_with == "recorded"
    assert result.start_bytes == (12 + 9 + 8 + 4) * MIB - 7
    assert result.is_exact, result.difference
    first = result.replay.samples[0].memory
    assert first.reserved_bytes == 110 * MIB
    assert (first.allocated_bytes, first.pending_bytes) == (16 * MIB, 8 * MIB)
    assert result.replay.final.reserved_bytes == 60 * MIB  # empty_cache returned the idle segment
    assert len(result.notes) == 1  # nothing contradictory


def test_under_other_settings_the_same_blocks_are_allocated_anew():
    result = replay_snapshot(MIDDLE, settings=CachingSettings(expandable_segments=True))
    assert result.started_with == "anew"
    assert result.replayed.allocated_bytes == 16 * MIB
    assert result.recorded.reserved_bytes == 60 * MIB
    assert result.replayed.reserved_bytes == 40 * MIB  # 12, 9, 8 and 4 MiB lie in two pages
    assert not result.replay.failures


def test_a_small_rest_in_the_large_pool_belongs_to_the_block_before_it():
    trace = [
        entry("segment_alloc", 64 * MIB, 30 * MIB),
        entry("alloc", 64 * MIB, 30 * MIB),
        entry("free_requested", 0, 20 * MIB - MIB // 2),
        entry("free_completed", 0, 20 * MIB - MIB // 2),
    ]
    segments = [segment(0, 20 * MIB, [(20 * MIB, 0, F)]), segment(64 * MIB, 30 * MIB, [(30 * MIB, 30 * MIB, A)])]
    result = replay_snapshot(hand_made(segments, trace))
    assert result.is_exact
    first = result.replay.samples[0].memory
    assert (first.free_bytes, first.allocated_bytes) == (0, 50 * MIB)  # not half a MiB free
    assert first.requested_bytes == 50 * MIB - MIB // 2


def test_contradictions_are_counted_and_left_out():
    odd = hand_made(
        [segment(0, 20 * MIB, [(20 * MIB, 20 * MIB, A)])],
        [
            entry("alloc", 0, 20 * MIB),
            entry("alloc", 0, 20 * MIB),
            entry("free_completed", 4 * MIB, 7),
            entry("segment_alloc", 0, 20 * MIB),
        ],
    )
    result = replay_snapshot(odd)
    assert any("do not fit together" in note for note in result.notes)


def test_without_a_history_there_is_nothing_to_replay():
    with pytest.raises(SnapshotError, match="no history of device 0"):
        replay_snapshot(hand_made([segment(0, 20 * MIB, [(20 * MIB, 0, F)])], []))


# -- running out of memory ----------------------------------------------------------------------------------------------


def fragmented(settings):
    """The story of pytorch#35901 in a model: the snapshot a failed run leaves behind."""
    allocator = CachingAllocator(DeviceMemory(total_bytes=15 << 30), settings)
    allocator.allocate("big", 11_643_387_904)
    allocator.free("big")
    allocator.allocate("small", 499_214_336)
    assert isinstance(allocator.allocate("big again", 11_643_387_904), NoRoom)
    return parse_snapshot(allocator.snapshot())


def test_the_settings_that_would_have_helped():
    results = what_if(
        fragmented(CachingSettings()), {"split": "max_split_size_mb:512", "expandable": "expandable_segments:True"}
    )
    recorded = results["recorded"]
    assert recorded.is_exact and recorded.replay.attempts_served == 0
    assert "capacity, 16106127360 B" in recorded.notes[0]
    assert results["split"].replay.attempts_served == 1
    assert results["expandable"].replay.attempts_served == 1
    # The range first holds `small` in the free pages of `big`, then grows by what is missing.
    assert results["expandable"].replayed.reserved_bytes == -(-(11_643_387_904 + 499_214_336) // (20 * MIB)) * 20 * MIB


def test_what_lies_free_in_a_graph_s_pool_is_not_room_under_other_settings():
    """60 of 100 MiB are a graph's, free between its replays; 40 are reserved in a piece of 20 behind a tensor, and the device is full."""
    graph = segment(0, 60 * MIB, [(60 * MIB, 0, F)], segment_pool_id=(0, 1))
    rest = segment(64 * MIB, 40 * MIB, [(20 * MIB, 20 * MIB, A), (20 * MIB, 0, F)])
    oom = entry("oom", 0, 30 * MIB, 10, device_free=0)
    small = entry("oom", 0, 20 * MIB, 10, device_free=0)
    for failed, served in ((oom, 0), (small, 1)):
        results = what_if(hand_made([graph, rest], [failed]), {"expandable": "expandable_segments:True"})
        assert results["expandable"].replay.attempts_served == served
        assert not results["expandable"].replay.failures
        assert any("stay theirs" in note for note in results["expandable"].notes)
    assert results["recorded"].is_exact


def test_189504_is_reproduced_from_its_snapshot_and_cured_by_searching_again():
    allocator = CachingAllocator(DeviceMemory(total_bytes=80 * MIB))
    allocator.allocate("whole", 80 * MIB)
    allocator.free("whole")
    allocator.allocate("live", 40 * MIB)
    allocator.allocate("waiting", 40 * MIB)
    allocator.record_stream("waiting", 1)
    allocator.free("waiting")
    allocator.advance(0.5)
    assert isinstance(allocator.allocate("x", 40 * MIB), NoRoom)
    assert not isinstance(allocator.allocate("x", 40 * MIB), NoRoom)
    snapshot = parse_snapshot(allocator.snapshot())
    assert replay_snapshot(snapshot).is_exact
    assert replay_snapshot(snapshot).replay.attempts_served == 0
    cured = replay_snapshot(snapshot, settings=CachingSettings(search_again_after_events=True), start_with="recorded")
    assert cured.replay.attempts_served == 1


# -- the model's own histories ------------------------------------------------------------------------------------------

SETTINGS = {
    "default": CachingSettings(),
    "max_split": CachingSettings(max_split_size_bytes=24 * MIB),
    "expandable": CachingSettings(expandable_segments=True),
    "rounded": CachingSettings(roundup_power2_divisions=(4,) * 16),
}


def lived(seed, settings, steps=120, memory=MEMORY):
    """A busy allocator: sizes of all classes, three streams, pending frees, emptied caches, failures."""
    rng = random.Random(seed)
    allocator = CachingAllocator(memory, settings)
    for step in range(steps):
        allocator.advance(step / 1000)
        name = f"t{rng.randrange(10)}"
        what = rng.random()
        if what < 0.06:
            allocator.empty_cache()
        elif what < 0.14:
            allocator.stream_done(rng.randrange(3))
        elif what < 0.24 and name in allocator.alive:
            allocator.record_stream(name, rng.randrange(3))
        elif name in allocator.alive:
            allocator.free(name)
        else:
            size = rng.choice((rng.randrange(1, 3000), rng.randrange(1, 2 * MIB), rng.randrange(MIB, 40 * MIB)))
            allocator.allocate(name, size, stream=rng.choice((0, 0, 1)))
    return allocator


@pytest.mark.parametrize("name", SETTINGS)
def test_replaying_a_whole_history_of_the_model_gives_its_end(name):
    for seed in range(12):
        snapshot = parse_snapshot(lived(seed, SETTINGS[name]).snapshot())
        result = replay_snapshot(snapshot, memory=MEMORY)
        assert result.is_exact, (seed, result.difference, result.notes)
        assert result.settings == SETTINGS[name] and not result.replay.failures


@pytest.mark.parametrize(
    ("name", "at_least"), [("default", 24), ("rounded", 24), ("max_split", 22), ("expandable", 18)]
)
def test_a_history_cut_in_the_middle_is_continued_from_where_it_was(name, at_least):
    """Of an expandable range, the true beginning is not recorded; with `max_split_size`, who returned memory is not."""
    exact = 0
    for seed in range(24):
        data = lived(seed, SETTINGS[name]).snapshot()
        trace = data["device_traces"][0]
        data["device_traces"] = [trace[len(trace) // 2 :]]
        result = replay_snapshot(parse_snapshot(data), memory=MEMORY)
        assert not result.notes and result.start_bytes > 0
        assert abs(result.difference["reserved_bytes"]) <= 60 * MIB
        exact += result.is_exact
    assert exact >= at_least, exact
