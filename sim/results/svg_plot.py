"""Lines and points over two axes as SVG, for pages that need neither scripts nor a library.

Long lines are drawn with the lowest and the highest value of each column of pixels: an average would hide the peak at which memory
ran out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from .report_layout import BLUE, GREEN, ORANGE, PURPLE, RED, SKY

WIDTH, HEIGHT = 560, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 12, 40
_COLUMNS = 400
"""Columns of a plot; a series is drawn with at most four points in each."""
COLOURS = (BLUE, RED, GREEN, ORANGE, PURPLE, SKY)
"""Of the series that name none, in their order."""


Range = tuple[float, float]
"""The two ends of an axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a plot, or a cloud of points."""

    name: str = ""
    """For the legend; a series without a name is not in it."""
    x: Sequence[float]
    y: Sequence[float]
    """As long as `x`."""
    dots: bool = False
    """Points instead of a line."""
    steps: bool = False
    """A value holds until the next one."""
    dashed: bool = False
    colour: str = ""
    """Empty: the next of `COLOURS`."""


def plot(
    title: str,
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    from_zero: bool = True,
    x_range: Range | None = None,
    y_range: Range | None = None,
    log_x: bool = False,
) -> str:
    """The plot as a `<figure>` with its title and legend; empty when no series has a point.

    The axes span what is drawn, y with 0 where `from_zero`; plots that are to be compared are given the same ranges. With `log_x`
    every x is above 0.
    """
    drawn = [one for one in series if len(one.x)]
    if not drawn:
        return ""
    low_x, high_x = x_range or span(one.x for one in drawn)
    low_y, high_y = y_range or span(one.y for one in drawn)
    if y_range is None:
        low_y, high_y = (min(0.0, low_y), max(0.0, high_y)) if from_zero else (low_y - 0.05 * (high_y - low_y), high_y)
    plane = _Plane(
        low_x,
        high_x if high_x > low_x else low_x + max(1.0, abs(low_x)),
        low_y,
        high_y if high_y > low_y else low_y + 1.0,
        log_x,
    )
    body = [*plane.grid(x_label, y_label)]
    legend = []
    for number, one in enumerate(drawn):
        colour = one.colour or COLOURS[number % len(COLOURS)]
        body.append(plane.dots(one, colour) if one.dots else plane.line(one, colour))
        mark = "●" if one.dots else "╌" if one.dashed else "—"
        if one.name:
            legend.append(
                f'<span style="white-space:nowrap"><span style="color:{colour}">{mark}</span> {escape(one.name)}</span>'
            )
    names = f'<br/><span class="soft">{" &ensp; ".join(legend)}</span>' if legend else ""
    return (
        f'<figure style="margin:0"><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" '
        f'style="width:100%;font:11px system-ui,sans-serif">{"".join(body)}</svg>'
        f'<figcaption class="small"><b>{escape(title)}</b>{names}</figcaption></figure>'
    )


def span(columns: Iterable[Sequence[float]]) -> Range:
    """The lowest and the highest value of all columns; 0 to 0 when all are empty."""
    found = [(min(column), max(column)) for column in columns if len(column)]
    return min((low for low, _ in found), default=0.0), max((high for _, high in found), default=0.0)


@dataclass(frozen=True, slots=True)
class _Plane:
    """Where values lie in the picture."""

    low_x: float
    high_x: float
    low_y: float
    high_y: float
    log_x: bool

    def x(self, value: float) -> float:
        low, high = self.low_x, self.high_x
        if self.log_x:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return _LEFT + (value - low) / (high - low) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - (value - self.low_y) / (self.high_y - self.low_y) * (HEIGHT - _TOP - _BOTTOM)

    def grid(self, x_label: str, y_label: str) -> list[str]:
        parts = []
        for tick in ticks(self.low_y, self.high_y):
            at = self.y(tick)
            parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#e3e8ef"/>')
            parts.append(_text(tick_text(tick), _LEFT - 6, at + 4, "end"))
        for tick in (log_ticks if self.log_x else ticks)(self.low_x, self.high_x):
            parts.append(_text(tick_text(tick), self.x(tick), HEIGHT - _BOTTOM + 15, "middle"))
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


def log_ticks(low: float, high: float) -> list[float]:
    """Round values from `low` to `high` for a logarithmic axis: powers of ten, with 2 and 5 of each where there is room.

    >>> log_ticks(3, 256)
    [5.0, 10.0, 20.0, 50.0, 100.0, 200.0]
    """
    heads = (1, 2, 5) if high / low < 1e3 else (1,)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [head * 10.0**decade for decade in decades for head in heads if low <= head * 10.0**decade <= high]
    return found if len(found) > 1 else [tick for tick in ticks(low, high) if tick > 0]


def tick_text(value: float) -> str:
    """A number beside an axis, from a million on with M or G.

    >>> tick_text(2500), tick_text(2.5e9)
    ('2,500', '2.5G')
    """
    for scale, letter in ((1e9, "G"), (1e6, "M")):
        if abs(value) >= scale:
            return f"{value / scale:,g}{letter}"
    return f"{value:,g}"


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
