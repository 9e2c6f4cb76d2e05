"""Plots as SVG text, and the frame of a page: a few hundred points need no library, and the page works without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from .tent import Array

WIDTH, HEIGHT, EDGE = 420, 300, 56
MOST_POINTS = 1000
BLUE, GREY, RED, GREEN = "#1f6feb", "#8b95a1", "#b3261e", "#12724a"
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:76rem;margin:2rem auto;padding:0 1rem;color:#1c2733}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.2rem .7rem;text-align:right;border-bottom:1px solid #dde3e8}
td:first-child,th:first-child{text-align:left}td{white-space:nowrap}td.text{text-align:left;white-space:normal}.good{color:#12724a}.bad{color:#b3261e}.open{color:#8a6100}
svg{background:#f7f9fa;margin:.4rem}text{font:11px system-ui,sans-serif;fill:#44505b}figure{display:inline-block;margin:0}
figcaption{text-align:center;color:#44505b}.row{display:grid;grid-template-columns:repeat(auto-fill,minmax(20rem,1fr));gap:1rem}
.row svg{width:100%;height:auto;margin:0}td svg{background:none;margin:0;vertical-align:middle}.soft{color:#5b6773}
.verdict{border-left:.4rem solid #8a6100;background:#f7f9fa;padding:.6rem 1rem;font-size:1.15rem}.verdict.good{border-color:#12724a}
.verdict.bad{border-color:#b3261e}.verdict p{margin:.2rem 0;color:#1c2733;font-size:.95rem}"""


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one colour."""

    x: Array
    y: Array
    colour: str = BLUE
    name: str = ""
    """For the key of the plot; empty for none."""


def page_frame(title: str, body: str) -> str:
    """A whole page that loads nothing from anywhere."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style></head>\n'
        f"<body><h1>{escape(title)}</h1>\n{body}</body></html>\n"
    )


def table(head: Sequence[str], rows: Sequence[str]) -> str:
    """A table; `rows` are rows of HTML, `head` is text."""
    titles = "".join(f"<th>{escape(text)}</th>" for text in head)
    return f"<table><tr>{titles}</tr>\n{''.join(rows)}</table>"


def against(label: str, measured: Array, predicted: Array) -> str:
    """Predicted against measured, with the diagonal."""
    keep = np.isfinite(measured) & np.isfinite(predicted)
    x, y = _thin(measured[keep]), _thin(predicted[keep])
    top = float(max(x.max(initial=0.0), y.max(initial=0.0))) or 1.0
    diagonal = (
        f'<line x1="{EDGE}" y1="{HEIGHT - EDGE}" x2="{WIDTH - 10}" y2="10" stroke="#9aa5b1" stroke-dasharray="4 3"/>'
    )
    plotted = _dots(Series(x, y), (0.0, top), (0.0, top))
    titles = ("measured", "predicted")
    return figure(
        diagonal + plotted, f"{label}: predicted against measured", ("0", tick(top)), ("0", tick(top)), titles
    )


def dots(caption: str, series: Sequence[Series], *, log_x: bool = False, middle: float | None = None) -> str:
    """Points of several series over one pair of axes; a dashed line at `middle` if given."""
    shown = [one for one in series if one.x.size]
    if not shown:
        return ""
    across = [np.log10(np.maximum(one.x, 1e-9)) if log_x else one.x for one in shown]
    low_x, high_x = _span(across)
    low_y, high_y = _span([*(one.y for one in shown), *([np.asarray([middle])] if middle is not None else [])])
    drawn = "".join(
        _dots(Series(_thin(x), _thin(one.y), one.colour), (low_x, high_x), (low_y, high_y))
        for x, one in zip(across, shown, strict=True)
    )
    if middle is not None:
        at = _up(middle, low_y, high_y)
        drawn = f'<line x1="{EDGE}" y1="{at:.1f}" x2="{WIDTH - 10}" y2="{at:.1f}" stroke="#9aa5b1" stroke-dasharray="4 3"/>{drawn}'
    ends = [tick(10**value if log_x else value) for value in (low_x, high_x)]
    return figure(drawn + _key(shown), caption, (ends[0], ends[1]), (tick(low_y), tick(high_y)))


def lines(caption: str, series: Sequence[Series], unit: str = "s") -> str:
    """Lines from 0, several over one pair of axes."""
    top = float(max(one.y.max(initial=0.0) for one in series)) or 1.0
    end = float(max(one.x.max(initial=0.0) for one in series)) or 1.0
    drawn = "".join(
        '<polyline points="{}" fill="none" stroke="{}" stroke-width="1.4"/>'.format(
            " ".join(
                f"{_across(max(0.0, x), 0.0, end):.1f},{_up(y, 0.0, top):.1f}"
                for x, y in zip(one.x.tolist(), one.y.tolist(), strict=True)
            ),
            one.colour,
        )
        for one in series
    )
    return figure(drawn + _key(series, below=True), caption, ("0", f"{tick(end)} {unit}"), ("0", tick(top)))


