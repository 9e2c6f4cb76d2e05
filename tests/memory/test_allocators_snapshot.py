"""Reading a PyTorch memory snapshot: plain data only, and only a consistent one."""

import copy
import pickle
from pathlib import Path

import pytest

from sim.memory.allocators import (
    CachingAllocator,
    CachingSettings,
    DeviceMemory,
    SnapshotError,
    parse_snapshot,
    read_snapshot,
    settings_of,
)

MIB = 1 << 20
BASE = 0x7F00_0000_0000

FRAME = {"filename": "model.py", "line": 12, "name": "forward"}

HAND_MADE = {
    "segments": [
        {
            "device": 0, "address": BASE, "total_size": 20 * MIB, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0),
            "allocated_size": 8 * MIB, "active_size": 12 * MIB, "requested_size": 12 * MIB - 100, "is_expandable": False, "frames": [],
            "blocks": [
                {"address": BASE, "size": 8 * MIB, "requested_size": 8 * MIB - 100, "state": "active_allocated", "frames": [FRAME]},
                {"address": BASE + 8 * MIB, "size": 4 * MIB, "requested_size": 4 * MIB, "state": "active_pending_free", "frames": []},
                {"address": BASE + 12 * MIB, "size": 8 * MIB, "requested_size": 0, "state": "inactive", "frames": []},
            ],
        }
    ],
    "device_traces": [
        [
            {"action": "segment_alloc", "addr": BASE, "size": 20 * MIB, "stream": 0, "time_us": 1_000_000, "frames": []},
            {"action": "alloc", "addr": BASE, "size": 8 * MIB - 100, "stream": 0, "time_us": 1_000_000, "frames": [FRAME]},
            {"action": "alloc", "addr": BASE + 8 * MIB, "size": 4 * MIB, "stream": 0, "time_us": 1_500_000, "frames": []},
            {"action": "free_requested", "addr": BASE + 8 * MIB, "size": 4 * MIB, "stream": 0, "time_us": 2_000_000, "frames": []},
        ]
    ],
    "allocator_settings": {
        "PYTORCH_CUDA_ALLOC_CONF": "max_non_split_rounding_mb:40", "max_split_size": -1, "garbage_collection_threshold": 0.0,
        "expandable_segments": False, "pinned_num_register_threads": 1, "release_lock_on_malloc": False, "pinned_use_host_register": False,
        "roundup_power2_divisions": {str(1 << power): 0 for power in range(16)},
    },
    "external_annotations": [],
}  # fmt: skip


def changed(path, value):
    """The hand-made snapshot with one thing changed; `...` removes it."""
    data = copy.deepcopy(HAND_MADE)
    *way, last = path
    place = data
    for step in way:
        place = place[step]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return data


# -- reading ------------------------------------------------------------------------------------------------------------


def test_a_snapshot_is_read_from_a_file_or_from_bytes(tmp_path):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(HAND_MADE))
    snapshot = read_snapshot(path)
    assert snapshot == read_snapshot(str(path)) == read_snapshot(pickle.dumps(HAND_MADE)) == parse_snapshot(HAND_MADE)
    (segment,) = snapshot.segments_of(0)
    assert (segment.total_bytes, segment.small, segment.pool_id) == (20 * MIB, False, (0, 0))
    assert [block.state for block in segment.blocks] == ["active_allocated", "active_pending_free", "inactive"]
    assert segment.blocks[0].tag == "model.py:12 forward"
    assert [entry.action for entry in snapshot.trace_of(0)] == ["segment_alloc", "alloc", "alloc", "free_requested"]
    assert snapshot.segments_of(1) == snapshot.trace_of(1) == ()


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_pickle_protocol_is_read(protocol):
    assert read_snapshot(pickle.dumps(HAND_MADE, protocol)) == parse_snapshot(HAND_MADE)


def test_older_snapshots_without_addresses_or_requested_sizes_are_read():
    data = copy.deepcopy(HAND_MADE)
    for block in data["segments"][0]["blocks"]:
        del block["address"], block["requested_size"]
    del data["allocator_settings"], data["segments"][0]["segment_pool_id"], data["segments"][0]["is_expandable"]
    for entry in data["device_traces"][0]:
        del entry["time_us"]
    snapshot = parse_snapshot(data)
    assert [block.address - BASE for block in snapshot.segments[0].blocks] == [0, 8 * MIB, 12 * MIB]
    assert snapshot.segments[0].blocks[0].requested_bytes == 8 * MIB
    assert settings_of(snapshot) == CachingSettings()


def test_what_the_model_writes_is_what_the_reader_reads():
    allocator = CachingAllocator(DeviceMemory(total_bytes=1 << 30, index=1), CachingSettings(expandable_segments=True))
    allocator.allocate("a", 30 * MIB, tag="kv")
    allocator.allocate("b", 100, stream=3)
    snapshot = read_snapshot(pickle.dumps(allocator.snapshot()))
    assert [(segment.device, segment.total_bytes, segment.expandable) for segment in snapshot.segments] == [
        (1, 40 * MIB, True),
        (1, 2 * MIB, True),
    ]
    assert snapshot.trace_of(0) == ()
    assert [(entry.action, entry.size_bytes, entry.stream) for entry in snapshot.trace_of(1)] == [
        ("segment_map", 40 * MIB, 0),
        ("alloc", 30 * MIB, 0),
        ("segment_map", 2 * MIB, 3),
        ("alloc", 100, 3),
    ]


