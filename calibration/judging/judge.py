"""A recorded run against its simulation: errors, intervals, and a verdict by equivalence test.

Two one-sided tests (TOST): the twin is equivalent to the run in a metric when the 90 % interval of its error lies inside the
margin. The interval comes from resampling requests in pairs, measured and simulated together, in blocks of neighbours, which share a
queue and its batches: it is an interval over which requests were looked at, not over repeated runs. What there is too little of to
tell (a handful of preemptions) is said to be so, and decides nothing.

Source: Schuirmann 1987 (TOST); Sargent 2013, validation of simulation models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from calibration.errors import CalibrationError
from calibration.numerics.resampling import Indices, Pooled, block_resamples, central_90
from calibration.numerics.tent import Array
from calibration.recorded.runs import RecordedRun
from calibration.recorded.twin import SimulatedRun

from .conditions import differing_conditions
from .preemptions import Preemptions, judge_preemptions
from .trajectories import CANNOT_TELL, DIFFERENT, EQUIVALENT, Trajectory, trajectories

OPEN = "not shown"
STATISTICS: dict[str, Callable[[Array], Array]] = {
    "mean": lambda x: np.nanmean(x, axis=-1),
    "p50": lambda x: np.nanpercentile(x, 50, axis=-1),
    "p90": lambda x: np.nanpercentile(x, 90, axis=-1),
    "p99": lambda x: np.nanpercentile(x, 99, axis=-1),
}
SMALL_TTFT_S = 0.2
"""TTFT below this is judged by its absolute error: its relative one says nothing."""
SMALL_TTFT_MARGIN_S = 0.02
"""The margin then, or one step (a median TPOT) where that is less: when in a step a request arrives is chance."""
ITL_RANKS = (50.0, 90.0, 99.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Margins:
    """How far the twin may be off and still count as equivalent; shares."""

    mean: float = 0.05
    """Means, makespan and throughput."""
    tail: float = 0.10
    """Percentiles."""
    trajectory: float = 0.10
    """Normalised distance of a trajectory."""
    preemptions: float = 0.25
    """Ratio of preemptions, and of preempted requests on average: from 1 / 1.25 to 1.25."""

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
class Judgement:
    """Everything that was compared."""

    run: RecordedRun
    twin: SimulatedRun
    metrics: tuple[Metric, ...]
    trajectories: tuple[Trajectory, ...]
    preemptions: Preemptions
    margins: Margins

    @property
    def verdict(self) -> str:
        """`equivalent` when everything is that can be told, `different` when something certainly is not, `not shown` otherwise."""
        verdicts = {metric.verdict for metric in self.metrics} | {path.verdict for path in self.trajectories}
        verdicts = (verdicts | {self.preemptions.verdict}) - {CANNOT_TELL}
        if verdicts <= {EQUIVALENT}:
            return EQUIVALENT
        return DIFFERENT if DIFFERENT in verdicts else OPEN

    @property
    def differing(self) -> list[str]:
        """Under which other conditions the run was timed than its profile: an error may be theirs, not the twin's."""
        return differing_conditions(self.run.conditions, self.twin.measured, self.twin.profile)

    @property
    def warnings(self) -> list[str]:
        """All that is to be known: the differing conditions, and what the simulation says."""
        return [*self.differing, *self.twin.summary["warnings"]]

    @property
    def untold(self) -> tuple[str, ...]:
        """What was recorded, but too little of it to tell."""
        counted = self.preemptions.measured is not None and self.preemptions.verdict == CANNOT_TELL
        paths = [f"{path.name} over time" for path in self.trajectories if path.verdict == CANNOT_TELL]
        return (*(["preemptions"] if counted else []), *paths)

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
            "preemptions": asdict(self.preemptions),
            "cannot_tell": list(self.untold),
            "requests": {
                "sent": len(self.run.requests),
                "finished": int(self.run.finished.sum()),
                "finished_in_the_twin": self.twin.summary["finished"],
            },
            "bias": float(np.mean([metric.error for metric in self.metrics if not metric.absolute] or [0.0])),
            "worst": worst.name,
            "margins": asdict(self.margins),
            "warnings": self.warnings,
            "verdict": self.verdict,
        }