def band(low: float, high: float, value: float, margin: float, colour: str) -> str:
    """A value and its interval beside the margin around 0, as a strip for a row of a table: the grey band is the margin."""
    width, height, reach = 190, 18, 2.0 * margin

    def at(x: float) -> float:
        return width / 2 + max(-1.0, min(1.0, x / reach)) * (width / 2 - 4)

    return (
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" aria-label="interval and margin">'
        f'<rect x="{at(-margin):.1f}" y="1" width="{at(margin) - at(-margin):.1f}" height="{height - 2}" fill="#e3e8ec"/>'
        f'<line x1="{at(0):.1f}" y1="0" x2="{at(0):.1f}" y2="{height}" stroke="#9aa5b1"/>'
        f'<line x1="{at(low):.1f}" y1="{height / 2}" x2="{at(high):.1f}" y2="{height / 2}" stroke="{colour}" stroke-width="3"/>'
        f'<circle cx="{at(value):.1f}" cy="{height / 2}" r="4" fill="{colour}"/></svg>'
    )


def figure(
    content: str, caption: str, across: tuple[str, str], up: tuple[str, str], titles: tuple[str, str] = ("", "")
) -> str:
    """A plot with axes; `across` and `up` are what stands at their ends, `titles` what they are."""
    bottom = HEIGHT - EDGE
    axes = (
        f'<line x1="{EDGE}" y1="{bottom}" x2="{WIDTH - 10}" y2="{bottom}" stroke="#44505b"/>'
        f'<line x1="{EDGE}" y1="{bottom}" x2="{EDGE}" y2="10" stroke="#44505b"/>'
        f'<text x="{EDGE}" y="{bottom + 16}">{escape(across[0])}</text>'
        f'<text x="{WIDTH - 10}" y="{bottom + 16}" text-anchor="end">{escape(across[1])}</text>'
        f'<text x="{EDGE - 6}" y="{bottom}" text-anchor="end">{escape(up[0])}</text>'
        f'<text x="{EDGE - 6}" y="16" text-anchor="end">{escape(up[1])}</text>'
        f'<text x="{(EDGE + WIDTH - 10) / 2}" y="{bottom + 34}" text-anchor="middle">{escape(titles[0])}</text>'
        f'<text transform="translate(16 {bottom / 2 + 8}) rotate(-90)" text-anchor="middle">{escape(titles[1])}</text>'
    )
    return (
        f'<figure><svg width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(caption)}">'
        f"{axes}{content}</svg>"
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def tick(value: float) -> str:
    """A number at the end of an axis: three digits, with k, M or G."""
    for scale, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale * 0.9995:
            return f"{value / scale:.3g}{letter}"
    return f"{value:.3g}"


def _dots(series: Series, span_x: tuple[float, float], span_y: tuple[float, float]) -> str:
    return "".join(
        f'<circle cx="{_across(a, *span_x):.1f}" cy="{_up(b, *span_y):.1f}" r="2" fill="{series.colour}" fill-opacity=".45"/>'
        for a, b in zip(series.x.tolist(), series.y.tolist(), strict=True)
    )


def _key(series: Sequence[Series], *, below: bool = False) -> str:
    """Names and colours, in the corner, or below the axis, where no line runs through them."""
    named = [one for one in series if one.name]
    places = [
        (EDGE + 90 + 110 * i, HEIGHT - EDGE + 30) if below else (WIDTH - 100, 20 + 15 * i) for i in range(len(named))
    ]
    return "".join(
        f'<circle cx="{x}" cy="{y}" r="3" fill="{one.colour}"/><text x="{x + 8}" y="{y + 4}">{escape(one.name)}</text>'
        for one, (x, y) in zip(named, places, strict=True)
    )


def _thin(values: Array) -> Array:
    """Every k-th value, so that at most `MOST_POINTS` are drawn: first to last, not the first ones."""
    return values[:: max(1, -(-values.size // MOST_POINTS))]


def _span(values: Sequence[Array]) -> tuple[float, float]:
    low, high = min(float(one.min()) for one in values), max(float(one.max()) for one in values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _across(value: float, low: float, high: float) -> float:
    return EDGE + (value - low) / (high - low) * (WIDTH - 10 - EDGE)


def _up(value: float, low: float, high: float) -> float:
    return HEIGHT - EDGE - (value - low) / (high - low) * (HEIGHT - EDGE - 10)
