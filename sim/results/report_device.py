"""The report's figure of one GPU's memory over time, line by line, with the steps that ran out of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sim.catalog.gpus import GIB

from .page_parts import html_table
from .report_executors import on_cpu
from .report_format import count, escape, gib, plural
from .report_layout import INK, RED, Figure, base_layout, limit_line, plain_text, rounded
from .report_series import INSTANT_S, MAX_SPANS, Array, Envelope, Steps, envelope
from .report_timelines import edge_times, edge_values, time_axis, time_unit

if TYPE_CHECKING:
    from .result import Result

_LINES = (
    ("other processes", "other_processes_bytes", "rgba(105,117,138,0.75)"),
    ("context, libraries, communication", "non_torch_bytes", "rgba(143,161,181,0.75)"),
    ("weights", "weights_bytes", "rgba(62,76,89,0.8)"),
    ("CUDA graphs", "cuda_graphs_bytes", "rgba(170,68,153,0.65)"),
    ("buffers and other tensors", "others", "rgba(0,158,115,0.6)"),
    ("allocator: stuck, pending, cached", "idle_reserved", "rgba(230,159,0,0.7)"),
    ("KV in use", "kv_used_bytes", "rgba(0,114,178,0.75)"),
    ("KV free", "kv_free_bytes", "rgba(86,180,233,0.35)"),
)
"""Lines of the account from the bottom up: name, column (or what is computed from several), colour."""


def device_figure(result: Result) -> Figure | None:
    """The memory of the tightest replica's GPU as stacked lines, temporary tensors at their widest on top; None without a device."""
    table = _tightest(result)
    if table is None:
        return None
    edges = np.unique(table["time_s"])
    edges = edges[np.append(True, np.diff(edges) > INSTANT_S)]
    if edges.size < 2:
        return None
    if edges.size > MAX_SPANS + 1:
        edges = np.linspace(edges[0], edges[-1], MAX_SPANS + 1)
    divide, unit = time_unit(edges)
    measured = "process_bytes" in result.memory_columns
    traces: list[Figure] = []
    for name, column, colour in _LINES:
        values = _envelope(table, column, edges)
        if measured and column == "idle_reserved":
            name = "arena for temporary tensors, not yet used"
        if column not in ("kv_used_bytes", "weights_bytes") and float(values.high.max()) < 1e-3:
            continue
        traces.append(_area(name, values, values.mean, divide, colour))
    workspace = _envelope(table, "workspace_bytes", edges)
    traces.append(_area("temporary tensors, widest step", workspace, workspace.high, divide, "rgba(213,94,0,0.75)"))
    traces += _failures(result, table, divide)
    total = float(table["total_bytes"][0]) / GIB
    layout = base_layout(
        380, xaxis=time_axis(edges, divide, unit), yaxis={"title": {"text": "GiB"}, "range": [0, 1.06 * total]},
        shapes=[limit_line("y", total, RED)],
    )  # fmt: skip
    layout["margin"] |= {"t": 84}  # room for a legend of three lines
    return {"data": traces, "layout": layout | {"hovermode": "x unified"}}


def device_title(result: Result) -> tuple[str, str]:
    """Heading of the figure, and what it shows. A CPU has no memory of its own: without a limit the run's own parts are all there is."""
    if on_cpu(result.summary):
        return (
            "Memory, line by line",
            "What each part of the run holds; the dashed line is its limit, or, without one, all that it took.",
        )
    return "GPU memory, line by line", "What each line of the account holds; the dashed line is the GPU's memory."


def device_note(result: Result) -> str:
    """What the figure shows in words: the least headroom, the widest step, and failures by line, as HTML."""
    table, summary = _tightest(result), result.summary
    if table is None:
        return ""
    widest = int(np.argmax(table["workspace_bytes"]))
    phase = result.memory_columns["workspace_phase"][int(table["row"][widest])]
    text = (
        f"One rank, of the replica that came closest to the end of its memory. {headroom_text(summary['min_headroom_bytes'])}; "
        f"the widest step needed {gib(summary['peak_workspace_bytes'])} for temporary tensors ({phase})."
    )
    failed = summary.get("oom_by_line") or {}
    head = f"{plural(sum(failed.values()), 'step')} ran out of memory, by the line that did not fit"
    lines = html_table((head, "Steps"), [(line, count(number)) for line, number in failed.items()]) if failed else ""
    return f'<p class="soft small">{escape(text)}</p>{lines}'


def headroom_text(least_bytes: int) -> str:
    """The least headroom of a run in words."""
    return (
        f"At least {gib(least_bytes)} stayed free"
        if least_bytes >= 0
        else f"The tightest step missed {gib(-least_bytes)}"
    )


def _tightest(result: Result) -> dict[str, Array] | None:
    """Columns of the replica with the least headroom, and each row's number in the whole table."""
    columns = result.memory_columns
    if not columns["time_s"]:
        return None
    replicas = np.asarray(columns["replica"])
    least = int(replicas[int(np.argmin(np.asarray(columns["headroom_bytes"], dtype=np.float64)))])
    own = np.flatnonzero(replicas == least)
    table: dict[str, Array] = {
        name: np.asarray(values, dtype=np.float64)[own]
        for name, values in columns.items()
        if name == "time_s" or name.endswith("_bytes")
    }
    table["row"] = own.astype(np.float64)
    table["others"] = table["tensors_bytes"] - table["weights_bytes"] - table["cuda_graphs_bytes"]
    kept = np.maximum.accumulate(table["workspace_bytes"])  # the allocator keeps what the widest step so far took
    table["idle_reserved"] = np.maximum(0.0, table["reserved_bytes"] - table["allocated_bytes"] - kept)
    return table


def _envelope(table: dict[str, Array], column: str, edges: Array) -> Envelope:
    """A column in GiB; a row holds from the row before it to its own time."""
    lasting = np.diff(table["time_s"]) > INSTANT_S
    steps = Steps(
        time_s=table["time_s"][:-1][lasting], value=table[column][1:][lasting] / GIB, end_s=float(table["time_s"][-1])
    )
    return envelope(steps, edges)


def _area(name: str, at: Envelope, values: Array, divide: float, colour: str) -> Figure:
    return {
        "x": edge_times(at, divide), "y": edge_values(values), "name": name, "stackgroup": "device", "mode": "lines",
        "line": {"width": 0, "shape": "hv"}, "fillcolor": colour, "hovertemplate": f"{name} %{{y:.2f}} GiB<extra></extra>",
    }  # fmt: skip


def _failures(result: Result, table: dict[str, Array], divide: float) -> list[Figure]:
    """A star for each step that ran out of memory, named by its line."""
    marks = result.mark_columns
    found = [index for index, kind in enumerate(marks["kind"]) if kind == "oom"][:MAX_SPANS]
    if not found:
        return []
    return [{
        "x": rounded([marks["time_s"][index] / divide for index in found]), "mode": "markers", "name": "out of memory",
        "y": [float(table["total_bytes"][0]) / GIB * 1.03] * len(found), "marker": {"color": INK, "symbol": "star", "size": 9},
        "text": [plain_text(str(marks["request_id"][index])) for index in found], "hovertemplate": "%{text}<extra></extra>",
    }]  # fmt: skip
