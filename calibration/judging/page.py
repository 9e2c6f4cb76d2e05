"""The judgement as one HTML page: verdict, figures, predicted against measured, trajectories. Nothing is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from calibration.plots import against, margin_strip
from calibration.recorded.twin import preempted
from sim.results.page_parts import Markup, bullets, card, html_page, html_table, panels, toned, verdict
from sim.results.report_layout import BLUE, GREEN, GREY, RED
from sim.results.svg_plot import Series, plot

from .judge import OPEN, Judgement, Metric
from .preemptions import Preemptions
from .trajectories import DIFFERENT, EQUIVALENT, Trajectory

TONE = {EQUIVALENT: "good", DIFFERENT: "bad"}
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
    OPEN: "No error certainly lies outside its margin, but some intervals reach beyond: a longer run would tell.",
}
RANKS = np.linspace(0.5, 99.9, 200)


def page(judgement: Judgement) -> str:
    """The whole page."""
    document = judgement.as_dict()
    worst = f"Worst for its margin: {_name(document['worst'])}. Mean error (bias): {document['bias']:+.1%}."
    untold = [f"Too little of it to tell: {', '.join(judgement.untold)}."] if judgement.untold else []
    title = f"{judgement.run.name} against its twin"
    paths = panels(_paths(judgement)) if judgement.run.ticks_s is not None else "<p>Not recorded.</p>"
    return html_page(
        f"kvtwin: {title}",
        verdict(
            TONE.get(judgement.verdict, "strained"),
            ("kvtwin calibrate judge", title),
            judgement.verdict[:1].upper() + judgement.verdict[1:],
            f"{MEANING[judgement.verdict]} {worst}",
            *untold,
            *(f"Warning: {text}." for text in judgement.differing),
        )
        + card("The two runs", _origin(judgement, document))
        + card("Times and throughput", _metrics(judgement), note=_STRIP)
        + card("Preemptions and state over time", _counts(judgement), note=f"Preemptions: {judgement.preemptions.why}.")
        + card("Predicted against measured", panels(_scatter(judgement)))
        + card("Over time", paths)
        + card("To know", bullets(judgement.twin.summary["warnings"])),
    )


_STRIP = (
    "The strip shows the error (dot) with its 90 % interval (bar) from blocks of neighbouring requests, on the margin (grey band); its "
    "ends are twice the margin. An error without a bar is that of a single value."
)


def _origin(judgement: Judgement, document: Mapping[str, Any]) -> str:
    requests = document["requests"]
    finished = (
        f"{requests['finished']:,} of {requests['sent']:,}; in the simulation {requests['finished_in_the_twin']:,}"
    )
    rows = [
        ("measured", judgement.run.provenance),
        ("simulated", f"{judgement.twin.profile}, {document['num_gpu_blocks']:,} KV blocks"),
        ("requests finished", finished),
    ]
    return html_table(("", ""), rows, words=range(2))


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
    return html_table(head, [_row(metric, drawn) for metric in judgement.metrics])


def _row(metric: Metric, drawn: bool) -> tuple[str, ...]:
    interval = ""
    if metric.predicted_low is not None and metric.predicted_high is not None:
        interval = f"{_value(metric, metric.predicted_low)} to {_value(metric, metric.predicted_high)}"
    strip = margin_strip(metric.low, metric.high, metric.error, metric.margin, COLOUR.get(metric.verdict, UNSURE))
    return (
        _name(metric.name),
        _value(metric, metric.measured),
        _value(metric, metric.predicted),
        *([interval] if drawn else []),
        _share(metric, metric.error),
        Markup(f'<span title="{_share(metric, metric.low)} to {_share(metric, metric.high)}">{strip}</span>'),
        f"± {_share(metric, metric.margin).lstrip('+')}",
        _verdict(metric.verdict),
    )


def _counts(judgement: Judgement) -> str:
    head = ("", "measured", "predicted", "distance or ratio", "90 % interval", "margin", "verdict")
    return html_table(
        head, [_preemptions(judgement.preemptions), *(_trajectory(path) for path in judgement.trajectories)]
    )


def _preemptions(found: Preemptions) -> tuple[str, ...]:
    return (
        "preemptions",
        "not recorded" if found.measured is None else f"{found.measured:,}",
        f"{found.predicted:,}",
        "–" if found.ratio is None else f"× {found.ratio:.2f}",
        "–" if found.low is None or found.high is None else f"× {found.low:.2f} to {found.high:.2f}",
        _ratio_margin(found.margin),
        _verdict(found.verdict),
    )


def _trajectory(path: Trajectory) -> tuple[str, ...]:
    ratio = path.ratio_low is not None and path.ratio_high is not None
    return (
        f"{PATHS.get(path.name, path.name)}, mean",
        f"{path.measured_mean:.4g}",
        f"{path.predicted_mean:.4g}",
        f"× {path.predicted_mean / path.measured_mean:.2f}" if ratio and path.measured_mean else f"{path.distance:.1%}",
        f"× {path.ratio_low:.2f} to {path.ratio_high:.2f}" if ratio else "–",
        _ratio_margin(path.margin) if ratio else f"{path.margin:.0%}",
        _verdict(path.verdict),
    )


def _scatter(judgement: Judgement) -> list[str]:
    run, twin = judgement.run, judgement.twin
    pairs = (("TTFT", run.ttft_s, twin.ttft_s), ("TPOT", run.tpot_s, twin.tpot_s), ("E2EL", run.e2el_s, twin.e2el_s))
    found = [against(f"{label} of each request", "s", measured, predicted) for label, measured, predicted in pairs]
    if run.itl_gaps_s is not None and any(gaps.size > 0 for gaps in run.itl_gaps_s):
        ours, theirs = (np.percentile(np.concatenate(gaps), RANKS) for gaps in (twin.itl_gaps_s, run.itl_gaps_s))
        found.append(against("ITL, percentiles 0.5 to 99.9", "s", theirs, ours))
    return found


def _paths(judgement: Judgement) -> list[str]:
    run, twin = judgement.run, judgement.twin
    if run.ticks_s is None:
        return []
    simulated, measured = twin.at(run.ticks_s), dict(run.trajectories)
    if run.scheduled_s is not None:
        measured["preempted"] = preempted(run.scheduled_s, run.finished_s, run.ticks_s, measured["running"])
    time = run.ticks_s.tolist()
    drawn = []
    for name, values in measured.items():
        series = [
            Series(name="measured", x=time, y=values.tolist(), colour=GREY),
            Series(name="simulated", x=time, y=simulated[name].tolist(), colour=BLUE),
        ]
        what = PATHS.get(name, name)
        drawn.append(
            plot(
                what[:1].upper() + what[1:], series, x_label="s", y_label="share" if name == "kv_usage" else "requests"
            )
        )
    return drawn


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


def _verdict(found: str) -> Markup:
    return toned(found, TONE.get(found, "strained"))
