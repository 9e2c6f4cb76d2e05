"""The report's figures of latency: its distribution, and the same by prompt length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..slo import Slo, SloTarget
from .report_format import seconds
from .report_layout import BLUE, GREEN, PURPLE, RED, SKY, Figure, base_layout, limit_line, rounded, value_axis
from .report_series import Array, quantile_curve
from .statistics import percentile

if TYPE_CHECKING:
    from .result import Result


LATENCIES = {
    "ttft": ("Time to first token", BLUE),
    "tpot": ("Time per output token", GREEN),
    "e2el": ("End-to-end latency", PURPLE),
}
"""The latencies shown as distributions: name and colour."""


def finished_values(result: Result, name: str) -> Array:
    """A numeric column of requests.csv over the finished requests, missing values left out."""
    columns = result.request_columns
    finished = np.asarray([outcome == "finished" for outcome in columns["outcome"]], dtype=bool)
    values: Array = np.asarray(columns[name], dtype=np.float64)[finished]
    found: Array = values[np.isfinite(values)]
    return found


def latency_figure(result: Result, metric: str) -> Figure | None:
    """The distribution of one latency over the finished requests, with p50, p90, p99 and its objectives; None without any."""
    values = finished_values(result, f"{metric}_s")
    if values.size == 0:
        return None
    _, colour = LATENCIES[metric]
    scale, unit = (1e3, "ms") if percentile(values, 99) < 2 else (1.0, "s")
    x, y = quantile_curve(values * scale)
    marks = [(percentile(values, q) * scale, q) for q in (50, 90, 99)]
    logarithmic = bool(values.min() > 0 and values.max() > 20 * percentile(values, 50))
    traces: list[Figure] = [
        {"x": rounded(x), "y": rounded(y), "mode": "lines", "line": {"color": colour, "width": 2.5}, "name": "requests",
         "hovertemplate": f"%{{y:.1f}} % within %{{x:,.4~g}} {unit}<extra></extra>"},
        {"x": rounded([value for value, _ in marks]), "y": [q for _, q in marks], "mode": "markers", "name": "percentiles",
         "cliponaxis": False, "marker": {"color": "white", "size": 9, "line": {"color": colour, "width": 2.5}},
         "hovertemplate": f"p%{{y}}: %{{x:,.4~g}} {unit}<extra></extra>"},
    ]  # fmt: skip
    shapes, notes = [], []
    for target in objectives(result.scenario):
        at = target.limit_s * scale
        # An objective far beyond every value would squeeze them into a corner; the caption names it in any case.
        if target.metric == metric and (logarithmic or at <= 1.5 * float(x[-1])):
            shapes.append(limit_line("x", at, RED))
            notes.append({
                "x": float(np.log10(at)) if logarithmic else at, "y": 0.03, "yref": "paper", "text": f"SLO {target.statistic}",
                "showarrow": False, "textangle": -90, "xanchor": "right", "yanchor": "bottom", "font": {"color": RED, "size": 11},
            })  # fmt: skip
    axis = value_axis(unit, float(x[0]), float(x[-1]), logarithmic)
    layout = base_layout(230, xaxis=axis, yaxis={"title": {"text": "% of finished"}, "range": [0, 103]}, shapes=shapes)
    return {"data": traces, "layout": layout | {"annotations": notes, "showlegend": False}}


def class_figure(classes: Sequence[Mapping[str, Any]], metric: str) -> Figure | None:
    """p50, p90 and p99 of a latency by prompt-length class, one dot each, joined by a line; None without a value."""
    shown = [row for row in classes if row[f"{metric}_p50"] is not None]
    if not shown:
        return None
    names = [row["name"] for row in shown]
    known = [value for row in shown for q in ("p50", "p90", "p99") if (value := row[f"{metric}_{q}"]) is not None]
    scale, unit = (1e3, "ms") if max(known) < 2 else (1.0, "s")
    traces: list[Figure] = []
    for row in shown:
        ends = [row[f"{metric}_p50"], row[f"{metric}_p99"] or row[f"{metric}_p90"]]
        traces.append({
            "x": rounded([end * scale for end in ends]), "y": [row["name"]] * 2, "mode": "lines", "hoverinfo": "skip",
            "line": {"color": "#cbd2dc", "width": 4}, "showlegend": False,
        })  # fmt: skip
    for q, colour, symbol in (("p50", SKY, "circle"), ("p90", BLUE, "diamond"), ("p99", RED, "square")):
        values = [row[f"{metric}_{q}"] for row in shown]
        traces.append({
            "x": [None if value is None else rounded([value * scale])[0] for value in values], "y": names,
            "mode": "markers", "name": q, "cliponaxis": False, "marker": {"color": colour, "size": 10, "symbol": symbol},
            "text": [seconds(value) for value in values], "hovertemplate": f"{q} %{{text}}<extra>%{{y}}</extra>",
        })  # fmt: skip
    wide = 0 < 20 * min(known) < max(known)
    xaxis = value_axis(unit, min(known) * scale, max(known) * scale, wide)
    yaxis = {
        "categoryorder": "array",
        "categoryarray": names[::-1],
        "showgrid": False,
        "ticksuffix": " ",
        "automargin": True,
    }
    return {"data": traces, "layout": base_layout(110 + 34 * len(names), xaxis=xaxis, yaxis=yaxis)}


def objectives(scenario: Mapping[str, Any]) -> tuple[SloTarget, ...]:
    """The scenario's objectives; empty when it has none."""
    table = scenario.get("slo")
    return Slo.of(table).targets if isinstance(table, Mapping) and table else ()
