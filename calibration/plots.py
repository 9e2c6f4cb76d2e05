"""The two pictures that only a calibration draws: predicted against measured, and an error on its margin."""

from __future__ import annotations

import numpy as np

from sim.results.page_parts import Markup
from sim.results.report_layout import BLUE, GREY
from sim.results.svg_plot import Series, plot

from .numerics.tent import Array


def against(what: str, unit: str, measured: Array, predicted: Array) -> str:
    """Predicted against measured, point by point, with the diagonal on which they are equal; values that are not finite are left out."""
    keep = np.isfinite(measured) & np.isfinite(predicted)
    x, y = measured[keep].tolist(), predicted[keep].tolist()
    if not x:
        return ""
    ends = (0.0, max(*x, *y) or 1.0)
    series = [Series(x=ends, y=ends, dashed=True, colour=GREY), Series(x=x, y=y, dots=True, colour=BLUE)]
    return plot(what, series, x_label=f"measured, {unit}", y_label=f"predicted, {unit}", x_range=ends, y_range=ends)


def margin_strip(low: float, high: float, value: float, margin: float, colour: str) -> Markup:
    """A value and its interval beside the margin around 0, as a strip for a row of a table: the grey band is the margin."""
    width, height, reach = 190, 18, 2.0 * margin

    def at(x: float) -> float:
        return width / 2 + max(-1.0, min(1.0, x / reach)) * (width / 2 - 4)

    return Markup(
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" aria-label="interval and margin">'
        f'<rect x="{at(-margin):.1f}" y="1" width="{at(margin) - at(-margin):.1f}" height="{height - 2}" fill="#e3e8ec"/>'
        f'<line x1="{at(0):.1f}" y1="0" x2="{at(0):.1f}" y2="{height}" stroke="#9aa5b1"/>'
        f'<line x1="{at(low):.1f}" y1="{height / 2}" x2="{at(high):.1f}" y2="{height / 2}" stroke="{colour}" stroke-width="3"/>'
        f'<circle cx="{at(value):.1f}" cy="{height / 2}" r="4" fill="{colour}"/></svg>'
    )
