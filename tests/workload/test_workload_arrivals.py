"""Arrival processes have the statistics that theory gives them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.workload import Batch, Deterministic, Gamma, OnOff, Poisson, Replay, WorkloadError, stream

BURSTS = OnOff(rate_on_per_s=8.0, rate_off_per_s=0.5, mean_on_s=5.0, mean_off_s=9.0)
PROCESSES = [
    Poisson(rate_per_s=3.0),
    Gamma(rate_per_s=3.0, burstiness=0.5),
    Deterministic(rate_per_s=3.0),
    Batch(),
    BURSTS,
    OnOff(rate_on_per_s=8.0, rate_off_per_s=0.0, mean_on_s=5.0, mean_off_s=9.0),
]


def first_half_counts(process: Poisson | Gamma, num_requests: int = 100, runs: int = 4000) -> np.ndarray:
    half_s = num_requests / process.rate_per_s / 2
    return np.array([(process.times_s(num_requests, stream(0, "arrival", run)) < half_s).sum() for run in range(runs)])


def test_poisson_counts_vary_as_poisson_counts_do():
    # In half of the mean span, which a run of n = 100 all but always outlives, variance / mean is 1.
    counts = first_half_counts(Poisson(rate_per_s=2.0))
    assert counts.mean() == pytest.approx(50, rel=0.01)
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.08)


def test_normalizing_as_vllm_bench_does_halves_the_variance_of_counts():
    counts = first_half_counts(Poisson(rate_per_s=2.0, normalize=True))
    assert counts.var() / counts.mean() == pytest.approx(0.5, abs=0.05)
    times_s = Gamma(rate_per_s=4.0, burstiness=0.3, normalize=True).times_s(200, stream(0, "arrival"))
    assert times_s[-1] == pytest.approx(200 / 4.0)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_the_mean_and_the_variation_of_their_shape(burstiness):
    gaps_s = np.diff(Gamma(rate_per_s=5.0, burstiness=burstiness).times_s(100_000, stream(1, "arrival")))
    assert gaps_s.mean() == pytest.approx(0.2, rel=0.02)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.02)


def test_gaps_are_not_clamped():
    # A clamp at three means would take 5 % off the mean gap; the largest of 100,000 exponential gaps is about 11.5 means.
    gaps = np.diff(Poisson(rate_per_s=1.0).times_s(100_000, stream(2, "arrival")))
    assert gaps.max() > 9


def test_on_off_has_the_mean_rate_gap_variation_and_dispersion_of_its_formulas():
    times_s = BURSTS.times_s(200_000, stream(0, "arrival"))
    gaps_s = np.diff(times_s)
    assert BURSTS.rate_per_s == pytest.approx((8.0 * 5 + 0.5 * 9) / 14)
    assert len(times_s) / times_s[-1] == pytest.approx(BURSTS.rate_per_s, rel=0.03)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(BURSTS.gap_cv, rel=0.03)
    counts = np.bincount((times_s / 10).astype(int))[:-1]
    assert counts.var() / counts.mean() == pytest.approx(BURSTS.dispersion(10.0), rel=0.06)


def test_on_off_with_equal_rates_is_poisson():
    process = OnOff(rate_on_per_s=3.0, rate_off_per_s=3.0, mean_on_s=2.0, mean_off_s=7.0)
    assert process.gap_cv == pytest.approx(1.0)
    assert process.dispersion(5.0) == pytest.approx(1.0)


def test_interrupted_poisson_has_the_published_gap_variation():
    # Kuczura 1973: gaps of an interrupted Poisson process are hyperexponential, CV^2 = 1 + 2 rate leave_on / (leave_on + leave_off)^2.
    process = OnOff(rate_on_per_s=8.0, rate_off_per_s=0.0, mean_on_s=5.0, mean_off_s=9.0)
    assert process.gap_cv**2 == pytest.approx(1 + 2 * 8.0 * (1 / 5) / (1 / 5 + 1 / 9) ** 2)


def test_on_off_starts_in_its_steady_state():
    # Starting always on would give 40 arrivals in the first 5 s of a process that has 3.2 a second.
    counts = [(BURSTS.times_s(100, stream(seed, "arrival")) < 1.0).sum() for seed in range(3000)]
    assert np.mean(counts) == pytest.approx(BURSTS.rate_per_s, rel=0.08)


def test_an_on_off_pattern_played_faster_keeps_its_variation():
    faster = BURSTS.at_rate(20.0)
    assert faster.rate_per_s == pytest.approx(20.0)
    assert faster.gap_cv == pytest.approx(BURSTS.gap_cv)
    ratio = BURSTS.rate_per_s / 20.0
    same = BURSTS.times_s(50, stream(3, "arrival")) * ratio
    assert faster.times_s(50, stream(3, "arrival")) == pytest.approx(same)


def test_deterministic_batch_and_replay_do_what_they_say():
    rng = stream(0, "arrival")
    assert Deterministic(rate_per_s=4.0).times_s(3, rng).tolist() == [0.0, 0.25, 0.5]
    assert Batch().times_s(3, rng).tolist() == [0.0, 0.0, 0.0]
    assert Batch().rate_per_s == math.inf
    replay = Replay(recorded_s=(0.0, 1.0, 1.0, 4.0))
    assert replay.rate_per_s == pytest.approx(0.75)
    assert replay.times_s(3, rng).tolist() == [0.0, 1.0, 1.0]
    with pytest.raises(WorkloadError, match="5 arrivals were asked for, the recording has 4"):
        replay.times_s(5, rng)


@given(
    index=st.integers(0, len(PROCESSES) - 1),
    n=st.integers(0, 400),
    more=st.integers(0, 400),
    seed=st.integers(0, 2**32),
)
def test_more_arrivals_never_change_the_earlier_ones(index, n, more, seed):
    few = PROCESSES[index].times_s(n, stream(seed, "arrival"))
    many = PROCESSES[index].times_s(n + more, stream(seed, "arrival"))
    assert len(few) == n
    assert few.tolist() == many[:n].tolist()
    assert (np.diff(many) >= 0).all()
    assert (many >= 0).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Poisson(rate_per_s=-1.0), "rate_per_s is -1.0"),
        (lambda: Poisson(rate_per_s=math.inf), "rate_per_s is inf"),
        (lambda: Gamma(rate_per_s=1.0, burstiness=0.0), "burstiness is 0.0"),
        (lambda: Deterministic(rate_per_s=math.nan), "rate_per_s is nan"),
        (
            lambda: OnOff(rate_on_per_s=1.0, rate_off_per_s=-1.0, mean_on_s=1.0, mean_off_s=1.0),
            "rate_off_per_s is -1.0",
        ),
        (lambda: OnOff(rate_on_per_s=1.0, rate_off_per_s=0.0, mean_on_s=0.0, mean_off_s=1.0), "mean_on_s is 0.0"),
        (lambda: Replay(recorded_s=(1.0, 0.5)), r"recorded_s\[1\] is 0.5"),
    ],
)
def test_impossible_processes_are_refused(make, message):
    with pytest.raises(WorkloadError, match=message):
        make()
