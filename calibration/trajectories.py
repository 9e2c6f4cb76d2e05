"""The state of the engine over time, measured and simulated: how far apart the two are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .runs import RecordedRun
from .twin import SimulatedRun, preempted

EQUIVALENT, DIFFERENT = "equivalent", "different"
FEW = 0.5
"""Mean number of requests below which a trajectory is not compared."""
PREEMPTED_MARGIN = 0.25
"""How far the mean number of preempted requests may be off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """A state of the engine over time, measured and simulated at the same ticks."""

    name: str
    distance: float
    """Mean absolute difference over the mean measured value."""
    measured_mean: float
    predicted_mean: float
    verdict: str


def trajectories(run: RecordedRun, twin: SimulatedRun, margin: float) -> list[Trajectory]:
    """Those that the run recorded; `margin` is the largest distance that counts as equivalent."""
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
        distance = float(np.mean(np.abs(simulated[name] - values)) / scale) if scale else float("inf")
        ratio = float(np.mean(simulated[name])) / scale if scale else float("inf")
        # A handful of preempted requests flickers: not when, but how many there were is judged.
        close = abs(ratio - 1) <= PREEMPTED_MARGIN if name == "preempted" else distance <= margin
        verdict = EQUIVALENT if close else DIFFERENT
        found.append(
            Trajectory(
                name=name,
                distance=distance,
                measured_mean=scale,
                predicted_mean=float(np.mean(simulated[name])),
                verdict=verdict,
            )
        )
    return found
