"""Times on ticks are found, spread inside the tick, and nothing else is touched."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sim.workload import build_requests, read_trace
from sim.workload.ticks import Ticks


def write_ticked(path, stamps_ms):
    rows = [
        {"timestamp": stamp, "input_length": 100 + i, "output_length": 5, "hash_ids": [i]}
        for i, stamp in enumerate(stamps_ms)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


STAMPS_MS = [stamp for stamp in (0, 3000, 5999, 9000, 15001) for _ in range(10)]


def test_times_on_ticks_are_spread_inside_the_tick_in_their_order(tmp_path):
    trace = read_trace(write_ticked(tmp_path / "t.jsonl", STAMPS_MS), seed=3)
    times_s = np.array([spec.arrival_s for spec in trace.requests])
    assert times_s[0] == 0.0
    assert (np.diff(times_s) > 0).all()
    assert [spec.input_tokens for spec in trace.requests] == list(range(100, 150))
    # All times move by the first one's place in its tick, so they are inside their tick up to that shift.
    shift_s = min(np.array(STAMPS_MS) / 1e3 + 3.0 - times_s)
    assert 0 <= shift_s <= 3.0
    assert "50 arrivals were recorded on ticks of about 3 s; each was spread uniformly inside its tick" in trace.notes


def test_ticks_can_be_replayed_as_recorded(tmp_path):
    trace = read_trace(write_ticked(tmp_path / "t.jsonl", STAMPS_MS), spread_ticks=False)
    assert [spec.arrival_s for spec in trace.requests] == [stamp / 1e3 for stamp in STAMPS_MS]
    assert trace.notes[-1].endswith("replayed as recorded: every tick is an artificial burst")


def test_the_run_decides_how_ticks_are_spread(tmp_path):
    path = write_ticked(tmp_path / "t.jsonl", STAMPS_MS)
    trace = read_trace(path, seed=5)
    assert build_requests(trace, seed=5).requests == trace.requests
    assert build_requests(trace, seed=5, replication=1).requests != trace.requests
    as_recorded = build_requests(trace, seed=5, spread_ticks=False)
    assert as_recorded.requests == read_trace(path, spread_ticks=False).requests
    assert as_recorded.notes[-1].endswith("artificial burst")


def test_bursts_and_millisecond_clocks_are_not_ticks():
    rng = np.random.default_rng(0)
    assert Ticks.detect([0.0] * 50) is None
    assert Ticks.detect(sorted(np.round(rng.random(1000) * 60, 3).tolist())) is None
    irregular = [stamp for stamp in (0.0, 0.7, 5.13, 9.9, 31.0, 31.77) for _ in range(9)]
    assert Ticks.detect(irregular) is None


@given(counts=st.lists(st.integers(3, 8), min_size=3, max_size=30), seed=st.integers(0, 2**32))
def test_spreading_stays_inside_the_tick_and_keeps_the_order(counts, seed):
    recorded = [2.0 * tick for tick, count in enumerate(counts) for _ in range(count)]
    ticks = Ticks.detect(recorded)
    assert ticks is not None
    spread = ticks.spread_s(seed=seed)
    assert all(stamp <= time_s < stamp + 2.0 for stamp, time_s in zip(recorded, spread, strict=True))
    assert list(spread) == sorted(spread)


def test_real_ticks_of_mooncake_are_found_and_others_are_not(data_dir):
    spread = read_trace(data_dir / "traces/mooncake/conversation_trace.jsonl")
    assert (
        spread.notes[-1]
        == "12,031 arrivals were recorded on ticks of about 3 s; each was spread uniformly inside its tick"
    )
    gaps_s = np.diff([spec.arrival_s for spec in spread.requests])
    assert 0.9 < gaps_s.std() / gaps_s.mean() < 1.1  # as recorded it is 3.0
    for name in (
        "mooncake/synthetic_trace.jsonl",
        "bench/t1000.moon.jsonl",
        "azure2023/AzureLLMInferenceTrace_code.csv",
    ):
        assert read_trace(data_dir / "traces" / name).ticks is None
