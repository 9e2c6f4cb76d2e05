"""A fit as one page: where it comes from, its errors and intervals, what it cannot tell, its range, and its residuals."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sim.results.page_parts import bullets, card, html_page, html_table, panels, verdict
from sim.results.svg_plot import Series, plot, span

from .measuring.step_log import is_step_run, read_run
from .timed_steps.fit_page import fit_page


def page(profile: Mapping[str, Any]) -> str:
    """The page of a profile document as a fit returns it: with its residuals."""
    name = str(profile["name"])
    limits = [(key, f"{value:,}") for key, value in profile["range"].items()]
    return html_page(
        name,
        verdict("plain", ("kvtwin calibrate fit",), name)
        + card(
            "Where it comes from", html_table(("", ""), list(profile["provenance"].items()), words=range(2), wrap=(1,))
        )
        + card("Errors", _errors(profile["error"]), note=str(profile["error"]["end_to_end"]))
        + card("Intervals", _intervals(profile["intervals"]))
        + card("What the data cannot tell", bullets(profile["identifiability"]))
        + card("Range", html_table(("", ""), limits), note="A run that leaves it says so.")
        + card("Residuals of held-out points", panels(_residuals(profile.get("residuals", {})))),
    )


def page_of(source: Path, profile: Mapping[str, Any]) -> str:
    """The page of a fit to `source`: timed steps are still there to be looked at one by one; of tables the profile keeps the errors."""
    return fit_page(read_run(source), dict(profile)) if is_step_run(source) else page(profile)


def _errors(errors: Mapping[str, Any]) -> str:
    rows: list[tuple[str, ...]] = []
    others = []
    for key, value in errors.items():
        if isinstance(value, Mapping) and value.get("median") is not None:
            points = f"{value['points']:,}" if "points" in value else ""
            bias = f"{value['bias']:+.1%}" if "bias" in value else ""
            rows.append((key, points, f"{value['median']:.1%}", f"{value['p95']:.1%}", bias))
        elif isinstance(value, Mapping) and key in ("kernels_only", "corrected"):
            figures = ", ".join(f"{name} {off:+.1%}" for name, off in value.items())
            others.append(f"{key.replace('_', ' ')}: {figures}")
    return html_table(("term", "points", "median", "95th percentile", "bias"), rows) + bullets(others)


def _intervals(intervals: Mapping[str, Any]) -> str:
    rows = [(term, f"{low:+.1%}", f"{high:+.1%}") for term, (low, high) in intervals.items()]
    return (
        html_table(("term, as a whole", "2.5 %", "97.5 %"), rows) if rows else "<p>None: the source does not tell.</p>"
    )


def _residuals(residuals: Mapping[str, Any]) -> list[str]:
    """The error of each term over its measured time, all on one axis of errors."""
    off = {term: [100 * value for value in part["off"]] for term, part in residuals.items()}
    ends = span(off.values())
    return [
        plot(
            term,
            [Series(x=part["measured_us"], y=off[term], dots=True)],
            x_label="measured, us (log)",
            y_label="error, %",
            y_range=ends,
            log_x=True,
        )
        for term, part in residuals.items()
    ]
