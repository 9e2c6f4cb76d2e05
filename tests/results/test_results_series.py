"""Time lines are thinned without losing a peak, and replicas add up."""

import numpy as np
import pytest

from sim.results.report_series import envelope, level, quantile_curve, spans


def table(rows, replica=0):
    """Rows of (time, duration, steps, running, used, used at the end)."""
    names = ("time_s", "duration_s", "steps", "running", "used_blocks", "used_blocks_end")
    columns = {name: np.array([row[i] for row in rows], dtype=np.float64) for i, name in enumerate(names)}
    return columns | {"replica": np.full(len(rows), float(replica))}


def joined(*tables):
    return {name: np.concatenate([one[name] for one in tables]) for name in tables[0]}


def test_a_short_run_keeps_every_step():
    rows = table([(0.0, 1.0, 1, 3, 0, 0), (1.0, 0.5, 1, 5, 0, 0)])
    edges = spans(rows)
    assert edges.tolist() == [0.0, 1.0, 1.5]
    assert envelope(level(rows, "running", edges, idle="zero"), edges).mean.tolist() == [3.0, 5.0]


def test_a_gap_between_rows_is_idle_for_requests_and_holds_for_blocks():
    rows = table([(0.0, 1.0, 1, 3, 40, 40), (3.0, 1.0, 1, 2, 50, 50)])
    edges = spans(rows)
    assert envelope(level(rows, "running", edges, idle="zero"), edges).mean.tolist() == [3.0, 0.0, 2.0]
    assert envelope(level(rows, "used_blocks", edges, idle="hold"), edges).mean.tolist() == [40.0, 40.0, 50.0]


def test_a_rounding_error_between_rows_is_not_idle_time():
    rows = table([(0.0, 0.1 + 0.2 - 1e-16, 1, 3, 0, 0), (0.1 + 0.2, 0.5, 1, 3, 0, 0)])
    edges = spans(rows)
    assert edges.size == 3
    assert envelope(level(rows, "running", edges, idle="zero"), edges).low.tolist() == [3.0, 3.0]


def test_the_peak_of_one_step_in_a_hundred_thousand_survives_thinning():
    running = np.ones(100_000)
    running[61_803] = 900.0
    rows = table([(0.01 * i, 0.01, 1, running[i], 0, 0) for i in range(running.size)])
    edges = spans(rows)
    assert edges.size == 601
    found = envelope(level(rows, "running", edges, idle="zero"), edges)
    assert found.high.max() == 900.0
    assert found.mean.max() < 10.0
    assert found.low.min() == 1.0


def test_the_mean_is_weighted_by_time_and_conserves_the_integral():
    rng = np.random.default_rng(2)
    durations = rng.exponential(0.1, 5000)
    starts = np.concatenate(([0.0], np.cumsum(durations)[:-1]))
    running = rng.integers(0, 50, 5000)
    rows = table([(s, d, 1, r, 0, 0) for s, d, r in zip(starts, durations, running, strict=True)])
    edges = spans(rows)
    found = envelope(level(rows, "running", edges, idle="zero"), edges)
    assert np.sum(found.mean * np.diff(edges)) == pytest.approx(np.sum(running * durations))
    assert np.all((found.low <= found.mean + 1e-9) & (found.mean <= found.high + 1e-9))


def test_blocks_climb_within_a_leap_and_reach_their_peak_in_its_last_step():
    # Ten steps of one second from 0 to 90 blocks; then everything is released at once.
    rows = table([(0.0, 10.0, 10, 1, 0, 90), (10.0, 2.0, 1, 1, 5, 5)])
    edges = np.linspace(0.0, 12.0, 13)
    found = envelope(level(rows, "used_blocks", edges, idle="hold"), edges)
    assert found.high.tolist() == pytest.approx([10.0 * i for i in range(10)] + [5.0, 5.0])


def test_a_row_of_one_step_shows_the_larger_of_its_two_counts():
    rows = table([(0.0, 1.0, 1, 1, 10, 12), (1.0, 1.0, 1, 1, 9, 3)])
    edges = spans(rows)
    assert envelope(level(rows, "used_blocks", edges, idle="hold"), edges).mean.tolist() == [12.0, 9.0]


def test_replicas_add_up():
    rows = joined(table([(0.0, 4.0, 1, 3, 0, 0)], replica=0), table([(1.0, 2.0, 1, 10, 0, 0)], replica=1))
    edges = spans(rows)
    assert envelope(level(rows, "running", edges, idle="zero"), edges).mean.tolist() == [3.0, 13.0, 3.0]


def test_no_rows_have_no_spans():
    assert spans(table([])).size == 0


def test_the_distribution_curve_keeps_the_extremes_and_the_whole_tail():
    values = np.random.default_rng(1).exponential(1.0, 20_000)
    x, y = quantile_curve(values)
    assert x.size <= 450
    assert (x[0], x[-1], y[-1]) == (values.min(), values.max(), 100.0)
    assert x[-50:].tolist() == np.sort(values)[-50:].tolist()
    assert np.all(np.diff(y) > 0)


def test_the_distribution_of_one_value_is_one_point():
    x, y = quantile_curve(np.array([3.0]))
    assert (x.tolist(), y.tolist()) == ([3.0], [100.0])
