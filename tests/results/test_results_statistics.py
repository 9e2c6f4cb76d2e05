"""Right answers from textbooks and by hand for every statistic the twin reports."""

import numpy as np
import pytest

from sim.results.statistics import mean_interval, paired_difference, percentile, queue_grows


def test_percentile_interpolates_linearly_between_order_statistics():
    # h = (n - 1) q / 100 = 3 * 0.9 = 2.7, so 30 + 0.7 * (50 - 30)
    assert percentile([50.0, 10.0, 30.0, 20.0], 90) == pytest.approx(44.0)
    assert percentile([7.0], 99) == 7.0
    assert percentile([1.0, 2.0], 0) == 1.0
    assert percentile([1.0, 2.0], 100) == 2.0


def test_percentile_of_nothing_is_an_error_and_not_a_number():
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


@pytest.mark.parametrize(
    ("n", "confidence", "t"),
    [(2, 0.95, 12.706), (5, 0.95, 2.776), (11, 0.90, 1.812), (11, 0.99, 3.169), (31, 0.95, 2.042)],
)
def test_mean_interval_uses_the_tabled_t_quantiles(n, confidence, t):
    values = [float(value) for value in range(n)]
    found = mean_interval(values, confidence)
    assert found.mean == pytest.approx((n - 1) / 2)
    assert found.half_width == pytest.approx(t * np.std(values, ddof=1) / np.sqrt(n), rel=3e-4)
    assert found.n == n


def test_mean_interval_of_the_textbook_example():
    # Law, Simulation Modeling and Analysis, section 4.5: ten normal observations, 90 % interval 1.34 +- 0.24.
    values = [1.20, 1.50, 1.68, 1.89, 0.95, 1.49, 1.58, 1.55, 0.50, 1.09]
    found = mean_interval(values, 0.90)
    assert found.mean == pytest.approx(1.343)
    assert found.half_width == pytest.approx(0.24, abs=0.005)


def test_mean_interval_covers_the_true_mean_as_often_as_it_says():
    rng = np.random.default_rng(5)
    intervals = [mean_interval(list(rng.normal(3.0, 2.0, 8))) for _ in range(1000)]
    assert 0.93 <= np.mean([found.low <= 3.0 <= found.high for found in intervals]) <= 0.97


def test_mean_interval_refuses_a_single_replication():
    with pytest.raises(ValueError, match="at least 2 values, not 1"):
        mean_interval([1.0])


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95.0])
def test_confidence_is_a_share(confidence):
    with pytest.raises(ValueError, match=r"such as 0\.95"):
        mean_interval([1.0, 2.0], confidence)


# Student's sleep data (The probable error of a mean, 1908): hours gained with two drugs by the same ten patients.
DRUG_1 = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
DRUG_2 = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]


def test_paired_difference_reproduces_students_sleep_data():
    found = paired_difference(DRUG_1, DRUG_2, smaller_is_better=False)
    assert found.difference == pytest.approx(1.58)
    assert (found.low, found.high) == pytest.approx((0.7001, 2.4599), abs=2e-4)
    assert found.correlation == pytest.approx(0.7952, abs=1e-4)
    assert (found.baseline, found.candidate, found.n) == pytest.approx((0.75, 2.33, 10))
    assert found.verdict == "better"


def test_pairing_shows_what_independent_samples_cannot():
    # Welch's interval of the same data holds zero (-0.205, 3.365).
    assert paired_difference(DRUG_1, DRUG_2).low > 0


def test_the_verdict_follows_the_direction_that_is_good():
    slower = [value + 1.0 + 0.01 * index for index, value in enumerate(DRUG_1)]
    assert paired_difference(DRUG_1, slower).verdict == "worse"
    assert paired_difference(slower, DRUG_1).verdict == "better"
    assert paired_difference(DRUG_1, slower, smaller_is_better=False).verdict == "better"


def test_an_interval_that_holds_zero_shows_no_difference():
    assert paired_difference([1.0, 2.0, 3.0], [1.1, 1.9, 3.0]).verdict == "no difference shown"


def test_identical_replications_show_no_difference_and_a_constant_side_has_no_correlation():
    found = paired_difference([2.0, 2.0, 2.0], [2.0, 2.0, 2.0])
    assert (found.difference, found.low, found.high) == (0.0, 0.0, 0.0)
    assert found.verdict == "no difference shown"
    assert found.correlation is None


def test_a_difference_that_never_varies_is_still_a_difference():
    assert paired_difference([1.0, 2.0, 3.0], [0.5, 1.5, 2.5]).verdict == "better"


def test_pairs_must_be_pairs():
    with pytest.raises(ValueError, match="not 2 and 3"):
        paired_difference([1.0, 2.0], [1.0, 2.0, 3.0])


def _single_server_queue(utilisation, rng, jobs=4000):
    """Event times and queue length of an M/M/1 queue that starts empty, up to its last arrival."""
    arrivals = np.cumsum(rng.exponential(1.0 / utilisation, jobs))
    services = rng.exponential(1.0, jobs)
    departures = np.empty(jobs)
    free = 0.0
    for job in range(jobs):
        free = max(free, arrivals[job]) + services[job]
        departures[job] = free
    times = np.concatenate((arrivals, departures))
    order = np.argsort(times)
    length = np.cumsum(np.concatenate((np.ones(jobs), -np.ones(jobs)))[order])
    inside = times[order] <= arrivals[-1]
    return list(times[order][inside]), list(length[inside])


def test_an_overloaded_queue_is_always_seen_to_grow_at_its_rate():
    rng = np.random.default_rng(11)
    trends = [queue_grows(*_single_server_queue(1.3, rng)) for _ in range(20)]
    assert all(trends)
    # Arrivals come at 1.3 a second, departures leave at 1.
    assert np.mean([trend.slope_per_s for trend in trends]) == pytest.approx(0.3, abs=0.03)


def test_a_stable_queue_is_rarely_taken_for_a_growing_one_although_it_is_correlated():
    rng = np.random.default_rng(12)
    assert sum(bool(queue_grows(*_single_server_queue(0.7, rng))) for _ in range(60)) <= 4


def test_a_queue_that_drains_or_stands_does_not_grow():
    assert not queue_grows([0.0, 1.0, 2.0, 3.0], [30.0, 20.0, 10.0, 0.0])
    assert not queue_grows([0.0, 1.0, 2.0, 3.0], [5.0, 5.0, 5.0, 5.0])


def test_a_straight_line_has_its_own_slope():
    times = [float(time) for time in range(2001)]
    trend = queue_grows(times, [0.25 * time for time in times])
    assert trend.grows
    assert trend.slope_per_s == pytest.approx(0.25)


def test_values_are_weighted_by_how_long_they_hold():
    # A spike of a thousandth of a second weighs nothing, however many entries it has.
    times = [0.0, 99.0, *(99.0 + 1e-6 * k for k in range(1, 1000)), 100.0]
    values = [1.0, *([500.0] * 999), 1.0, 1.0]
    assert not queue_grows(times[: len(values)], values)


def test_growth_by_less_than_one_request_is_not_growth():
    times = [float(time) for time in range(101)]
    assert not queue_grows(times, [0.005 * time for time in times])


def test_no_time_or_too_few_points_give_no_trend():
    assert not queue_grows([], [])
    assert not queue_grows([1.0, 2.0], [1.0, 9.0])
    assert not queue_grows([1.0, 1.0, 1.0], [1.0, 2.0, 3.0])


def test_a_time_is_needed_for_each_value():
    with pytest.raises(ValueError, match="not 2 times for 3 values"):
        queue_grows([0.0, 1.0], [1.0, 2.0, 3.0])
