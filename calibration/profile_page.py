"""A fit as one page: where it comes from, its errors and intervals, what it cannot tell, its range, and its residuals."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from .measuring.step_log import is_step_run, read_run
from .plots import Series, dots, page_frame, table
from .timed_steps.fit_page import fit_page


def page(profile: Mapping[str, Any]) -> str:
    """The page of a profile document as a fit returns it: with its residuals."""
    name = str(profile["name"])
    origin = "".join(
        f'<tr><td>{escape(key)}</td><td class="text">{escape(str(value))}</td></tr>'
        for key, value in profile["provenance"].items()
    )
    limits = "".join(f"<tr><td>{escape(key)}</td><td>{value:,}</td></tr>" for key, value in profile["range"].items())
    notes = "".join(f"<li>{escape(text)}</li>" for text in profile["identifiability"])
    plots = "".join(_residuals(term, part) for term, part in profile.get("residuals", {}).items())
    body = f"""<table>{origin}</table>
<h2>Errors</h2>{_errors(profile["error"])}<p>{escape(str(profile["error"]["end_to_end"]))}</p>
<h2>Intervals</h2>{_intervals(profile["intervals"])}
<h2>What the data cannot tell</h2><ul>{notes}</ul>
<h2>Range</h2><table>{limits}</table><p>A run that leaves it says so.</p>
<h2>Residuals of held-out points</h2><div class="row">{plots}</div>
"""
    return page_frame(name, body)


def page_of(source: Path, profile: Mapping[str, Any]) -> str:
    """The page of a fit to `source`: timed steps are still there to be looked at one by one; of tables the profile keeps the errors."""
    return fit_page(read_run(source), dict(profile)) if is_step_run(source) else page(profile)


def _errors(errors: Mapping[str, Any]) -> str:
    rows = []
    for key, value in errors.items():
        if isinstance(value, Mapping) and value.get("median") is not None:
            points = f"{value['points']:,}" if "points" in value else ""
            bias = f"{value['bias']:+.1%}" if "bias" in value else ""
            rows.append(
                f"<tr><td>{escape(key)}</td><td>{points}</td><td>{value['median']:.1%}</td><td>{value['p95']:.1%}</td><td>{bias}</td></tr>"
            )
        elif isinstance(value, Mapping) and key in ("kernels_only", "corrected"):
            figures = ", ".join(f"{name} {off:+.1%}" for name, off in value.items())
            rows.append(f'<tr><td>{escape(key.replace("_", " "))}</td><td colspan="4">{figures}</td></tr>')
    return table(("term", "points", "median", "95th percentile", "bias"), rows)


def _intervals(intervals: Mapping[str, Any]) -> str:
    rows = [
        f"<tr><td>{escape(term)}</td><td>{low:+.1%}</td><td>{high:+.1%}</td></tr>"
        for term, (low, high) in intervals.items()
    ]
    return table(("term, as a whole", "2.5 %", "97.5 %"), rows) if rows else "<p>None: the source does not tell.</p>"


def _residuals(term: str, part: Mapping[str, Any]) -> str:
    time, off = np.asarray(part["measured_us"], dtype=float), np.asarray(part["off"], dtype=float)
    order = np.argsort(time, kind="stable")
    caption = f"{term}: error in % over the measured time, us (log)"
    return dots(caption, [Series(time[order], 100 * off[order])], log_x=True, middle=0.0)
