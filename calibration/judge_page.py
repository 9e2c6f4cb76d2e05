"""The judgement as one HTML page: verdict, figures, predicted against measured, trajectories. Nothing is loaded from elsewhere."""

from __future__ import annotations

from html import escape

from .judge import Judgement, Metric
from .plots import BLUE, GREY, Series, against, lines, page_frame, table
from .trajectories import DIFFERENT, EQUIVALENT

CLASS = {EQUIVALENT: "good", DIFFERENT: "bad"}


def page(judgement: Judgement) -> str:
    """The whole page."""
    document = judgement.as_dict()
    run, twin = judgement.run, judgement.twin
    title = f"kvtwin: {run.name} against its twin"
    scatter = [
        against(f"{label}, s", measured, predicted)
        for label, measured, predicted in (
            ("TTFT", run.ttft_s, twin.ttft_s),
            ("TPOT", run.tpot_s, twin.tpot_s),
            ("E2EL", run.e2el_s, twin.e2el_s),
        )
    ]
    paths = []
    if run.ticks_s is not None:
        ticks, simulated = run.ticks_s, twin.at(run.ticks_s)
        paths = [
            lines(f"{name} over time", [Series(ticks, values, GREY), Series(ticks, simulated[name], BLUE)])
            for name, values in run.trajectories.items()
        ]
    preemptions, requests = document["preemptions"], document["requests"]
    measured = "not recorded" if preemptions["measured"] is None else f"{preemptions['measured']:,}"
    warnings = "".join(f"<li>{escape(text)}</li>" for text in document["warnings"])
    head = ("metric", "measured", "predicted", "error", "90 % interval", "margin", "verdict")
    body = f"""<p>Verdict: <strong class="{CLASS.get(judgement.verdict, "open")}">{judgement.verdict}</strong>. Measured:
{escape(run.provenance)}. Simulated with {escape(twin.profile)} and {document["num_gpu_blocks"]:,} KV blocks. Mean error (bias)
{document["bias"]:+.1%}; worst for its margin: {escape(document["worst"])}.</p>
<p>{requests["finished"]:,} of {requests["sent"]:,} requests finished, {requests["finished_in_the_twin"]:,} in the simulation.
Preemptions: {measured} measured, {preemptions["predicted"]:,} predicted. An error without an interval is that of a single value.
In brackets: the prediction for prices as uncertain as the profile says, where that was asked for.</p>
{table(head, [_row(metric) for metric in judgement.metrics])}
{table(("trajectory", "mean measured", "mean simulated", "distance", "verdict"), _trajectory_rows(judgement))}
<h2>Predicted against measured</h2>{"".join(scatter)}
<h2>Over time</h2><p>Grey: measured. Blue: simulated.</p>{"".join(paths) or "<p>Not recorded.</p>"}
<h2>To know</h2><ul>{warnings}</ul>
"""
    return page_frame(title, body)


def _row(metric: Metric) -> str:
    error, low, high, margin = (
        (f"{value * 1e3:+.1f} ms" if metric.absolute else f"{value:+.2%}")
        for value in (metric.error, metric.low, metric.high, metric.margin)
    )
    return (
        f"<tr><td>{escape(metric.name)}</td><td>{metric.measured:.4g}</td><td>{metric.predicted:.4g}{_drawn(metric)}</td><td>{error}</td>"
        f"<td>{'–' if metric.low == metric.high else f'{low} to {high}'}</td><td>"
        f'{margin.lstrip("+")}</td><td class="{CLASS.get(metric.verdict, "open")}">{metric.verdict}</td></tr>'
    )


def _drawn(metric: Metric) -> str:
    """The interval of the prediction, where the profile's uncertainty was drawn."""
    if metric.predicted_low is None or metric.predicted_high is None:
        return ""
    return f" <small>({metric.predicted_low:.4g} to {metric.predicted_high:.4g})</small>"


def _trajectory_rows(judgement: Judgement) -> list[str]:
    return [
        f"<tr><td>{escape(one.name)}</td><td>{one.measured_mean:.4g}</td><td>{one.predicted_mean:.4g}</td>"
        f'<td>{one.distance:.1%}</td><td class="{CLASS.get(one.verdict, "open")}">{one.verdict}</td></tr>'
        for one in judgement.trajectories
    ]
