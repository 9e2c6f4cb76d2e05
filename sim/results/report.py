"""The HTML report of a run: one file that answers first, shows why, and loads nothing.

plotly.js is embedded once; the figures are plain JSON that it draws. The text and the tables stand without it, so the
page also serves where scripts are off. The same result gives the same bytes.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from .report_answers import answer
from .report_device import device_figure, device_note, device_title
from .report_executors import executors_html
from .report_figures import LATENCIES, class_figure, finished_values, latency_figure, objectives
from .report_format import count, escape, plural, seconds
from .report_layout import Figure
from .report_requests import classes_html, length_classes, requests_html
from .report_settings import settings_html
from .report_tables import answer_html, provenance_html, scenario_facts, tiles_html, waterfall_html
from .report_template import PAGE, SCRIPT, STYLE
from .report_timelines import batch_figure, memory_figure, queue_figure
from .statistics import percentile

if TYPE_CHECKING:
    from .result import Result


def report_html(result: Result) -> str:
    """The whole page as text. Raises ModuleNotFoundError, with what to install, when plotly is missing."""
    figures: dict[str, Figure] = {}
    summary = result.summary
    body = [
        answer_html(answer(result), result.scenario, list(summary.get("warnings") or ())),
        tiles_html(summary),
        _latency_section(result, figures),
        _time_section(result, figures),
        _class_section(result, figures),
        executors_html(summary),
        settings_html(result),
        waterfall_html(result.ledger, measured="executors" in result.summary),
        requests_html(result),
        provenance_html(result),
    ]
    # "</" would end the script element that carries the data, whatever string it stands in.
    data = json.dumps(figures, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return PAGE.format(
        title=escape(" - ".join(["kvtwin", *scenario_facts(result.scenario)[:3]])),
        style=STYLE,
        body="\n".join(part for part in body if part),
        library=_plotly_js(),
        figures=data,
        script=SCRIPT,
    )


def _plotly_js() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the HTML report needs plotly: pip install plotly", name=error.name) from error
    return str(get_plotlyjs())


def _latency_section(result: Result, figures: dict[str, Figure]) -> str:
    panels: list[str] = []
    summary, targets = result.summary, objectives(result.scenario)
    for metric, (name, _) in LATENCIES.items():
        drawn = latency_figure(result, metric)
        if drawn is None:
            continue
        figures[metric] = drawn
        values = finished_values(result, f"{metric}_s")
        marks = ", ".join(f"p{q} {seconds(percentile(values, q))}" for q in (50, 90, 99))
        goals = []
        for target in targets:
            if target.metric == metric and (value := target.value_s(summary)) is not None:
                met = "met" if value <= target.limit_s else "missed"
                goals.append(f"objective {target.statistic} {seconds(target.limit_s)}: {met}")
        caption = f"{escape(marks)}<br>{escape('; '.join(goals)) or '&nbsp;'}"
        panels.append(
            f'<div><h3>{name} ({metric.upper()})</h3><p class="soft small">{caption}</p>{_plot(metric)}</div>'
        )
    if not panels:
        return '<section class="card"><h2>Latency</h2><p class="soft">No request finished, so there is no latency to show.</p></section>'
    finished = finished_values(result, "e2el_s").size
    note = f"Share of {plural(finished, 'finished request')} served within a time; circles mark p50, p90 and p99."
    if finished < 1000:
        note += " Fewer than 10 requests lie beyond p99: read it as a hint."
    return (
        f'<section class="card"><h2>Latency</h2><p class="soft small">{escape(note)}</p>'
        f'<div class="panels">{"".join(panels)}</div></section>'
    )


def _time_section(result: Result, figures: dict[str, Figure]) -> str:
    drawn = {
        "memory": memory_figure(result),
        "queue": queue_figure(result),
        "batch": batch_figure(result),
        "device": device_figure(result),
    }
    shown = {name: value for name, value in drawn.items() if value is not None}
    if not shown:
        return '<section class="card"><h2>Over time</h2><p class="soft">The engine never ran a step.</p></section>'
    figures.update(shown)
    replicas = len(set(result.timeline_columns["replica"]))
    note = "Areas are time-weighted means, thin lines and bands the extremes. Zooming one figure zooms all."
    if replicas > 1:
        note += f" All {count(replicas)} replicas together."
    titles = {
        "memory": (
            "KV cache",
            "Share of the pool in use, kept for reuse and free; symbols mark what happened to requests.",
        ),
        "queue": (
            "Running and waiting requests",
            "A waiting line that keeps climbing means the load is above capacity.",
        ),
        "batch": ("Batch", "Tokens computed in a step: prompts (prefill) and generation (decode)."),
        "device": device_title(result),
    }
    parts = "".join(
        f'<h3 style="margin-top:1rem">{titles[name][0]}</h3><p class="soft small">{titles[name][1]}</p>{_plot(name)}'
        for name in shown
    )
    parts += device_note(result) if "device" in shown else ""
    return f'<section class="card"><h2>Over time</h2><p class="soft small">{escape(note)}</p>{parts}</section>'


def _class_section(result: Result, figures: dict[str, Figure]) -> str:
    classes = length_classes(result)
    if not classes:
        return ""
    panels = []
    for metric in ("ttft", "tpot"):
        drawn = class_figure(classes, metric)
        if drawn is not None:
            figures[f"class-{metric}"] = drawn
            panels.append(f"<div><h3>{LATENCIES[metric][0]}</h3>{_plot(f'class-{metric}')}</div>")
    return (
        '<section class="card"><h2>By prompt length</h2><p class="soft small">An average hides its victims. p99 is shown from 100 '
        f'finished requests on.</p><div class="panels">{"".join(panels)}</div>{classes_html(classes)}</section>'
    )


def _plot(name: str) -> str:
    return f'<div class="plot" id="plot-{name}"></div>'
