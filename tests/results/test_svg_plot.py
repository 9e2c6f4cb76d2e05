"""Plots without a library: round ticks, peaks that survive thinning, text that stays text."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.results.svg_plot import Series, log_ticks, plot, thinned, tick_text, ticks


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
    figure = plot('a "title" <b>', [series], x_label="s", y_label="GiB").replace("&ensp;", " ").replace("&nbsp;", " ")
    root = ElementTree.fromstring(figure)
    assert root.tag == "figure"
    assert "<script>&" in "".join(root.itertext())
    assert root.find(".//circle" if dots else ".//polyline") is not None


def test_a_step_holds_its_value_until_the_next() -> None:
    root = ElementTree.fromstring(
        plot("t", [Series(name="n", x=[0, 1], y=[0, 1], steps=True)], x_label="s", y_label="y")
    )
    line = root.find(".//polyline")
    assert line is not None
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    assert points[1] == (points[2][0], points[0][1])


def test_nothing_to_draw_is_nothing() -> None:
    assert plot("t", [Series(name="n", x=[], y=[])], x_label="s", y_label="y") == ""
    flat = plot("t", [Series(name="n", x=[1, 1], y=[5, 5])], x_label="s", y_label="y", from_zero=False)
    assert "nan" not in flat


def test_plots_of_one_range_have_the_same_ticks() -> None:
    """What is drawn twice as high in one plot as in another is twice as much."""
    axes = {"x_label": "s", "y_label": "%", "x_range": (0.0, 40.0), "y_range": (0.0, 100.0)}
    low, high = (ElementTree.fromstring(plot("t", [Series(x=[0, 10], y=[0, top])], **axes)) for top in (40.0, 80.0))
    assert [text.text for text in low.iter("text")] == [text.text for text in high.iter("text")]
    rises = []
    for root in (low, high):
        line = root.find(".//polyline")
        assert line is not None
        first, last = (float(point.split(",")[1]) for point in line.attrib["points"].split())
        rises.append(first - last)
    assert rises[1] == pytest.approx(2 * rises[0], abs=0.2)


def test_powers_of_ten_are_equally_far_apart_on_a_logarithmic_axis() -> None:
    root = ElementTree.fromstring(
        plot("t", [Series(x=[1, 10, 100], y=[0, 1, 2])], x_label="s", y_label="y", log_x=True)
    )
    line = root.find(".//polyline")
    assert line is not None
    first, second, third = (float(point.split(",")[0]) for point in line.attrib["points"].split())
    assert second - first == pytest.approx(third - second, abs=0.11)


@given(st.floats(1e-3, 1e6), st.floats(1.01, 1e6))
def test_logarithmic_ticks_lie_inside_and_rise(low: float, factor: float) -> None:
    found = log_ticks(low, low * factor)
    assert found and found == sorted(set(found))
    assert all(low * (1 - 1e-9) <= tick <= low * factor * (1 + 1e-9) for tick in found)


@pytest.mark.parametrize(
    ("value", "text"), [(0.02, "0.02"), (12_500, "12,500"), (2e6, "2M"), (2.5e9, "2.5G"), (-3e6, "-3M")]
)
def test_a_number_beside_an_axis_is_short(value: float, text: str) -> None:
    assert tick_text(value) == text
