"""Time lines of any length, drawn with at most a few hundred points and without losing a peak.

The rows of all replicas become step functions of time, summed, and cut into spans; each span keeps its mean (time-weighted),
its lowest and its highest value. An average alone would hide the instant at which memory ran out. Short runs keep every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

MAX_SPANS = 600
"""Most spans a drawn time line has; three values each stay under 2,000 points."""
INSTANT_S = 1e-9
"""Times closer than this are one instant: a row's start plus its duration misses the next row's start by a rounding error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """A quantity over time: span i is `[start_s[i], start_s[i + 1])`, the last one ends at `end_s`."""

    start_s: Array
    end_s: float
    mean: Array
    low: Array
    high: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """A step function: `value[i]` holds on `[time_s[i], time_s[i + 1])`, the last value until `end_s`."""

    time_s: Array
    value: Array
    end_s: float


def spans(table: Mapping[str, Array], max_spans: int = MAX_SPANS) -> Array:
    """Edges `[n + 1]` of the spans of a run: every change where there are few, else equal spans. Empty without rows."""
    start = table["time_s"]
    if start.size == 0:
        return np.empty(0)
    edges = np.unique(np.concatenate((start, start + table["duration_s"])))
    edges = edges[np.append(True, np.diff(edges) > INSTANT_S)]
    if edges.size < 2:
        return np.array([edges[0], edges[0] + INSTANT_S])
    return edges if edges.size <= max_spans + 1 else np.linspace(edges[0], edges[-1], max_spans + 1)


def level(table: Mapping[str, Array], name: str, edges: Array, *, idle: str) -> Steps:
    """Column `name` of all replicas together as a step function.

    `idle` says what a replica shows between two of its rows: `zero` (running requests, tokens of a step) or `hold` (blocks stay
    where they are). The blocks in use move from `used_blocks` to `used_blocks_end` within a row; the ramp becomes steps at `edges`.
    """
    order = np.lexsort((table["time_s"], table["replica"]))
    rows = {column: values[order] for column, values in table.items()}
    bounds = np.flatnonzero(np.diff(rows["replica"])) + 1
    times: list[Array] = []
    changes: list[Array] = []
    for own in np.split(np.arange(order.size), bounds):
        start, duration, value = rows["time_s"][own], rows["duration_s"][own], rows[name][own]
        if name == "used_blocks":
            step = duration / np.maximum(rows["steps"][own], 1)
            at, values = _ramps(start, start + duration - step, value, rows["used_blocks_end"][own], edges)
        elif idle == "zero":
            end = start + duration
            end[:-1] = np.where(start[1:] - end[:-1] <= INSTANT_S, start[1:], end[:-1])
            at = np.column_stack((start, end)).ravel()
            values = np.column_stack((value, np.zeros_like(value))).ravel()
        else:
            at, values = start, value
        times.append(at)
        changes.append(np.diff(values, prepend=0.0))
    at = np.concatenate(times)
    order = np.argsort(at, kind="stable")
    at, total = at[order], np.cumsum(np.concatenate(changes)[order])
    # Of several changes at one instant only the last is a state that lasts.
    last = np.append(np.diff(at) > 0, True)
    return Steps(time_s=at[last], value=total[last], end_s=float(edges[-1]))


def _ramps(start: Array, top: Array, first: Array, last: Array, edges: Array) -> tuple[Array, Array]:
    """A line from `first` at `start` to `last` at `top` (where the row's last step begins) as steps: at its ends and at edges.

    A row of one step has no time to climb; it shows the larger of the two.
    """
    climbs = top > start + INSTANT_S
    opening = np.where(climbs, first, np.maximum(first, last))
    knots = np.column_stack((start, np.where(climbs, top, start))).ravel()
    values = np.column_stack((opening, np.where(climbs, last, opening))).ravel()
    row = np.searchsorted(start, edges, side="right") - 1
    between = edges[(row >= 0) & (edges < top[np.maximum(row, 0)])]
    at = np.concatenate((knots, between))
    steps = np.concatenate((values, np.interp(between, knots, values)))
    order = np.argsort(at, kind="stable")
    return at[order], steps[order]


def envelope(steps: Steps, edges: Array) -> Envelope:
    """Mean, lowest and highest value of a step function in each span of `edges`."""
    before = np.searchsorted(steps.time_s, edges[:-1], side="right") - 1
    opening = np.where(before >= 0, steps.value[np.maximum(before, 0)], 0.0)
    at = np.concatenate((steps.time_s, edges[:-1]))
    value = np.concatenate((steps.value, opening))
    order = np.argsort(at, kind="stable")
    at, value = at[order], value[order]
    inside = (at >= edges[0]) & (at < edges[-1])
    at, value = at[inside], value[inside]
    lasting = np.diff(at, append=edges[-1])
    first = np.searchsorted(at, edges[:-1], side="left")
    width = np.diff(edges)
    return Envelope(
        start_s=edges[:-1],
        end_s=float(edges[-1]),
        mean=np.add.reduceat(value * lasting, first) / width,
        low=np.minimum.reduceat(value, first),
        high=np.maximum.reduceat(value, first),
    )


def quantile_curve(values: Array, points: int = 400, tail: int = 50) -> tuple[Array, Array]:
    """The empirical distribution as `(value, percent at or below)`: evenly thinned, every one of the `tail` largest kept."""
    ordered = np.sort(values)
    keep = np.unique(
        np.concatenate((np.linspace(0, ordered.size - 1, points).round(), np.arange(ordered.size - tail, ordered.size)))
    )
    index = keep[keep >= 0].astype(np.int64)
    return ordered[index], (index + 1) / ordered.size * 100
