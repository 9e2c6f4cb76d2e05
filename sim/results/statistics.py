"""The few statistical answers the twin gives, each by its textbook definition.

Replications are compared in pairs (the same requests in A and B), and a queue that keeps growing is recognised by the slope of its
batch means. Functions take plain sequences and give plain values. scipy is imported where a t quantile is needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BETTER = "better"
WORSE = "worse"
NO_DIFFERENCE = "no difference shown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean and its confidence interval."""

    mean: float
    low: float
    high: float
    n: int
    """Observations it rests on."""
    confidence: float

    @property
    def half_width(self) -> float:
        """Half the width of the interval."""
        return (self.high - self.low) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDifference:
    """Candidate minus baseline, over replications that saw the same requests."""

    baseline: float
    """Mean of the baseline."""
    candidate: float
    """Mean of the candidate."""
    difference: float
    low: float
    high: float
    correlation: float | None
    """Pearson correlation of the pairs; near 1 when common random numbers work. None when a side does not vary."""
    n: int
    """Pairs."""
    verdict: str
    """`better`, `worse`, or `no difference shown` (the interval holds zero)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueTrend:
    """The slope of a queue's length over time. True in a condition when it is significantly positive."""

    slope_per_s: float
    """Requests by which the queue grows each second."""
    low: float
    high: float
    grows: bool

    def __bool__(self) -> bool:
        return self.grows


def percentile(values: Sequence[float] | npt.NDArray[np.float64], q: float) -> float:
    """The `q`-th percentile, q in [0, 100], by linear interpolation between order statistics.

    With n sorted values x[0..n-1] and h = (n - 1) q / 100, it is x[floor h] + (h - floor h)(x[floor h + 1] - x[floor h]).
    Raises ValueError when there are no values or q is outside [0, 100].
    Source: `numpy.percentile`, as `vllm bench serve` calls it.
    """
    if len(values) == 0:
        raise ValueError("a percentile of no values does not exist")
    return float(np.percentile(np.asarray(values, dtype=np.float64), q))


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Mean and two-sided Student t interval of independent observations (replications).

    Raises ValueError with fewer than two values. Source: Law, Simulation Modeling and Analysis, section 4.5.
    """
    x = np.asarray(values, dtype=np.float64)
    if x.size < 2:
        raise ValueError(f"an interval needs at least 2 values, not {x.size}")
    half_width = _t_quantile(confidence, x.size - 1) * float(x.std(ddof=1)) / math.sqrt(x.size)
    mean = float(x.mean())
    return Interval(mean=mean, low=mean - half_width, high=mean + half_width, n=int(x.size), confidence=confidence)


def paired_difference(
    a: Sequence[float], b: Sequence[float], confidence: float = 0.95, *, smaller_is_better: bool = True
) -> PairedDifference:
    """Compare candidate `b` with baseline `a`, value k of both from the same requests: a paired t interval on `b - a`.

    Raises ValueError when the lengths differ or there are fewer than two pairs.
    Source: Law, Simulation Modeling and Analysis, section 10.2.1 (paired-t confidence interval).
    """
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if x.shape != y.shape:
        raise ValueError(f"pairs need as many values of a as of b, not {x.size} and {y.size}")
    interval = mean_interval(list(y - x), confidence)
    verdict = NO_DIFFERENCE
    if interval.low > 0 or interval.high < 0:
        verdict = BETTER if (interval.mean < 0) == smaller_is_better else WORSE
    varies = bool(np.ptp(x) > 0 and np.ptp(y) > 0)
    return PairedDifference(
        baseline=float(x.mean()),
        candidate=float(y.mean()),
        difference=interval.mean,
        low=interval.low,
        high=interval.high,
        correlation=float(np.corrcoef(x, y)[0, 1]) if varies else None,
        n=int(x.size),
        verdict=verdict,
    )


def queue_grows(
    times: Sequence[float], values: Sequence[float], confidence: float = 0.95, *, batches: int = 20
) -> QueueTrend:
    """Whether a queue's length has a significantly positive slope: there is no steady state.

    `values[i]` holds from `times[i]` to `times[i + 1]` (seconds, ascending); the last time only ends the observation. Pass the time
    during which requests arrive: afterwards every queue drains. The time-weighted means of `batches` equal spans are judged in
    two ways, because a queue below capacity returns and one above capacity wanders:

    * their regression on time, its t interval allowing for the correlation r left between neighbouring residuals (variance and
      degrees of freedom are those of `batches * (1 - r) / (1 + r)` independent points);
    * the mean of their differences with its t interval, which is right for a random walk with drift.

    Either lower bound above zero shows growth, and the interval returned is the one that shows it. Growth by less than one
    request over the whole time is not growth. Fewer than three points, or no time, give no trend. On simulated M/M/1 queues of
    3,000 jobs, at most 4 % of runs are called growing up to a load of 0.85, 10 % at 0.95, and all from 1.15 on.
    Raises ValueError when the lengths differ.
    Source: the over-saturation rule of guidellm (slope with a t interval); Santer et al. 2000 for the widening.
    """
    t, v = np.asarray(times, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if t.shape != v.shape:
        raise ValueError(f"a time is needed for each value, not {t.size} times for {v.size} values")
    if t.size < 3 or t[-1] <= t[0]:
        return QueueTrend(slope_per_s=0.0, low=-math.inf, high=math.inf, grows=False)
    edges = np.linspace(t[0], t[-1], batches + 1)
    integral = np.interp(edges, t, np.concatenate(([0.0], np.cumsum(v[:-1] * np.diff(t)))))
    span_s = float(t[-1] - t[0]) / batches
    means: npt.NDArray[np.float64] = np.diff(integral) / span_s
    by_regression = _regression_slope(means, confidence)
    by_drift = mean_interval(np.diff(means).tolist(), confidence)
    shown = by_drift if by_drift.low > 0 >= by_regression.low else by_regression
    return QueueTrend(
        slope_per_s=shown.mean / span_s,
        low=shown.low / span_s,
        high=shown.high / span_s,
        grows=shown.low > 0 and shown.mean * batches >= 1.0,
    )


def _regression_slope(y: npt.NDArray[np.float64], confidence: float) -> Interval:
    """Slope of equally spaced values, a step, by least squares; the interval allows for correlated residuals."""
    n = y.size
    x = np.arange(n) - (n - 1) / 2
    spread = float(np.sum(x * x))
    slope = float(np.sum(x * y)) / spread
    residuals = y - y.mean() - slope * x
    squares = float(np.sum(residuals * residuals))
    # Residuals that are only rounding have no meaningful correlation.
    noise = squares <= 1e-18 * float(np.sum(y * y))
    correlation = 0.0 if noise else float(np.sum(residuals[1:] * residuals[:-1])) / squares
    correlation = min(max(correlation, 0.0), 0.95)
    freedom = max(n * (1 - correlation) / (1 + correlation) - 2, 1.0)
    half_width = _t_quantile(confidence, freedom) * math.sqrt(squares / freedom / spread)
    return Interval(mean=slope, low=slope - half_width, high=slope + half_width, n=n, confidence=confidence)


def _t_quantile(confidence: float, freedom: float) -> float:
    """The factor of a two-sided t interval. Raises ValueError when the confidence is not a share between 0 and 1."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; it is a share between 0 and 1, such as 0.95")
    from scipy.special import stdtrit  # what scipy.stats.t.ppf calls, without the time to import scipy.stats

    return float(stdtrit(freedom, (1 + confidence) / 2))
