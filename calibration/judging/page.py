"""The judgement as one HTML page: verdict, figures, predicted against measured, trajectories. Nothing is loaded from elsewhere."""

from __future__ import annotations

from html import escape

import numpy as np

from calibration.plots import BLUE, GREEN, GREY, RED, Series, against, band, lines, page_frame, table
from calibration.recorded.twin import preempted

from .judge import Judgement, Metric
from .preemptions import Preemptions
from .trajectories import CANNOT_TELL, DIFFERENT, EQUIVALENT, Trajectory

CLASS = {EQUIVALENT: "good", DIFFERENT: "bad"}
COLOUR = {EQUIVALENT: GREEN, DIFFERENT: RED}
UNSURE = "#8a6100"
WORDS = {
    "ttft": "time to first token (TTFT)",
    "tpot": "time per output token (TPOT)",
    "itl": "inter-token latency (ITL)",
    "e2el": "end-to-end latency (E2EL)",
    "makespan_s": "makespan",
    "request_throughput_per_s": "requests finished a second",
}
PATHS = {
    "running": "running requests",
    "waiting": "waiting requests",
    "kv_usage": "share of KV blocks in use",
    "preempted": "preempted requests",
}
MEANING = {
    EQUIVALENT: "Every error that can be told lies within its margin, with its interval.",
    DIFFERENT: "At least one error certainly lies outside its margin.",
    "not shown": "No error certainly lies outside its margin, but some intervals reach beyond: a longer run would tell.",
}
RANKS = np.linspace(0.5, 99.9, 200)


def page(judgement: Judgement) -> str:
    """The whole page."""
    document = judgement.as_dict()
    requests = document["requests"]
    finished = (
        f"{requests['finished']:,} of {requests['sent']:,}; in the simulation {requests['finished_in_the_twin']:,}"
    )
    worst = f"Worst for its margin: {escape(_name(document['worst']))}. Mean error (bias): {document['bias']:+.1%}."
    differing = "".join(f"<p><strong>Warning:</strong> {escape(text)}.</p>" for text in judgement.differing)
    warnings = "".join(f"<li>{escape(text)}</li>" for text in judgement.twin.summary["warnings"])
    kind = CLASS.get(judgement.verdict, "open")
    untold = f"<p>Too little of it to tell: {escape(', '.join(judgement.untold))}.</p>" if judgement.untold else ""
    body = f"""<div class="verdict {kind}"><strong class="{kind}">{judgement.verdict}</strong>
<p>{MEANING[judgement.verdict]} {worst}</p>{untold}{differing}</div>
<table><tr><td>measured</td><td class="text">{escape(judgement.run.provenance)}</td></tr>
<tr><td>simulated</td><td class="text">{escape(judgement.twin.profile)}, {document["num_gpu_blocks"]:,} KV blocks</td></tr>
<tr><td>requests finished</td><td class="text">{finished}</td></tr>
</table>
<h2>Times and throughput</h2>{_metrics(judgement)}
<p class="soft">The strip shows the error (dot) with its 90 % interval (bar) from blocks of neighbouring requests, on the margin (grey
band); its ends are twice the margin. An error without a bar is that of a single value.</p>
<h2>Preemptions and state over time</h2>{_counts(judgement)}
<h2>Predicted against measured</h2><div class="row">{"".join(_scatter(judgement))}</div>
<h2>Over time</h2><div class="row">{"".join(_paths(judgement))}</div>{"" if judgement.run.ticks_s is not None else "<p>Not recorded.</p>"}
<h2>To know</h2><ul>{warnings}</ul>
"""
    return page_frame(f"kvtwin: {judgement.run.name} against its twin", body)


def _metrics(judgement: Judgement) -> str:
    drawn = any(metric.predicted_low is not None for metric in judgement.metrics)
    head = [
        "metric",
        "measured",
        "predicted",
        *(["90 % interval of the prediction"] if drawn else []),
        "error",
        "error on its margin",
        "margin",
        "verdict",
    ]
    return table(head, [_row(metric, drawn) for metric in judgement.metrics])


def _row(metric: Metric, drawn: bool) -> str:
    interval = ""
    if metric.predicted_low is not None and metric.predicted_high is not None:
        interval = f"{_value(metric, metric.predicted_low)} to {_value(metric, metric.predicted_high)}"
    strip = band(metric.low, metric.high, metric.error, metric.margin, COLOUR.get(metric.verdict, UNSURE))
    cells = [
        escape(_name(metric.name)),
        _value(metric, metric.measured),
        _value(metric, metric.predicted),
        *([interval] if drawn else []),
        _share(metric, metric.error),
        f'<span title="{_share(metric, metric.low)} to {_share(metric, metric.high)}">{strip}</span>',
        f"± {_share(metric, metric.margin).lstrip('+')}",
    ]
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}{_verdict(metric.verdict)}</tr>"


