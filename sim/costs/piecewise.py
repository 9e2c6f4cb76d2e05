"""Piecewise-linear tables: of floats to interpolate measurements, and of integers to sum stretches of steps exactly.

The everyday picture is a bus timetable: between two stops the time grows evenly, and after the last one it goes on growing
as it did before it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from sim.core.clock import to_fs
from sim.core.config import ConfigError
from sim.core.durations import Segment


@dataclass(frozen=True, slots=True)
class Line:
    """A function through points `(x[i], y[i])`: linear between them and beyond the last, constant before the first."""

    x: tuple[float, ...]
    """Knots, strictly ascending."""
    y: tuple[float, ...]
    """Values, as many."""

    def __post_init__(self) -> None:
        if not self.x or len(self.x) != len(self.y):
            raise ConfigError(
                f"a table needs as many values as knots, and at least one: {len(self.x)} and {len(self.y)}"
            )
        if any(after <= before for before, after in zip(self.x, self.x[1:], strict=False)):
            raise ConfigError(f"the knots of a table must ascend: {list(self.x)}")
        if any(not 0 <= value < float("inf") for value in self.y):
            raise ConfigError(f"the values of a table are finite and at least 0: {list(self.y)}")

    def __call__(self, x: float) -> float:
        """Value at `x`; never below 0."""
        return along(self.x, self.y, x)


@dataclass(frozen=True, slots=True)
class Grid:
    """A function of two variables through the points of a rectangular grid: bilinear, and continued like `Line`."""

    x: tuple[float, ...]
    """Knots of the first variable `[rows]`."""
    y: tuple[float, ...]
    """Knots of the second `[columns]`."""
    z: tuple[tuple[float, ...], ...]
    """Values `[rows][columns]`."""

    def __post_init__(self) -> None:
        if len(self.x) != len(self.z):
            raise ConfigError(f"a grid with {len(self.x)} rows has values for {len(self.z)}")
        for row in self.z:
            Line(self.y, row)
        Line(self.x, tuple(0.0 for _ in self.x))

    def __call__(self, x: float, y: float) -> float:
        """Value at `(x, y)`; never below 0."""
        if x <= self.x[0] or len(self.x) == 1:
            return along(self.y, self.z[0], y)
        i, share = locate(self.x, x)
        low, high = along(self.y, self.z[i], y), along(self.y, self.z[i + 1], y)
        return max(0.0, low + share * (high - low))

    def row(self, x: float) -> tuple[float, ...]:
        """The values over `y` at `x` `[columns]`."""
        if x <= self.x[0] or len(self.x) == 1:
            return self.z[0]
        i, share = locate(self.x, x)
        return tuple(max(0.0, low + share * (high - low)) for low, high in zip(self.z[i], self.z[i + 1], strict=True))


@dataclass(frozen=True, slots=True)
class Field:
    """A function of several variables through the points of a grid: linear in each between knots, constant beyond the first and last."""

    axes: tuple[tuple[float, ...], ...]
    """Knots of each variable, at least two, ascending."""
    values: tuple[float, ...]
    """Values, the last variable fastest."""

    def __post_init__(self) -> None:
        size = 1
        for knots in self.axes:
            if len(knots) < 2:
                raise ConfigError(f"an axis of a table needs two knots or more: {list(knots)}")
            Line(knots, tuple(0.0 for _ in knots))
            size *= len(knots)
        if size != len(self.values):
            raise ConfigError(f"a table with {size} knots has {len(self.values)} values")
        Line(tuple(map(float, range(size))), self.values)

    def __call__(self, *point: float) -> float:
        """Value at `point`, one number a variable."""
        corners = [(0, 1.0)]
        for knots, x in zip(self.axes, point, strict=True):
            i, share = locate(knots, x)
            share = min(max(share, 0.0), 1.0)
            width = len(knots)
            corners = [
                (place * width + i + step, weight * part)
                for place, weight in corners
                for step, part in ((0, 1.0 - share), (1, share))
                if part
            ]
        return sum(weight * self.values[place] for place, weight in corners)


def along(knots: Sequence[float], values: Sequence[float], x: float) -> float:
    """Value at `x` of the line through `(knots[i], values[i])`: constant before the first knot, never below 0."""
    if x <= knots[0] or len(knots) == 1:
        return values[0]
    i, share = locate(knots, x)
    return max(0.0, values[i] + share * (values[i + 1] - values[i]))


def locate(knots: Sequence[float], x: float) -> tuple[int, float]:
    """The interval `i` of at least two knots that holds (or is nearest to) `x`, and how far along it is: beyond 1 past the end."""
    i = min(max(bisect_right(knots, x) - 1, 0), len(knots) - 2)
    return i, (x - knots[i]) / (knots[i + 1] - knots[i])


class IntegerLine:
    """A table with integer knots, values in femtoseconds and integer slopes: sums along it have a closed form and no rounding.

    The value of knot i + 1 is that of knot i plus a whole slope times the distance, so it may differ from the given one by
    half a femtosecond a unit of distance.
    """

    __slots__ = ("knots", "slopes", "values")

    def __init__(self, knots: Sequence[int], values_s: Sequence[float]) -> None:
        """Through `(knots[i], values_s[i])`; knots ascend, there are at least two, and slopes are not negative."""
        values = [to_fs(value) for value in values_s]
        self.knots = tuple(knots)
        self.slopes = tuple(
            max(0, round((values[i + 1] - values[i]) / (knots[i + 1] - knots[i]))) for i in range(len(knots) - 1)
        )
        self.values = [values[0]]
        for i, slope in enumerate(self.slopes):
            self.values.append(self.values[i] + slope * (knots[i + 1] - knots[i]))

    def __call__(self, x: int) -> int:
        """Value at `x`, in femtoseconds."""
        if x <= self.knots[0]:
            return self.values[0]
        i = self._interval(x)
        return self.values[i] + self.slopes[i] * (x - self.knots[i])

    def along(self, start: int, stride: int, steps: int, plus_fs: int) -> tuple[Segment, ...]:
        """Values at `start + i * stride` for i in [0, steps), each with `plus_fs` added: one segment a piece of the line crossed.

        `stride` is at least 1.
        """
        segments: list[Segment] = []
        while steps:
            slope, end = self._piece(start)
            # A step exactly on a knot lies on both pieces, so the piece may include it; the next begins after it.
            taken = steps if end is None else min(steps, (end - start) // stride + 1)
            segments.append(Segment(taken, self(start) + plus_fs, slope * stride))
            start += taken * stride
            steps -= taken
        return tuple(segments)

    def _piece(self, x: int) -> tuple[int, int | None]:
        """Slope at `x`, and the knot up to which it holds; None after the last."""
        if x < self.knots[0]:
            return 0, self.knots[0]
        i = self._interval(x)
        return self.slopes[i], self.knots[i + 1] if i + 2 < len(self.knots) else None

    def _interval(self, x: int) -> int:
        return min(bisect_right(self.knots, x) - 1, len(self.knots) - 2)
