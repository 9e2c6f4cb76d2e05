"""Preemptions, measured against predicted: equivalent, different, or too few to tell.

Preemptions come in bursts, and a handful of them is chance. Where a run counted them by request, both counts are resampled in
blocks of neighbouring requests; where only the totals are known, or either is small, each is taken as a Poisson count, of which the
ratio has an exact interval. A ratio is equivalent when its 90 % interval lies within the margin either way.

Source: Przyborowski and Wilenski 1940 (ratio of two Poisson counts); Clopper and Pearson 1934.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from calibration.numerics.resampling import HIGH, LOW, block_resamples, central_90
from calibration.recorded.runs import RecordedRun
from calibration.recorded.twin import SimulatedRun

from .trajectories import CANNOT_TELL, EQUIVALENT, ratio_verdict

FEW = 10
"""Fewer of either are taken as Poisson counts: blocks without any would make an interval of chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemptions:
    """How often requests were preempted."""

    measured: int | None
    """None where the run did not count."""
    predicted: int
    ratio: float | None
    """Predicted over measured; None without a measured one."""
    low: float | None
    """The 90 % interval of the ratio."""
    high: float | None
    margin: float
    """By which share the ratio may be off, either way."""
    verdict: str
    """`equivalent`, `different` or `cannot tell`."""
    why: str
    """How the verdict came about."""


def judge_preemptions(run: RecordedRun, twin: SimulatedRun, margin: float) -> Preemptions:
    """Compare the counts."""
    predicted = int(twin.summary["num_preemptions"])
    measured = run.num_preemptions
    if measured is None:
        return _made(None, predicted, None, None, margin, CANNOT_TELL, "the run did not count them")
    if measured == predicted == 0:
        return _made(0, 0, None, None, margin, EQUIVALENT, "none was measured and none is predicted")
    by_request = run.preemptions is not None and int(run.preemptions.sum()) == measured
    if by_request and run.preemptions is not None and min(measured, predicted) >= FEW:
        chosen = block_resamples(len(run.preemptions))
        ours = twin.preemptions[chosen].sum(axis=1, dtype=np.float64)
        theirs = run.preemptions[chosen].sum(axis=1, dtype=np.float64)
        low, high = central_90(np.divide(ours, theirs, out=np.full(len(chosen), np.inf), where=theirs > 0))
        how = "blocks of neighbouring requests, resampled"
    else:
        low, high = poisson_ratio(measured, predicted)
        how = "two Poisson counts"
    verdict = ratio_verdict(low, high, margin)
    if verdict == CANNOT_TELL:
        how += f": the interval reaches beyond the margin, 1/{1 + margin:.2f} to {1 + margin:.2f}"
    return _made(measured, predicted, low, high, margin, verdict, how)


def poisson_ratio(measured: int, predicted: int) -> tuple[float, float]:
    """The exact 90 % interval of the ratio of two Poisson means, of which one count each is known; `inf` where the first may be 0.

    Of `measured + predicted` events in all, each is one of the predicted with probability ratio / (1 + ratio).
    """
    from scipy.stats import beta

    low = float(beta.ppf(LOW, predicted, measured + 1)) if predicted else 0.0
    high = float(beta.ppf(HIGH, predicted + 1, measured)) if measured else 1.0
    return low / (1 - low), high / (1 - high) if high < 1 else float("inf")


def _made(
    measured: int | None, predicted: int, low: float | None, high: float | None, margin: float, verdict: str, why: str
) -> Preemptions:
    ratio = None if measured is None else predicted / measured if measured else None
    return Preemptions(
        measured=measured, predicted=predicted, ratio=ratio, low=low, high=high, margin=margin, verdict=verdict, why=why
    )