def test_pytorchs_own_viewer_accepts_what_the_model_writes():
    viewer = pytest.importorskip("torch.cuda._memory_viz")
    allocator = CachingAllocator(DeviceMemory(total_bytes=100 * MIB))
    allocator.allocate("a", 30 * MIB, tag="kv")
    allocator.allocate("b", 3 * MIB)
    allocator.free("b")
    allocator.allocate("c", 90 * MIB)
    data = pickle.loads(pickle.dumps(allocator.snapshot()))
    text = viewer.segsum(data)
    assert "segments: 1" in text and "total_reserved: 30.0MiB" in text and "total_allocated: 30.0MiB" in text
    trace = viewer.trace(data)
    assert "cudaMalloc" in trace
    assert "raise OutOfMemoryError # 90.0MiB requested, 70.0MiB free in CUDA" in trace


# -- refusing code ------------------------------------------------------------------------------------------------------


class Evil:
    """A pickle that writes a file when it is loaded by Python's own unpickler."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.write_text, (Path(self.path), "it ran"))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(tmp_path, protocol):
    proof = tmp_path / "proof"
    data = pickle.dumps(changed(["external_annotations"], [Evil(proof)]), protocol)
    pickle.loads(data)
    assert proof.read_text() == "it ran"  # the attack works on an ordinary unpickler
    proof.unlink()
    with pytest.raises(SnapshotError, match="asks to load .* can run code"):
        read_snapshot(data)
    assert not proof.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"cos\nsystem\n(S'echo'\ntR.",  # GLOBAL and REDUCE
        b"(S'echo'\nios\nsystem\n.",  # INST
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",  # STACK_GLOBAL
        b"\x80\x02\x82\x01.",  # an extension code
        b"\x80\x02c__builtin__\ndict\n.",  # even a harmless name
        b"\x80\x02ccollections\nOrderedDict\n.",
        b"Pmine\n.",  # an object outside the file
        b"\x80\x05\x97.",  # an out-of-band buffer
    ],
)
def test_every_way_to_name_something_is_refused(data):
    with pytest.raises(SnapshotError):
        read_snapshot(data)


def test_a_pickle_that_is_cut_off_or_none_at_all_is_an_error_that_says_so():
    whole = pickle.dumps(HAND_MADE)
    for end in (0, 1, 20, len(whole) // 2, len(whole) - 1):
        with pytest.raises(SnapshotError, match="no complete pickle"):
            read_snapshot(whole[:end])
    for other in (b"Traceback (most recent call last):", b"\x00" * 64, b"{}", bytes(range(256))):
        with pytest.raises(SnapshotError):
            read_snapshot(other)


def test_a_file_that_is_not_there_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_snapshot(tmp_path / "none.pickle")


# -- refusing nonsense --------------------------------------------------------------------------------------------------

SEGMENT = ["segments", 0]
ENTRY = ["device_traces", 0, 1]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["segments"], ..., "snapshot has no 'segments'"),
        (["device_traces"], ..., "snapshot has no 'device_traces'"),
        (["segments"], {}, "'segments' is a value of type dict, expected list"),
        ([*SEGMENT], 7, r"segments\[0\] is a dictionary, not a value of type int"),
        ([*SEGMENT, "total_size"], 21 * MIB, "the blocks add up to 20971520 B, the segment has 22020096 B"),
        ([*SEGMENT, "total_size"], True, "'total_size' is a value of type bool"),
        ([*SEGMENT, "address"], -1, "'address' is negative"),
        ([*SEGMENT, "segment_type"], "huge", "small or large, not 'huge'"),
        ([*SEGMENT, "segment_pool_id"], (1, 2, 3), "expected two whole numbers"),
        ([*SEGMENT, "blocks", 1, "state"], "odd", "state 'odd' is none of"),
        ([*SEGMENT, "blocks", 1, "address"], BASE, "expected a block at 0x7f0000800000"),
        ([*SEGMENT, "blocks", 1, "size"], 0, r"blocks\[1\]: expected a block"),
        ([*SEGMENT, "blocks", 0, "requested_size"], 9 * MIB, "9437184 B are requested of a block of 8388608 B"),
        ([*ENTRY, "action"], ..., r"device_traces\[0\].entries\[1\] has no 'action'"),
        ([*ENTRY, "size"], "big", "'size' is a value of type str, expected int"),
    ],
)
def test_an_inconsistent_snapshot_is_refused_with_the_place(path, value, message):
    with pytest.raises(SnapshotError, match=message):
        parse_snapshot(changed(path, value))


def test_segments_that_overlap_are_refused():
    with pytest.raises(SnapshotError, match="segments overlap"):
        parse_snapshot(changed(["segments"], HAND_MADE["segments"] * 2))


def test_other_plain_data_is_refused():
    with pytest.raises(SnapshotError, match="use torch.cuda.memory._dump_snapshot"):
        parse_snapshot([])
    with pytest.raises(SnapshotError, match="snapshot is a dictionary, not None"):
        parse_snapshot(None)


def test_recorded_settings_are_understood():
    assert settings_of(parse_snapshot(HAND_MADE)) == CachingSettings(max_non_split_rounding_bytes=40 * MIB)
    recorded = {
        "PYTORCH_CUDA_ALLOC_CONF": "new_key:1",
        "max_split_size": 128 * MIB,
        "garbage_collection_threshold": 0.8,
        "expandable_segments": True,
        "roundup_power2_divisions": {str(1 << power): power % 2 * 4 for power in range(16)},
    }
    found = settings_of(parse_snapshot(changed(["allocator_settings"], recorded)))
    assert found == CachingSettings(
        max_split_size_bytes=128 * MIB,
        garbage_collection_threshold=0.8,
        expandable_segments=True,
        roundup_power2_divisions=(0, 4) * 8,
        ignored=("new_key:1",),
    )
    with pytest.raises(SnapshotError, match="cannot be followed: backend:cudaMallocAsync"):
        settings_of(
            parse_snapshot(changed(["allocator_settings"], {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}))
        )
