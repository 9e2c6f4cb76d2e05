"""What `kvtwin calibrate` prints of a fit and of a judgement."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .terminal import say

if TYPE_CHECKING:
    from calibration.judging.judge import Judgement, Metric
    from calibration.judging.trajectories import Trajectory


def print_fit(profile: dict[str, Any], out: Path) -> None:
    """Errors, intervals and notes of a profile."""
    say(f"{profile['name']}: fitted to {profile['provenance']['source']}")
    for key, value in profile["error"].items():
        if isinstance(value, dict) and value.get("median") is not None:
            say(f"  {key:<48} median {value['median']:6.1%}   95th percentile {value['p95']:6.1%}")
        elif key in ("kernels_only", "corrected"):
            say(f"  {key.replace('_', ' '):<48} " + ", ".join(f"{name} {off:+.1%}" for name, off in value.items()))
    for term, (low, high) in profile["intervals"].items():
        say(f"  {term:<48} 95 % interval of the term as a whole [{low:+.1%}, {high:+.1%}]")
    memory = profile.get("memory", {})
    if "lines" in memory:
        limits = ", ".join(f"{name} {value:,}" for name, value in memory["limits"].items())
        low, high = memory["workspace_interval"]
        names, engine = ", ".join(memory["lines"]), memory["engine"].split(",")[0]
        say(
            f"  memory lines of {engine}: {names}, step buffers; a step's peak [{low:+.1%}, {high:+.1%}]; measured up to {limits}"
        )
    for text in profile["identifiability"]:
        say(f"  note: {text}")
    say(f"wrote {out}")


def print_judgement(judged: Judgement) -> None:
    """Verdict, metrics, trajectories and notes."""
    say(f"{judged.run.name} against {judged.twin.profile}: {judged.verdict}")
    for metric in judged.metrics:
        single = metric.low == metric.high
        shown = [
            f"{v * 1e3:+.1f} ms" if metric.absolute else f"{v:+.2%}" for v in (metric.error, metric.low, metric.high)
        ]
        say(
            f"  {metric.name:<26} {metric.measured:10.4g} measured {metric.predicted:10.4g} predicted "
            f"{shown[0]:>9}  {'' if single else f'[{shown[1]}, {shown[2]}]  '}{metric.verdict}{_predicted_interval(metric)}"
        )
    for path in judged.trajectories:
        say(
            f"  {path.name:<26} {path.measured_mean:10.4g} measured {path.predicted_mean:10.4g} predicted "
            f"{_apart(path)}  {path.verdict}"
        )
    found = judged.preemptions
    measured = "not counted" if found.measured is None else f"{found.measured:,} measured"
    ratio = "" if found.low is None or found.high is None else f"ratio [{found.low:.2f}, {found.high:.2f}]  "
    say(f"  {'preemptions':<26} {measured:>19} {found.predicted:10,} predicted {ratio}{found.verdict}: {found.why}")
    if judged.untold:
        say(f"  too little of it to tell: {', '.join(judged.untold)}; the verdict leaves it out")
    for difference in judged.differing:
        say(f"  warning: {difference}")
    for warning in judged.twin.summary["warnings"]:
        say(f"  note: {warning}")


def _apart(path: Trajectory) -> str:
    """How far apart the two trajectories are, or between which ratios their means lie."""
    if path.ratio_low is None or path.ratio_high is None:
        return f"distance {path.distance:.1%}"
    return f"ratio of means [{path.ratio_low:.2f}, {path.ratio_high:.2f}]"


def _predicted_interval(metric: Metric) -> str:
    if metric.predicted_low is None or metric.predicted_high is None:
        return ""
    return f"   prediction [{metric.predicted_low:.4g}, {metric.predicted_high:.4g}]"