def _counts(judgement: Judgement) -> str:
    head = ("", "measured", "predicted", "distance or ratio", "90 % interval", "margin", "verdict")
    rows = [_preemptions(judgement.preemptions), *(_trajectory(path) for path in judgement.trajectories)]
    note = f"<p>Preemptions: {escape(judgement.preemptions.why)}.</p>"
    return table(head, rows) + note


def _preemptions(found: Preemptions) -> str:
    measured = "not recorded" if found.measured is None else f"{found.measured:,}"
    ratio = "–" if found.ratio is None else f"× {found.ratio:.2f}"
    interval = "–" if found.low is None or found.high is None else f"× {found.low:.2f} to {found.high:.2f}"
    return (
        f"<tr><td>preemptions</td><td>{measured}</td><td>{found.predicted:,}</td><td>{ratio}</td><td>{interval}</td>"
        f"<td>{_ratio_margin(found.margin)}</td>{_verdict(found.verdict)}</tr>"
    )


def _trajectory(path: Trajectory) -> str:
    ratio = path.ratio_low is not None and path.ratio_high is not None
    margin = _ratio_margin(path.margin) if ratio else f"{path.margin:.0%}"
    interval = f"× {path.ratio_low:.2f} to {path.ratio_high:.2f}" if ratio else "–"
    shown = (
        f"× {path.predicted_mean / path.measured_mean:.2f}" if ratio and path.measured_mean else f"{path.distance:.1%}"
    )
    return (
        f"<tr><td>{escape(PATHS.get(path.name, path.name))}, mean</td><td>{path.measured_mean:.4g}</td><td>{path.predicted_mean:.4g}</td>"
        f"<td>{shown}</td><td>{interval}</td><td>{margin}</td>{_verdict(path.verdict)}</tr>"
    )


def _scatter(judgement: Judgement) -> list[str]:
    run, twin = judgement.run, judgement.twin
    pairs = (("TTFT", run.ttft_s, twin.ttft_s), ("TPOT", run.tpot_s, twin.tpot_s), ("E2EL", run.e2el_s, twin.e2el_s))
    found = [against(f"{label} of each request, s", measured, predicted) for label, measured, predicted in pairs]
    if run.itl_gaps_s is not None and any(gaps.size > 0 for gaps in run.itl_gaps_s):
        ours, theirs = (np.percentile(np.concatenate(gaps), RANKS) for gaps in (twin.itl_gaps_s, run.itl_gaps_s))
        found.append(against("ITL, percentiles 0.5 to 99.9, s", theirs, ours))
    return found


def _paths(judgement: Judgement) -> list[str]:
    run, twin = judgement.run, judgement.twin
    if run.ticks_s is None:
        return []
    simulated, measured = twin.at(run.ticks_s), dict(run.trajectories)
    if run.scheduled_s is not None:
        measured["preempted"] = preempted(run.scheduled_s, run.finished_s, run.ticks_s, measured["running"])
    return [
        lines(
            PATHS.get(name, name),
            [Series(run.ticks_s, values, GREY, "measured"), Series(run.ticks_s, simulated[name], BLUE, "simulated")],
        )
        for name, values in measured.items()
    ]


def _name(metric: str) -> str:
    """`ttft_p90_s` in words."""
    if metric in WORDS:
        return WORDS[metric]
    what, statistic = metric.removesuffix("_s").rsplit("_", 1)
    return f"{WORDS.get(what, what)}, {statistic}"


def _value(metric: Metric, value: float) -> str:
    if not metric.name.endswith("_s") or metric.name == "request_throughput_per_s":
        return f"{value:.4g}"
    return f"{value:.4g} s" if value >= 1 else f"{value * 1e3:.4g} ms"


def _share(metric: Metric, value: float) -> str:
    return f"{value * 1e3:+.1f} ms" if metric.absolute else f"{value:+.1%}"


def _ratio_margin(margin: float) -> str:
    return f"× {1 / (1 + margin):.2f} to {1 + margin:.2f}"


def _verdict(verdict: str) -> str:
    shown = "cannot tell" if verdict == CANNOT_TELL else verdict
    return f'<td class="{CLASS.get(verdict, "open")}">{shown}</td>'
