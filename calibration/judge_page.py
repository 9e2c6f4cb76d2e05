"""The judgement as one HTML page: verdict, figures, predicted against measured, trajectories. Nothing is loaded from elsewhere.

Plots are SVG written here: a few hundred points need no library, and the page works without scripts.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from .judge import DIFFERENT, EQUIVALENT, Judgement, Metric
from .tent import Array

WIDTH, HEIGHT, EDGE = 420, 300, 46
MOST_POINTS = 1000
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:68rem;margin:2rem auto;padding:0 1rem;color:#1c2733}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.2rem .7rem;text-align:right;border-bottom:1px solid #dde3e8}
td:first-child,th:first-child{text-align:left}.good{color:#12724a}.bad{color:#b3261e}.open{color:#8a6100}
svg{background:#f7f9fa;margin:.4rem}text{font:11px system-ui,sans-serif;fill:#44505b}figure{display:inline-block;margin:0}
figcaption{text-align:center;color:#44505b}"""
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


def _scatter(label: str, measured: Array, predicted: Array) -> str:
    keep = np.isfinite(measured) & np.isfinite(predicted)
    x, y = measured[keep][:MOST_POINTS], predicted[keep][:MOST_POINTS]
    top = float(max(x.max(initial=0.0), y.max(initial=0.0))) or 1.0
    dots = "".join(
        f'<circle cx="{_across(a, top):.1f}" cy="{_up(b, top):.1f}" r="2" fill="#1f6feb" fill-opacity=".45"/>'
        for a, b in zip(x.tolist(), y.tolist(), strict=True)
    )
    diagonal = (
        f'<line x1="{EDGE}" y1="{HEIGHT - EDGE}" x2="{WIDTH - 10}" y2="10" stroke="#9aa5b1" stroke-dasharray="4 3"/>'
    )
    return _figure(diagonal + dots, f"{label}: predicted (up) against measured", f"{top:.3g}", f"{top:.3g}")


def _lines(name: str, ticks_s: Array, measured: Array, simulated: Array) -> str:
    top = float(max(measured.max(), simulated.max())) or 1.0
    end = float(ticks_s.max()) or 1.0

    def path(values: Array, colour: str) -> str:
        points = " ".join(
            f"{_across(max(0.0, t), end):.1f},{_up(v, top):.1f}"
            for t, v in zip(ticks_s.tolist(), values.tolist(), strict=True)
        )
        return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.4"/>'

    drawn: Sequence[str] = (path(measured, "#8b95a1"), path(simulated, "#1f6feb"))
    return _figure("".join(drawn), f"{name} over time", f"{end:.3g} s", f"{top:.3g}")


def _figure(content: str, caption: str, right: str, top: str) -> str:
    axes = (
        f'<line x1="{EDGE}" y1="{HEIGHT - EDGE}" x2="{WIDTH - 10}" y2="{HEIGHT - EDGE}" stroke="#44505b"/>'
        f'<line x1="{EDGE}" y1="{HEIGHT - EDGE}" x2="{EDGE}" y2="10" stroke="#44505b"/>'
        f'<text x="{WIDTH - 10}" y="{HEIGHT - EDGE + 16}" text-anchor="end">{escape(right)}</text>'
        f'<text x="{EDGE - 6}" y="16" text-anchor="end">{escape(top)}</text>'
    )
    return (
        f'<figure><svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{escape(caption)}">{axes}{content}</svg>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _across(value: float, top: float) -> float:
    return EDGE + value / top * (WIDTH - 10 - EDGE)


def _up(value: float, top: float) -> float:
    return HEIGHT - EDGE - value / top * (HEIGHT - EDGE - 10)
