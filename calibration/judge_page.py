"""The judgement as one HTML page: verdict, figures, predicted against measured, trajectories. Nothing is loaded from elsewhere."""

from __future__ import annotations

from html import escape

from .judge import DIFFERENT, EQUIVALENT, Judgement, Metric
from .plots import BLUE, GREY, Series, against, lines, page_frame

CLASS = {EQUIVALENT: "good", DIFFERENT: "bad"}


def page(judgement: Judgement) -> str:
    """The whole page."""
    document = judgement.as_dict()
    run, twin = judgement.run, judgement.twin
    title = f"kvtwin: {run.name} against its twin"
    scatter = [
        _scatter(f"{label}, s", measured, predicted)
        for label, measured, predicted in (
            ("TTFT", run.ttft_s, twin.ttft_s),
            ("TPOT", run.tpot_s, twin.tpot_s),
            ("E2EL", run.e2el_s, twin.e2el_s),
        )
    ]
    paths = []
    if run.ticks_s is not None:
        simulated = twin.at(run.ticks_s)
        paths = [_lines(name, run.ticks_s, values, simulated[name]) for name, values in run.trajectories.items()]
    warnings = "".join(f"<li>{escape(text)}</li>" for text in document["warnings"])
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style></head>
<body><h1>{escape(title)}</h1>
<p>Verdict: <strong class="{CLASS.get(judgement.verdict, "open")}">{judgement.verdict}</strong>. Measured: {escape(run.provenance)}.
Simulated with {escape(twin.profile)} and {document["num_gpu_blocks"]:,} KV blocks. Mean error (bias) {document["bias"]:+.1%};
worst for its margin: {escape(document["worst"])}.</p>
<table><tr><th>metric</th><th>measured</th><th>predicted</th><th>error</th><th>90 % interval</th><th>margin</th><th>verdict</th></tr>
{"".join(_row(metric) for metric in judgement.metrics)}</table>
<table><tr><th>trajectory</th><th>mean measured</th><th>mean simulated</th><th>distance</th><th>verdict</th></tr>
{_trajectory_rows(judgement)}</table>
<h2>Predicted against measured</h2>{"".join(scatter)}
<h2>Over time</h2><p>Grey: measured. Blue: simulated.</p>{"".join(paths) or "<p>Not recorded.</p>"}
<h2>To know</h2><ul>{warnings}</ul></body></html>
"""


def _row(metric: Metric) -> str:
    error, low, high, margin = (
        (f"{value * 1e3:+.1f} ms" if metric.absolute else f"{value:+.2%}")
        for value in (metric.error, metric.low, metric.high, metric.margin)
    )
    return (
        f"<tr><td>{escape(metric.name)}</td><td>{metric.measured:.4g}</td><td>{metric.predicted:.4g}</td><td>{error}</td>"
        f'<td>{low} to {high}</td><td>{margin.lstrip("+")}</td><td class="{CLASS.get(metric.verdict, "open")}">{metric.verdict}</td></tr>'
    )


def _trajectory_rows(judgement: Judgement) -> str:
    return "".join(
        f"<tr><td>{escape(one.name)}</td><td>{one.measured_mean:.4g}</td><td>{one.predicted_mean:.4g}</td>"
        f'<td>{one.distance:.1%}</td><td class="{CLASS.get(one.verdict, "open")}">{one.verdict}</td></tr>'
        for one in judgement.trajectories
    )

