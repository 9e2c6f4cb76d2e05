"""What `kvtwin calibrate` prints of a fit and of a judgement."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .terminal import say

if TYPE_CHECKING:
    from calibration.judge import Judgement, Metric


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
            f"distance {path.distance:.1%}  {path.verdict}"
        )
    preemptions = judged.as_dict()["preemptions"]
    if preemptions["measured"] is not None:
        say(f"  {'preemptions':<26} {preemptions['measured']:10,} measured {preemptions['predicted']:10,} predicted")
    for warning in judged.twin.summary["warnings"]:
        say(f"  note: {warning}")


def _predicted_interval(metric: Metric) -> str:
    if metric.predicted_low is None or metric.predicted_high is None:
        return ""
    return f"   prediction [{metric.predicted_low:.4g}, {metric.predicted_high:.4g}]"
