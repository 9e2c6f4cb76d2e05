"""The state of the engine over time, measured and simulated: how far apart the two are."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from calibration.numerics.resampling import block_resamples, central_90
from calibration.numerics.tent import Array
from calibration.recorded.runs import RecordedRun
from calibration.recorded.twin import SimulatedRun, preempted

EQUIVALENT, DIFFERENT, CANNOT_TELL = "equivalent", "different", "cannot tell"
FEW = 0.5
"""Mean number of requests below which a trajectory is not compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """A state of the engine over time, measured and simulated at the same ticks."""

    name: str
    distance: float
    """Mean absolute difference over the mean measured value."""
    measured_mean: float
    predicted_mean: float
    margin: float
    """Largest distance that counts as equivalent; of `preempted`, by which share the mean may be off either way."""
    verdict: str
    ratio_low: float | None = None
    """The 90 % interval of predicted over measured mean, of `preempted` alone."""
    ratio_high: float | None = None


def trajectories(run: RecordedRun, twin: SimulatedRun, margin: float, preempted_margin: float) -> list[Trajectory]:
    """Those that the run recorded; `margin` is the largest distance that counts as equivalent.

    A handful of preempted requests flickers: not when, but how many there were on average is judged, by `preempted_margin`.
    """
    if run.ticks_s is None:
        return []
    simulated = twin.at(run.ticks_s)
    measured = dict(run.trajectories)
    if run.scheduled_s is not None:
        measured["preempted"] = preempted(run.scheduled_s, run.finished_s, run.ticks_s, measured["running"])
    found = []
    for name, values in measured.items():
        scale = float(np.mean(values))
        if scale < FEW and simulated[name].mean() < FEW and name != "kv_usage":
            continue  # nothing to follow: a request that is started and not yet counted as running makes such a trace
        found.append(_compared(name, values, simulated[name], margin, preempted_margin))
    return found


def _compared(name: str, measured: Array, simulated: Array, margin: float, preempted_margin: float) -> Trajectory:
    scale = float(np.mean(measured))
    distance = float(np.mean(np.abs(simulated - measured)) / scale) if scale else float("inf")
    path = Trajectory(
        name=name,
        distance=distance,
        measured_mean=scale,
        predicted_mean=float(np.mean(simulated)),
        margin=margin,
        verdict=EQUIVALENT if distance <= margin else DIFFERENT,
    )
    if name != "preempted":
        return path
    low, high = mean_ratio(measured, simulated)
    verdict = ratio_verdict(low, high, preempted_margin)
    return replace(path, margin=preempted_margin, verdict=verdict, ratio_low=low, ratio_high=high)


def mean_ratio(measured: Array, simulated: Array) -> tuple[float, float]:
    """The 90 % interval of the ratio of two means over the same ticks, by blocks of neighbouring ticks.

    Occupancy changes slowly, so the blocks are long: the root of the number of ticks.
    """
    chosen = block_resamples(measured.size, length=math.ceil(math.sqrt(measured.size)))
    theirs = measured[chosen].mean(axis=1)
    ours = simulated[chosen].mean(axis=1)
    return central_90(np.divide(ours, theirs, out=np.full(theirs.size, np.inf), where=theirs > 0))


def ratio_verdict(low: float, high: float, margin: float) -> str:
    """Equivalent within the margin either way, different beyond it, and otherwise nothing is known."""
    bound = 1 + margin
    if 1 / bound <= low and high <= bound:
        return EQUIVALENT
    return DIFFERENT if low > bound or high < 1 / bound else CANNOT_TELL
