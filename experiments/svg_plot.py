"""Line plots as SVG, for pages that need neither scripts nor a library.

Long series are drawn with the lowest and the highest value of each column of pixels: an average would hide the peak at which memory
ran out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 12, 40
_COLUMNS = 400
"""Columns of a plot; a series is drawn with at most four points in each."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#AA4499", "#56B4E9")
"""Okabe and Ito's, which stay apart for colour-blind readers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a plot, or a cloud of points."""

    name: str
    """For the legend."""
    x: Sequence[float]
    y: Sequence[float]
    """As long as `x`."""
    dots: bool = False
    """Points instead of a line."""
    steps: bool = False
    """A value holds until the next one."""
    dashed: bool = False


def line_plot(title: str, series: Sequence[Series], *, x_label: str, y_label: str, from_zero: bool = True) -> str:
    """The plot as a `<figure>` with its title and legend; empty when no series has a point. `from_zero`: the y axis begins at 0."""
    drawn = [one for one in series if len(one.x)]
    if not drawn:
        return ""
    low_x = min(min(one.x) for one in drawn)
    high_x = max(max(one.x) for one in drawn)
    high_y = max(max(one.y) for one in drawn)
    low_y = min(min(one.y) for one in drawn)
    low_y = min(0.0, low_y) if from_zero else low_y - 0.05 * (high_y - low_y)
    plot = _Plane(low_x, high_x if high_x > low_x else low_x + 1.0, low_y, high_y if high_y > low_y else low_y + 1.0)
    body = [*plot.grid(x_label, y_label)]
    legend = []
    for number, one in enumerate(drawn):
        colour = COLOURS[number % len(COLOURS)]
        body.append(plot.dots(one, colour) if one.dots else plot.line(one, colour))
        mark = "●" if one.dots else "╌" if one.dashed else "—"
        legend.append(
            f'<span style="white-space:nowrap"><span style="color:{colour}">{mark}</span> {escape(one.name)}</span>'
        )
    return (
        f'<figure style="margin:0"><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" '
        f'style="width:100%;font:11px system-ui,sans-serif">{"".join(body)}</svg>'
        f'<figcaption class="small"><b>{escape(title)}</b><br/><span class="soft">{" &ensp; ".join(legend)}</span></figcaption></figure>'
    )


@dataclass(frozen=True, slots=True)
class _Plane:
    """Where values lie in the picture."""

    low_x: float
    high_x: float
    low_y: float
    high_y: float

    def x(self, value: float) -> float:
        return _LEFT + (value - self.low_x) / (self.high_x - self.low_x) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - (value - self.low_y) / (self.high_y - self.low_y) * (HEIGHT - _TOP - _BOTTOM)

    def grid(self, x_label: str, y_label: str) -> list[str]:
        parts = []
        for tick in ticks(self.low_y, self.high_y):
            at = self.y(tick)
            parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#e3e8ef"/>')
            parts.append(_text(f"{tick:,g}", _LEFT - 6, at + 4, "end"))
        for tick in ticks(self.low_x, self.high_x):
            parts.append(_text(f"{tick:,g}", self.x(tick), HEIGHT - _BOTTOM + 15, "middle"))
        parts.append(_text(x_label, (WIDTH + _LEFT) / 2, HEIGHT - 8, "middle"))
        middle = (HEIGHT - _BOTTOM + _TOP) / 2
        parts.append(
            f'<text x="13" y="{middle:.0f}" text-anchor="middle" fill="#52606d" transform="rotate(-90 13 {middle:.0f})">'
            f"{escape(y_label)}</text>"
        )
        return parts

    def line(self, series: Series, colour: str) -> str:
        points: list[tuple[float, float]] = []
        for x, y in thinned(series.x, series.y):
            if series.steps and points:
                points.append((x, points[-1][1]))
            points.append((x, y))
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if series.dashed else ""
        return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"{dash}/>'

    def dots(self, series: Series, colour: str) -> str:
        kept = dict.fromkeys(
            (round(self.x(x), 1), round(self.y(y), 1)) for x, y in zip(series.x, series.y, strict=True)
        )
        every = max(1, len(kept) // (4 * _COLUMNS))
        return "".join(
            f'<circle cx="{x}" cy="{y}" r="2" fill="{colour}" fill-opacity=".45"/>' for x, y in list(kept)[::every]
        )


def ticks(low: float, high: float) -> list[float]:
    """Round values from `low` to `high`, four to eight of them.

    >>> ticks(0.0, 79.2)
    [0.0, 20.0, 40.0, 60.0]
    """
    rough = (high - low) / 5
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(scale * head for head in (1, 2, 5, 10) if scale * head >= rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def thinned(x: Sequence[float], y: Sequence[float]) -> list[tuple[float, float]]:
    """The points of a long series that can be seen: in each column its first, lowest, highest and last, in their order."""
    points = list(zip(x, y, strict=True))
    if len(points) <= 4 * _COLUMNS:
        return points
    low, width = points[0][0], (points[-1][0] - points[0][0]) / _COLUMNS or 1.0
    columns: dict[int, list[int]] = {}
    for index, (at, _) in enumerate(points):
        columns.setdefault(int((at - low) / width), []).append(index)
    kept: list[tuple[float, float]] = []
    for column in columns.values():
        chosen = {
            column[0],
            min(column, key=lambda index: points[index][1]),
            max(column, key=lambda index: points[index][1]),
            column[-1],
        }
        kept += [points[index] for index in sorted(chosen)]
    return kept


def _text(text: str, x: float, y: float, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#52606d">{escape(text)}</text>'
