"""The report's figures over time: the KV pool with its marks, the queue, and the batch. They share their x axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from .report_answers import engine_setting, timeline_arrays
from .report_format import count
from .report_layout import BLUE, GREY, INK, ORANGE, PURPLE, RED, Figure, base_layout, limit_across, plain_text, rounded
from .report_series import MAX_SPANS, Array, Envelope, envelope, level, spans

if TYPE_CHECKING:
    from .result import Result

MARKS = {
    "preempted": ("Preempted", ORANGE, "triangle-up"),
    "rejected": ("Rejected", RED, "x"),
    "aborted": ("Aborted", GREY, "circle-open"),
    "timed_out": ("Timed out", PURPLE, "diamond"),
    "failed": ("Failed", RED, "square"),
    "oom": ("Out of memory", "#000000", "star"),
}
"""Kinds of marks: name, colour, symbol."""


def memory_figure(result: Result) -> Figure | None:
    """The KV pool over time, as shares of it, under the marks of preempted, rejected and aborted requests; None without rows."""
    table = timeline_arrays(result)
    edges = spans(table)
    if edges.size == 0:
        return None
    names = ("used_blocks", "cached_blocks", "quarantined_blocks")
    used, cached, quarantined = (envelope(level(table, name, edges, idle="hold"), edges) for name in names)
    pool = _pool(table, result.summary)
    divide, unit = time_unit(edges)
    time = edge_times(used, divide)

    def area(name: str, values: Array, colour: str) -> Figure:
        return {
            "x": time, "y": edge_values(values / pool * 100), "name": name, "stackgroup": "pool", "mode": "lines",
            "line": {"width": 0, "shape": "hv"}, "fillcolor": colour, "hovertemplate": f"{name} %{{y:.1f}} %<extra></extra>",
        }  # fmt: skip

    traces = [area("used", used.mean, "rgba(0,114,178,0.75)")]
    if np.any(quarantined.high > 0):
        traces.append(area("quarantined", quarantined.mean, "rgba(230,159,0,0.8)"))
    # A span's means come from ramps of blocks in use and steps of cached ones; what is cached cannot exceed what is left.
    traces.append(
        area("cached, evictable", np.minimum(cached.mean, pool - used.mean - quarantined.mean), "rgba(86,180,233,0.45)")
    )
    rest = pool - used.mean - np.minimum(cached.mean, pool - used.mean - quarantined.mean) - quarantined.mean
    traces.append(area("free", rest, "rgba(227,232,239,0.55)"))
    traces.append({
        "x": time, "y": edge_values(used.high / pool * 100), "name": "used, peak", "mode": "lines",
        "line": {"color": INK, "width": 1, "shape": "hv"}, "hovertemplate": "used, peak %{y:.1f} %<extra></extra>",
    })  # fmt: skip
    marks = _marks(result, edges, divide, unit)
    ceiling = 104 + 7 * len(marks)
    yaxis = {"title": {"text": "% of KV blocks"}, "range": [0, ceiling], "tickvals": [0, 25, 50, 75, 100]}
    layout = base_layout(330, xaxis=time_axis(edges, divide, unit), yaxis=yaxis) | {"hovermode": "x unified"}
    return {"data": traces + marks, "layout": layout}


def _marks(result: Result, edges: Array, divide: float, unit: str) -> list[Figure]:
    """One row of symbols a kind above the pool; those that would touch are merged and counted."""
    columns = result.mark_columns
    times, kinds = np.asarray(columns["time_s"], dtype=np.float64), np.asarray(columns["kind"], dtype=object)
    traces: list[Figure] = []
    for kind, (name, colour, symbol) in MARKS.items():
        own = np.flatnonzero(kinds == kind)
        if own.size == 0:
            continue
        places = np.linspace(min(edges[0], times.min()), max(edges[-1], times.max()), MAX_SPANS // 2 + 1)
        _, first, counts = np.unique(
            np.searchsorted(places, times[own], side="right"), return_index=True, return_counts=True
        )
        labels = [
            str(columns["request_id"][own[index]]) if number == 1 else f"{number:,} requests"
            for index, number in zip(first, counts, strict=True)
        ]
        traces.append({
            "x": rounded(times[own][first] / divide), "y": [105 + 7 * len(traces)] * len(labels), "mode": "markers",
            "name": f"{name} ({own.size:,})", "text": [plain_text(label) for label in labels],
            "marker": {"color": colour, "symbol": symbol, "size": rounded(np.minimum(6 + 1.5 * np.log2(counts), 13))},
            "hovertemplate": f"{name.lower()}: %{{text}} at %{{x:,.4~g}} {unit}<extra></extra>",
        })  # fmt: skip
    return traces


def queue_figure(result: Result) -> Figure | None:
    """Running and waiting requests over time: the mean of each span as a line, lowest to highest as a band."""
    table = timeline_arrays(result)
    edges = spans(table)
    if edges.size == 0:
        return None
    divide, unit = time_unit(edges)
    traces: list[Figure] = []
    for name, colour, band in (("running", BLUE, "rgba(0,114,178,0.18)"), ("waiting", ORANGE, "rgba(230,159,0,0.25)")):
        traces += _band(name, envelope(level(table, name, edges, idle="zero"), edges), divide, colour, band)
    slots = engine_setting(result.scenario, "max_num_seqs") * len(np.unique(table["replica"]))
    highest = max(traces[1]["y"])  # the upper edge of the band of running requests
    layout = base_layout(
        240, xaxis=time_axis(edges, divide, unit), yaxis={"title": {"text": "requests"}, "rangemode": "tozero"}
    )
    if slots <= 1.5 * highest:  # a limit far above what happened would only flatten the picture
        layout |= limit_across(slots, f"max_num_seqs {count(slots)}")
    return {"data": traces, "layout": layout | {"hovermode": "x unified"}}


def batch_figure(result: Result) -> Figure | None:
    """Prefill (above) and decode tokens (below) of a step over time: mean as area, largest step of each span as a line.

    Each has an axis of its own, because a prompt's thousands of tokens would hide the one token a sequence of a decode step.
    """
    table = timeline_arrays(result)
    edges = spans(table)
    if edges.size == 0:
        return None
    divide, unit = time_unit(edges)
    steps = np.maximum(table["steps"], 1)
    traces: list[Figure] = []
    highest: dict[str, float] = {}
    for name, axis, colour in (("prefill", "y", "rgba(170,68,153,0.6)"), ("decode", "y2", "rgba(0,158,115,0.65)")):
        values = envelope(
            level(table | {"tokens": table[f"{name}_tokens"] / steps}, "tokens", edges, idle="zero"), edges
        )
        highest[name] = float(values.high.max())
        shared: Figure = {"x": edge_times(values, divide), "yaxis": axis, "mode": "lines"}
        traces.append(shared | {
            "y": edge_values(values.mean), "name": name, "fill": "tozeroy", "fillcolor": colour,
            "line": {"width": 0, "shape": "hv"}, "hovertemplate": f"{name} %{{y:,.4~g}}<extra></extra>",
        })  # fmt: skip
        traces.append(shared | {
            "y": edge_values(values.high), "name": f"{name}, largest step", "showlegend": False,
            "line": {"color": INK, "width": 0.8, "shape": "hv"}, "hovertemplate": f"{name}, largest step %{{y:,.4~g}}<extra></extra>",
        })  # fmt: skip
    budget = engine_setting(result.scenario, "max_num_batched_tokens") * len(np.unique(table["replica"]))
    upper: Figure = {"title": {"text": "prefill tokens"}, "rangemode": "tozero", "domain": [0.5, 1], "nticks": 4}
    lower: Figure = {"title": {"text": "decode tokens"}, "rangemode": "tozero", "domain": [0, 0.4], "nticks": 4}
    layout = base_layout(320, xaxis=time_axis(edges, divide, unit), yaxis=upper)
    layout["yaxis2"] = {**layout["yaxis"], **lower}
    layout["xaxis"]["anchor"] = "y2"
    if budget <= 1.5 * highest["prefill"]:
        layout |= limit_across(budget, f"max_num_batched_tokens {count(budget)}")
    return {"data": traces, "layout": layout | {"hovermode": "x unified"}}


def _band(name: str, values: Envelope, divide: float, colour: str, band: str) -> list[Figure]:
    time = edge_times(values, divide)
    edge: Figure = {
        "x": time,
        "mode": "lines",
        "line": {"width": 0, "shape": "hv"},
        "hoverinfo": "skip",
        "showlegend": False,
    }
    mean: Figure = {
        "x": time, "y": edge_values(values.mean), "name": name, "mode": "lines", "line": {"color": colour, "width": 1.5, "shape": "hv"},
        "customdata": np.column_stack((np.append(values.low, values.low[-1]), np.append(values.high, values.high[-1]))).tolist(),
        "hovertemplate": f"{name} %{{y:,.1f}} (%{{customdata[0]:,}} to %{{customdata[1]:,}})<extra></extra>",
    }  # fmt: skip
    return [
        edge | {"y": edge_values(values.low)},
        edge | {"y": edge_values(values.high), "fill": "tonexty", "fillcolor": band},
        mean,
    ]


def edge_times(values: Envelope, divide: float) -> list[float]:
    """Starts of the spans and the end of the last: a step drawn `hv` needs its last value twice."""
    return rounded(np.append(values.start_s, values.end_s) / divide, 7)


def edge_values(values: Array) -> list[float]:
    """Values of the spans, the last one twice, for `edge_times`."""
    return rounded(np.append(values, values[-1]))


def _pool(table: Mapping[str, Array], summary: Mapping[str, Any]) -> float:
    """Blocks of all replicas together."""
    parts = sum(
        (table[f"{name}_blocks"] for name in ("used", "cached", "free", "quarantined")), np.zeros(table["time_s"].size)
    )
    own = float(summary.get("num_gpu_blocks") or parts.max() or 1)
    return own * len(np.unique(table["replica"]))


def time_unit(edges: Array) -> tuple[float, str]:
    """Divisor and name of the unit a run's time axis is best read in."""
    length = float(edges[-1])
    if length < 1:
        return 1e-3, "ms"
    if length < 3600:
        return 1.0, "s"
    return (60.0, "min") if length < 6 * 3600 else (3600.0, "h")


def time_axis(edges: Array, divide: float, unit: str) -> Figure:
    """The axis of the run's own time, simulated or measured, that the figures share."""
    title = {"text": f"time in the run ({unit})"}
    return {
        "title": title,
        "range": rounded([min(0.0, edges[0] / divide), edges[-1] / divide]),
        "hoverformat": ",.5~g",
        "ticksuffix": "",
    }