def judge(run: RecordedRun, twin: SimulatedRun, margins: Margins | None = None) -> Judgement:
    """Compare, over the requests that finished in the run.

    Raises: CalibrationError when none did, or the twin did not finish one that the run finished.
    """
    limits = margins or Margins()
    finished = run.finished
    unfinished = int(np.isnan(twin.e2el_s[finished]).sum())
    if unfinished or not finished.any():
        raise CalibrationError(
            f"{run.name}: {unfinished} of {int(finished.sum())} requests did not finish in the simulation; their times cannot be compared"
            if finished.any()
            else f"{run.name}: none of its {finished.size} requests finished; there is nothing to compare"
        )
    chosen = block_resamples(int(finished.sum()))
    small_s = (
        min(SMALL_TTFT_MARGIN_S, float(np.nanmedian(run.tpot_s)))
        if np.isfinite(run.tpot_s).any()
        else SMALL_TTFT_MARGIN_S
    )
    metrics = [
        _paired(
            f"{name}_{statistic}",
            getattr(run, f"{name}_s")[finished],
            getattr(twin, f"{name}_s")[finished],
            statistic,
            chosen,
            limits,
            small_s,
        )
        for name in ("ttft", "tpot", "e2el")
        for statistic in STATISTICS
    ]
    metrics += _itl(run, twin, limits, finished, chosen)
    metrics += [
        _single("makespan_s", run.makespan_s, twin.makespan_s, limits.mean),
        _single(
            "request_throughput_per_s",
            int(finished.sum()) / run.makespan_s,
            int(np.isfinite(twin.e2el_s).sum()) / twin.makespan_s,
            limits.mean,
        ),
    ]
    return Judgement(
        run=run,
        twin=twin,
        metrics=tuple(metrics),
        trajectories=tuple(trajectories(run, twin, limits.trajectory, limits.preemptions)),
        preemptions=judge_preemptions(run, twin, limits.preemptions),
        margins=limits,
    )


def _itl(
    run: RecordedRun, twin: SimulatedRun, limits: Margins, finished: npt.NDArray[np.bool_], chosen: Indices
) -> list[Metric]:
    """Inter-token latency over all tokens. Without every gap of the run there are its statistics alone, and no interval."""
    if run.itl_s is None:
        return []
    margins = {name: limits.mean if name == "mean" else limits.tail for name in STATISTICS}
    places = np.flatnonzero(finished).tolist()
    if run.itl_gaps_s is None or not sum(run.itl_gaps_s[i].size for i in places):
        predicted = twin.summary["itl_s"]
        return [
            _single(f"itl_{name}_s", run.itl_s[name], predicted[name], margins[name])
            for name in STATISTICS
            if name in run.itl_s
        ]
    theirs, ours = (Pooled([gaps[i] for i in places]) for gaps in (run.itl_gaps_s, twin.itl_gaps_s))
    everyone = np.arange(len(places))
    a, b = theirs.statistics(everyone, ITL_RANKS), ours.statistics(everyone, ITL_RANKS)
    again = np.stack([ours.statistics(one, ITL_RANKS) / theirs.statistics(one, ITL_RANKS) - 1 for one in chosen])
    return [
        _judged(f"itl_{name}_s", float(a[k]), float(b[k]), again[:, k], margins[name])
        for k, name in enumerate(STATISTICS)
    ]


def _paired(
    name: str, measured: Array, predicted: Array, statistic: str, chosen: Any, limits: Margins, small_ttft_s: float
) -> Metric:
    of = STATISTICS[statistic]
    a, b = float(of(measured)), float(of(predicted))
    absolute = name.startswith("ttft") and a < SMALL_TTFT_S
    margin = small_ttft_s if absolute else (limits.mean if statistic == "mean" else limits.tail)
    again_a, again_b = of(measured[chosen]), of(predicted[chosen])
    errors = again_b - again_a if absolute else again_b / again_a - 1
    return _judged(f"{name}_s", a, b, errors, margin, absolute=absolute)


def _judged(
    name: str, measured: float, predicted: float, errors: Array, margin: float, *, absolute: bool = False
) -> Metric:
    """A metric whose error has been resampled."""
    low, high = central_90(errors)
    return Metric(
        name=name,
        measured=measured,
        predicted=predicted,
        error=predicted - measured if absolute else predicted / measured - 1,
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


def _verdict(low: float, high: float, margin: float) -> str:
    if -margin <= low and high <= margin:
        return EQUIVALENT
    return DIFFERENT if low > margin or high < -margin else OPEN
