"""What all figures of the report share: colours, axes, lines of limits, and how numbers and user text are written.

A figure is the plain data and layout that plotly.js draws; nothing here imports plotly. Colours are Okabe and Ito's, which stay
apart for colour-blind readers; every quantity is also told by place, dash or symbol.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .report_series import Array

Figure = dict[str, Any]
"""`data` and `layout` of one figure."""

BLUE, SKY, ORANGE, GREEN, RED, PURPLE = "#0072B2", "#56B4E9", "#E69F00", "#009E73", "#D55E00", "#AA4499"
INK, GREY, LINE = "#1f2933", "#69758a", "#e3e8ef"


def value_axis(unit: str, low: float, high: float, logarithmic: bool) -> Figure:
    """An axis for durations from `low` to `high`: from zero, or logarithmic with every label written out."""
    if not logarithmic:
        return {"title": {"text": unit}, "rangemode": "tozero", "nticks": 6}
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    heads = (1, 3) if math.log10(high / low) < 3 else (1,)
    ticks = [head * 10.0**decade for decade in decades for head in heads]
    return {
        "title": {"text": f"{unit} (log)"},
        "type": "log",
        "tickvals": ticks,
        "ticktext": [f"{tick:,.12g}" for tick in ticks],
    }


def base_layout(height: int, *, xaxis: Figure, yaxis: Figure, shapes: list[Figure] | None = None) -> Figure:
    """What all figures share."""
    axis = {"gridcolor": LINE, "zeroline": False, "linecolor": "#cbd2dc", "separatethousands": True}
    return {
        "height": height,
        "margin": {"l": 58, "r": 16, "t": 30, "b": 46},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {
            "family": "system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif",
            "size": 12,
            "color": INK,
        },
        "legend": {
            "orientation": "h",
            "x": 0,
            "y": 1.0,
            "yanchor": "bottom",
            "font": {"size": 12},
            "traceorder": "normal",
        },
        "modebar": {"bgcolor": "rgba(255,255,255,0.9)", "color": GREY, "activecolor": INK},
        "hoverlabel": {"bgcolor": "white", "font": {"color": INK}},
        "xaxis": {**axis, "showgrid": False, "showline": True, "ticks": "outside", "tickcolor": "#cbd2dc", **xaxis},
        "yaxis": {**axis, **yaxis},
        "shapes": shapes or [],
    }


def limit_line(axis: str, at: float, colour: str) -> Figure:
    """A dashed line at a place on `axis` (`x` or `y`), across the whole figure."""
    other = "y" if axis == "x" else "x"
    place = {f"{axis}0": at, f"{axis}1": at, f"{other}0": 0, f"{other}1": 1, f"{other}ref": "paper"}
    return {"type": "line", **place, "line": {"color": colour, "width": 1.5, "dash": "dash"}}


def limit_across(at: float, text: str) -> Figure:
    """A dashed line across the figure with its name above its right end."""
    note = {
        "x": 1, "xref": "paper", "y": at, "text": text, "showarrow": False, "xanchor": "right", "yanchor": "bottom",
        "font": {"color": RED, "size": 11}, "bgcolor": "rgba(255,255,255,0.85)",
    }  # fmt: skip
    return {"shapes": [limit_line("y", at, RED)], "annotations": [note]}


def plain_text(text: str) -> str:
    """User text for plotly, which reads a little HTML in labels."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def rounded(values: Sequence[float] | Array, digits: int = 5) -> list[float]:
    """Floats with as many digits as a screen can show: the page stays small."""
    return [float(f"{value:.{digits}g}") for value in np.asarray(values, dtype=np.float64)]
