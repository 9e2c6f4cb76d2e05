"""A fit as one page: where it comes from, its errors and intervals, what it cannot tell, its range, and its residuals."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from .svg_plot import Series, line_plot

MOST_POINTS = 1500
"""Residuals drawn of a term; more are thinned evenly."""
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem;color:#1c2733}
table{border-collapse:collapse}td,th{padding:.2rem .8rem;text-align:right;border-bottom:1px solid #dde3e8}
td:first-child,th:first-child{text-align:left}.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(26rem,1fr));gap:1rem}"""


def page(profile: Mapping[str, Any]) -> str:
    """The page of a profile document as a fit returns it: with its residuals."""
    name = escape(str(profile["name"]))
    origin = "".join(
        f"<tr><td>{escape(key)}</td><td>{escape(str(value))}</td></tr>" for key, value in profile["provenance"].items()
    )
    limits = "".join(f"<tr><td>{escape(key)}</td><td>{value:,}</td></tr>" for key, value in profile["range"].items())
    notes = "".join(f"<li>{escape(text)}</li>" for text in profile["identifiability"])
    plots = "".join(_residuals(term, part) for term, part in profile.get("residuals", {}).items())
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title><style>{STYLE}</style></head><body>'
        f"<h1>{name}</h1><table>{origin}</table>"
        f"<h2>Errors</h2>{_errors(profile['error'])}<p>{escape(str(profile['error']['end_to_end']))}</p>"
        f"<h2>Intervals</h2>{_intervals(profile['intervals'])}"
        f"<h2>What the data cannot tell</h2><ul>{notes}</ul>"
        f"<h2>Range</h2><table>{limits}</table><p>A run that leaves it says so.</p>"
        f'<h2>Residuals of held-out points</h2><div class="plots">{plots}</div></body></html>'
    )


def page_of(source: Path, profile: Mapping[str, Any]) -> str:
    """The page of a fit to `source`: timed steps are still there to be looked at one by one; of tables the profile keeps the errors."""
    from calibration.measuring.step_log import is_step_run, read_run
    from calibration.timed_steps.fit_page import fit_page

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
    head = "<tr><th>term</th><th>points</th><th>median</th><th>95th percentile</th><th>bias</th></tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def _intervals(intervals: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{escape(term)}</td><td>{low:+.1%}</td><td>{high:+.1%}</td></tr>"
        for term, (low, high) in intervals.items()
    )
    head = "<tr><th>term, as a whole</th><th>2.5 %</th><th>97.5 %</th></tr>"
    return f"<table>{head}{rows}</table>" if rows else "<p>None: the source does not tell.</p>"


def _residuals(term: str, part: Mapping[str, Any]) -> str:
    time, off = np.asarray(part["measured_us"], dtype=float), np.asarray(part["off"], dtype=float)
    step = max(1, -(-time.size // MOST_POINTS))
    chosen = np.argsort(time, kind="stable")[::step]
    points = Series(
        name="predicted / measured - 1", x=np.log10(time[chosen]).tolist(), y=off[chosen].tolist(), dots=True
    )
    return line_plot(term, [points], x_label="log10 of the measured time in us", y_label="relative error")
