"""A recorded run against its simulation: errors, intervals, and a verdict by equivalence test.

Two one-sided tests (TOST): the twin is equivalent to the run in a metric when the 90 % interval of its error lies inside the
margin. The interval comes from resampling requests in pairs, measured and simulated together. Requests of one run are not
independent (they share a queue), so it is an interval over which requests were looked at, not over repeated runs.

Source: Schuirmann 1987 (TOST); Sargent 2013, validation of simulation models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .errors import CalibrationError
from .runs import RecordedRun
from .split import SEED
from .tent import Array
from .twin import SimulatedRun, preempted

EQUIVALENT, DIFFERENT, OPEN = "equivalent", "different", "not shown"
STATISTICS: dict[str, Callable[[Array], Array]] = {
    "mean": lambda x: np.nanmean(x, axis=-1),
    "p50": lambda x: np.nanpercentile(x, 50, axis=-1),
    "p90": lambda x: np.nanpercentile(x, 90, axis=-1),
    "p99": lambda x: np.nanpercentile(x, 99, axis=-1),
}
SMALL_TTFT_S = 0.2
"""TTFT below this is judged by its absolute error: its relative one says nothing."""
SMALL_TTFT_MARGIN_S = 0.02
RESAMPLES = 500
FEW = 0.5
"""Mean number of requests below which a trajectory is not compared."""
PREEMPTED_MARGIN = 0.25
"""How far the mean number of preempted requests may be off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Margins:
    """How far the twin may be off and still count as equivalent; shares."""

    mean: float = 0.05
    """Means, makespan and throughput."""
    tail: float = 0.10
    """Percentiles."""
    trajectory: float = 0.10
    """Normalised distance of a trajectory."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 < value < 1:
                raise CalibrationError(f"margin {name} is {value}; it is a share between 0 and 1, such as 0.05")


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number of the run and of its twin."""

    name: str
    measured: float
    predicted: float
    error: float
    """Relative, or in seconds for `absolute` ones."""
    low: float
    high: float
    """The 90 % interval of the error; equal to it where there is only one value."""
    margin: float
    absolute: bool
    verdict: str
    predicted_low: float | None = None
    """The prediction's own interval, from the uncertainty of the profile; None when it was not asked for."""
    predicted_high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """A state of the engine over time, measured and simulated at the same ticks."""

    name: str
    distance: float
    """Mean absolute difference over the mean measured value."""
    measured_mean: float
    predicted_mean: float
    verdict: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Everything that was compared."""

    run: RecordedRun
    twin: SimulatedRun
    metrics: tuple[Metric, ...]
    trajectories: tuple[Trajectory, ...]
    margins: Margins

    @property
    def verdict(self) -> str:
        """`equivalent` when everything is, `different` when something certainly is not, `not shown` otherwise."""
        verdicts = {metric.verdict for metric in self.metrics} | {path.verdict for path in self.trajectories}
        if verdicts <= {EQUIVALENT}:
            return EQUIVALENT
        return DIFFERENT if DIFFERENT in verdicts else OPEN

    def as_dict(self) -> dict[str, Any]:
        """The JSON document of `kvtwin calibrate judge --json`."""
        worst = max(self.metrics, key=lambda metric: abs(metric.error) / metric.margin)
        return {
            "run": self.run.name,
            "provenance": self.run.provenance,
            "profile": self.twin.profile,
            "num_gpu_blocks": self.twin.summary["num_gpu_blocks"],
            "metrics": [asdict(metric) for metric in self.metrics],
            "trajectories": [asdict(trajectory) for trajectory in self.trajectories],
            "preemptions": {"predicted": self.twin.summary["num_preemptions"]},
            "bias": float(np.mean([metric.error for metric in self.metrics if not metric.absolute] or [0.0])),
            "worst": worst.name,
            "margins": asdict(self.margins),
            "warnings": self.twin.summary["warnings"],
            "verdict": self.verdict,
        }


def judge(run: RecordedRun, twin: SimulatedRun, margins: Margins | None = None) -> Judgement:
    """Compare. Raises: CalibrationError when the twin did not finish the requests that the run finished."""
    limits = margins or Margins()
    if np.isnan(twin.e2el_s).any():
        raise CalibrationError(
            f"{run.name}: {int(np.isnan(twin.e2el_s).sum())} of {twin.e2el_s.size} requests did not finish in the simulation; "
            "their times cannot be compared"
        )
    rng = np.random.default_rng(SEED)
    chosen = rng.integers(0, run.ttft_s.size, (RESAMPLES, run.ttft_s.size))
    metrics = [
        _paired(f"{name}_{statistic}", getattr(run, f"{name}_s"), getattr(twin, f"{name}_s"), statistic, chosen, limits)
        for name in ("ttft", "tpot", "e2el")
        for statistic in STATISTICS
    ]
    metrics += [
        _single("makespan_s", run.makespan_s, twin.makespan_s, limits.mean),
        _single(
            "request_throughput_per_s",
            len(run.requests) / run.makespan_s,
            len(run.requests) / twin.makespan_s,
            limits.mean,
        ),
    ]
    return Judgement(
        run=run, twin=twin, metrics=tuple(metrics), trajectories=tuple(_trajectories(run, twin, limits)), margins=limits
    )


def _paired(name: str, measured: Array, predicted: Array, statistic: str, chosen: Any, limits: Margins) -> Metric:
    of = STATISTICS[statistic]
    a, b = float(of(measured)), float(of(predicted))
    absolute = name.startswith("ttft") and a < SMALL_TTFT_S
    margin = SMALL_TTFT_MARGIN_S if absolute else (limits.mean if statistic == "mean" else limits.tail)
    again_a, again_b = of(measured[chosen]), of(predicted[chosen])
    errors = again_b - again_a if absolute else again_b / again_a - 1
    low, high = (float(value) for value in np.nanquantile(errors, [0.05, 0.95]))
    error = b - a if absolute else b / a - 1
    return Metric(
        name=f"{name}_s",
        measured=a,
        predicted=b,
        error=error,
        low=low,
        high=high,
        margin=margin,
        absolute=absolute,
        verdict=_verdict(low, high, margin),
    )


def _single(name: str, measured: float, predicted: float, margin: float) -> Metric:
    error = predicted / measured - 1
    return Metric(
        name=name,
        measured=measured,
        predicted=predicted,
        error=error,
        low=error,
        high=error,
        margin=margin,
        absolute=False,
        verdict=_verdict(error, error, margin),
    )


def _trajectories(run: RecordedRun, twin: SimulatedRun, limits: Margins) -> list[Trajectory]:
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
        close = abs(ratio - 1) <= PREEMPTED_MARGIN if name == "preempted" else distance <= limits.trajectory
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


def _verdict(low: float, high: float, margin: float) -> str:
    if -margin <= low and high <= margin:
        return EQUIVALENT
    return DIFFERENT if low > margin or high < -margin else OPEN
