"""Plots without a library: round ticks, peaks that survive thinning, text that stays text."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.svg_plot import Series, line_plot, thinned, ticks


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_are_few_evenly_spaced_and_inside(low: float, width: float) -> None:
    found = ticks(low, low + width)
    assert 2 <= len(found) <= 7
    gaps = {round(b - a, 9) for a, b in pairwise(found)}
    assert len({round(gap / max(gaps), 6) for gap in gaps}) == 1
    assert all(low - 1e-6 * width <= tick <= low + width + 1e-6 * width for tick in found)


@given(st.integers(2000, 9000), st.integers(0, 2**32))
def test_a_thinned_series_keeps_its_ends_and_its_extremes(length: int, seed: int) -> None:
    rng = Random(seed)
    values = [rng.random() for _ in range(length)]
    times = [float(index) for index in range(len(values))]
    kept = thinned(times, values)
    assert len(kept) <= 4 * 401
    assert (kept[0], kept[-1]) == ((times[0], values[0]), (times[-1], values[-1]))
    shown = [value for _, value in kept]
    assert (min(shown), max(shown)) == (min(values), max(values))
    assert kept == sorted(kept, key=lambda point: point[0])


@pytest.mark.parametrize("dots", [True, False])
def test_a_plot_is_well_formed_whatever_its_names(dots: bool) -> None:
    series = Series(name="<script>&", x=[0, 1, 2], y=[1, 3, 2], dots=dots, steps=not dots)
    figure = (
        line_plot('a "title" <b>', [series], x_label="s", y_label="GiB").replace("&ensp;", " ").replace("&nbsp;", " ")
    )
    root = ElementTree.fromstring(figure)
    assert root.tag == "figure"
    assert "<script>&" in "".join(root.itertext())
    assert root.find(".//circle" if dots else ".//polyline") is not None


def test_a_step_holds_its_value_until_the_next() -> None:
    root = ElementTree.fromstring(
        line_plot("t", [Series(name="n", x=[0, 1], y=[0, 1], steps=True)], x_label="s", y_label="y")
    )
    line = root.find(".//polyline")
    assert line is not None
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    assert points[1] == (points[2][0], points[0][1])


def test_nothing_to_draw_is_nothing() -> None:
    assert line_plot("t", [Series(name="n", x=[], y=[])], x_label="s", y_label="y") == ""
    flat = line_plot("t", [Series(name="n", x=[1, 1], y=[5, 5])], x_label="s", y_label="y", from_zero=False)
    assert "nan" not in flat
