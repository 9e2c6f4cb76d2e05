"""`build_requests`: what is asked for is what comes, and one choice never disturbs another."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.request import RequestSpec
from sim.workload import WORKLOADS, Deterministic, OnOff, Replay, Trace, UnknownWorkload, WorkloadError, build_requests

NAMES = sorted(WORKLOADS)


def small_trace(rows: int = 5) -> Trace:
    requests = tuple(
        RequestSpec(request_id=str(i), arrival_s=2.0 * i, input_tokens=10 + i, output_tokens=3 + i, max_tokens=3 + i)
        for i in range(rows)
    )
    return Trace(name="t.csv", format="test", requests=requests)


def bodies(built):
    return [(spec.request_id, spec.input_tokens, spec.output_tokens, spec.content_ids) for spec in built.requests]


@pytest.mark.parametrize("name", NAMES)
def test_every_builtin_gives_a_thousand_requests_in_order_of_arrival(name):
    built = build_requests(name)
    assert len(built.requests) == 1000
    times_s = [spec.arrival_s for spec in built.requests]
    assert times_s == sorted(times_s)
    assert times_s[0] >= 0
    assert [spec.request_id for spec in built.requests] == [str(i) for i in range(1000)]
    for spec in built.requests:
        assert spec.input_tokens >= 1
        assert spec.max_tokens == spec.output_tokens >= 1
        assert type(spec.input_tokens) is int
        assert type(spec.arrival_s) is float
        if spec.content_ids:
            assert len(spec.content_ids) == -(-spec.input_tokens // spec.content_block_tokens)
    assert built.name == name
    assert 0 < built.offered_rate_per_s < math.inf


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(NAMES),
    seed=st.integers(0, 2**64),
    rate=st.sampled_from([0.5, 8.0, math.inf]),
    cancel_rate=st.sampled_from([0.0, 0.3, 1.0]),
    n=st.integers(1, 60),
)
def test_rate_cancels_and_number_never_change_what_a_request_is(name, seed, rate, cancel_rate, n):
    plain = build_requests(name, num_requests=60, seed=seed)
    other = build_requests(name, num_requests=n, seed=seed, rate_per_s=rate, cancel_rate=cancel_rate, timeout_s=3.0)
    assert bodies(plain)[:n] == bodies(other)
    assert build_requests(name, num_requests=60, seed=seed) == plain


def test_another_seed_or_replication_gives_other_requests():
    base = build_requests("azure-conv", num_requests=50)
    assert bodies(base) != bodies(build_requests("azure-conv", num_requests=50, seed=1))
    assert bodies(base) != bodies(build_requests("azure-conv", num_requests=50, replication=1))


def test_the_same_pattern_at_twice_the_rate_is_twice_as_fast():
    for name in NAMES:
        own = build_requests(name, num_requests=200)
        twice = build_requests(name, num_requests=200, rate_per_s=2 * own.offered_rate_per_s)
        assert [spec.arrival_s for spec in twice.requests] == pytest.approx(
            [spec.arrival_s / 2 for spec in own.requests]
        )
        assert twice.offered_rate_per_s == pytest.approx(2 * own.offered_rate_per_s)


def test_a_duration_bounds_arrivals_and_keeps_the_requests():
    built = build_requests("azure-conv", duration_s=30.0)
    longer = build_requests("azure-conv", duration_s=60.0)
    assert built.requests[-1].arrival_s < 30.0
    assert longer.requests[: len(built.requests)] == built.requests
    assert longer.requests[len(built.requests)].arrival_s >= 30.0
    assert len(build_requests("azure-conv", duration_s=30.0, num_requests=7).requests) == 7
    assert len(build_requests("azure-conv", duration_s=1.0, num_requests=1000).requests) < 30


def test_burstiness_is_the_shape_of_gamma_gaps():
    times_s = [
        spec.arrival_s
        for spec in build_requests("uniform", num_requests=20_000, rate_per_s=4.0, burstiness=0.25).requests
    ]
    gaps_s = np.diff(times_s)
    assert gaps_s.mean() == pytest.approx(0.25, rel=0.04)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(2.0, rel=0.05)


def test_an_arrival_can_be_named_or_given():
    named = build_requests("uniform", num_requests=4, arrival="deterministic", rate_per_s=2.0)
    assert [spec.arrival_s for spec in named.requests] == [0.0, 0.5, 1.0, 1.5]
    given_one = build_requests("azure-conv", num_requests=4, arrival=Deterministic(rate_per_s=2.0))
    assert [spec.arrival_s for spec in given_one.requests] == [0.0, 0.5, 1.0, 1.5]
    recorded = build_requests("azure-conv", arrival=Replay(recorded_s=(0.0, 2.0, 7.0)), duration_s=5.0)
    assert [spec.arrival_s for spec in recorded.requests] == [0.0, 2.0]
    bursts = build_requests("azure-conv", arrival="on-off", rate_per_s=9.0)
    assert bursts.offered_rate_per_s == pytest.approx(9.0)
    assert "on/off" in bursts.notes[1]
    assert {spec.arrival_s for spec in build_requests("uniform", rate_per_s=math.inf).requests} == {0.0}


def test_uniform_lengths_are_fixed_or_between_both_bounds():
    fixed = build_requests("uniform", num_requests=10, input_tokens=7, output_tokens=(3, 5))
    assert {spec.input_tokens for spec in fixed.requests} == {7}
    spread = build_requests("uniform", num_requests=3000, input_tokens=(3, 5)).requests
    counts = [sum(spec.input_tokens == tokens for spec in spread) for tokens in (3, 4, 5)]
    assert sum(counts) == 3000
    assert min(counts) > 900


def test_cancelling_clients_are_the_asked_share_and_more_never_moves_the_others():
    few = build_requests("uniform", num_requests=5000, cancel_rate=0.2, cancel_age_mean_s=4.0).requests
    many = build_requests("uniform", num_requests=5000, cancel_rate=0.4, cancel_age_mean_s=4.0).requests
    ages_s = [spec.cancel_after_s for spec in few if spec.cancel_after_s is not None]
    assert len(ages_s) / 5000 == pytest.approx(0.2, abs=0.02)
    assert np.mean(ages_s) == pytest.approx(4.0, rel=0.1)
    for a, b in zip(few, many, strict=True):
        assert a.cancel_after_s is None or a.cancel_after_s == b.cancel_after_s
        assert replace(a, cancel_after_s=None) == replace(b, cancel_after_s=None)


def test_timeouts_and_priorities_are_set_on_requests():
    built = build_requests("uniform", num_requests=4000, timeout_s=9.0, priorities={0: 0.25, 5: 0.75})
    assert {spec.timeout_s for spec in built.requests} == {9.0}
    assert sum(spec.priority == 0 for spec in built.requests) / 4000 == pytest.approx(0.25, abs=0.03)
    assert {spec.priority for spec in built.requests} == {0, 5}
    assert "priorities were drawn: 0 for 25%, 5 for 75%" in built.notes


def test_a_trace_is_replayed_as_recorded():
    built = build_requests(small_trace())
    assert built.requests == small_trace().requests
    assert built.offered_rate_per_s == pytest.approx(0.5)
    assert [spec.request_id for spec in build_requests(small_trace(), num_requests=2).requests] == ["0", "1"]
    assert [spec.request_id for spec in build_requests(small_trace(), duration_s=4.0).requests] == ["0", "1"]
    assert build_requests(small_trace(), num_requests=2).notes[-1] == "the first 2 of 5 requests of the trace"


def test_a_trace_with_a_rate_gets_new_arrivals_and_keeps_its_lengths():
    built = build_requests(small_trace(), rate_per_s=4.0)
    assert bodies(built) == [
        (spec.request_id, spec.input_tokens, spec.output_tokens, ()) for spec in small_trace().requests
    ]
    assert built.offered_rate_per_s == 4.0
    assert any("recorded arrivals were replaced: Poisson arrivals at 4/s" in note for note in built.notes)
    assert {spec.arrival_s for spec in build_requests(small_trace(), rate_per_s=math.inf).requests} == {0.0}


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"rate_per_s": -1.0}, "rate_per_s is -1.0"),
        ({"rate_per_s": math.nan}, "rate_per_s is nan"),
        ({"rate_per_s": 0.0}, "rate_per_s is 0.0"),
        ({"burstiness": 0.0}, "burstiness is 0.0"),
        ({"burstiness": 2.0, "rate_per_s": math.inf}, "everything arrives at time 0"),
        ({"burstiness": 2.0, "arrival": "poisson"}, "give either arrival or burstiness"),
        ({"rate_per_s": 2.0, "arrival": Deterministic(rate_per_s=1.0)}, "give either arrival or rate_per_s"),
        ({"arrival": "possion"}, "did you mean 'poisson'"),
        ({"arrival": "on-off"}, "'uniform' has no on-off arrivals"),
        ({"arrival": "batch", "rate_per_s": 2.0}, "everything arrives at time 0"),
        ({"cancel_rate": 1.5}, "cancel_rate is 1.5"),
        ({"cancel_rate": math.nan}, "cancel_rate is nan"),
        ({"cancel_age_mean_s": 0.0}, "cancel_age_mean_s is 0.0"),
        ({"duration_s": 0.0}, "duration_s is 0.0"),
        ({"duration_s": 1e12}, "takes more than 10,000,000 requests"),
        ({"duration_s": 1e-9}, "no request arrives within duration_s"),
        ({"duration_s": 5.0, "rate_per_s": math.inf}, "duration_s bounds nothing; give num_requests"),
        ({"num_requests": 0}, "num_requests is 0"),
        ({"num_requests": 2.5}, "num_requests is 2.5"),
        ({"timeout_s": -2.0}, "timeout_s is -2.0"),
        ({"seed": -1}, "seed is -1"),
        ({"priorities": {0: 0.5}}, "add up to 1"),
        ({"priorities": {0.5: 1.0}}, "a priority is 0.5"),
        ({"input_tokens": 0}, "input_tokens is 0"),
        ({"input_tokens": (9, 3)}, "the smallest must come first"),
        ({"output_tokens": (1, 2, 3)}, "a pair"),
    ],
)
def test_settings_that_make_no_workload_are_refused(settings_, message):
    with pytest.raises(WorkloadError, match=message):
        build_requests("uniform", **settings_)


def test_a_trace_refuses_what_it_cannot_give():
    with pytest.raises(WorkloadError, match=r"num_requests is 6, but the trace t\.csv has 5 requests"):
        build_requests(small_trace(), num_requests=6)
    with pytest.raises(WorkloadError, match="a trace has its own lengths"):
        build_requests(small_trace(), input_tokens=5)
    with pytest.raises(WorkloadError, match="fitted to built-in workloads"):
        build_requests(small_trace(), arrival="on-off")
    same_time = Trace(
        name="t", format="f", requests=tuple(replace(spec, arrival_s=0.0) for spec in small_trace().requests)
    )
    with pytest.raises(WorkloadError, match="give rate_per_s as well"):
        build_requests(same_time, burstiness=2.0)


def test_an_unknown_workload_names_the_nearest():
    with pytest.raises(
        UnknownWorkload, match=r"unknown workload 'azure_conv', did you mean 'azure-conv'\?; known are azure-code"
    ):
        build_requests("azure_conv")
    with pytest.raises(WorkloadError, match="read a trace file with read_trace"):
        build_requests(Path("trace.csv"))


def test_an_on_off_process_of_ones_own_is_taken():
    process = OnOff(rate_on_per_s=9.0, rate_off_per_s=1.0, mean_on_s=3.0, mean_off_s=3.0)
    assert build_requests(small_trace(), arrival=process).offered_rate_per_s == pytest.approx(5.0)
