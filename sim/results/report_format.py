"""Numbers as people read them: three significant figures, the unit beside them, thousands separated.

Only ASCII comes out, so that the same text serves a terminal, a pipe and a web page.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from typing import Any, SupportsFloat

MISSING = "-"
"""What stands where a number cannot exist."""

GIB = 2**30


def escape(text: object) -> str:
    """`text` safe inside an HTML element or attribute."""
    return html.escape(str(text), quote=True)


def number(value: object) -> float | None:
    """`value` as a finite float, or None where there is none."""
    if isinstance(value, bool) or not isinstance(value, SupportsFloat):  # a string is not; numpy's numbers are
        return None
    found = float(value)
    return found if math.isfinite(found) else None


def statistic(summary: Mapping[str, Any], metric: str, name: str) -> float | None:
    """One statistic of a metric in a summary, such as `statistic(summary, "ttft_s", "p99")`; None where it does not exist."""
    table = summary.get(metric)
    return number(table.get(name)) if isinstance(table, Mapping) else None


def count(value: object) -> str:
    """A whole number: 19,366."""
    found = number(value)
    return MISSING if found is None else f"{found:,.0f}"


def plural(value: float, noun: str) -> str:
    """A count with its noun: 1 request, 1,000 requests."""
    return f"{value:,.0f} {noun}" if value == 1 else f"{value:,.0f} {noun}s"


def figure(value: object) -> str:
    """Three significant figures without an exponent: 0.0123, 4.57, 812, 19,366."""
    found = number(value)
    if found is None:
        return MISSING
    if found == 0:
        return "0"
    rounded = float(f"{found:.3g}")  # first, because rounding may add a digit: 0.9996 is 1.00
    decimals = max(0, 2 - math.floor(math.log10(abs(rounded))))
    return f"{found:,.{min(decimals, 6)}f}"


def seconds(value: object) -> str:
    """A duration in the unit that suits it: 12.4 ms, 1.24 s, 12 min 5 s, 3 h 20 min."""
    found = number(value)
    if found is None:
        return MISSING
    size = abs(found)
    if size == 0:
        return "0 s"
    # Limits are where three figures round up to the next unit: 999.6 ms is 1.00 s.
    if size < 0.9995e-3:
        return f"{figure(found * 1e6)} us"
    if size < 0.9995:
        return f"{figure(found * 1e3)} ms"
    if size < 299.5:
        return f"{figure(found)} s"
    if size < 3 * 3600:
        minutes, rest = divmod(round(found), 60)
        return f"{minutes} min {rest} s"
    hours, rest = divmod(round(found / 60), 60)
    return f"{hours:,} h {rest} min"


def share(value: object) -> str:
    """A share as a percentage: 36.6 %."""
    found = number(value)
    if found is None:
        return MISSING
    percent = found * 100
    if 0 < abs(percent) < 0.05:
        return "< 0.1 %"
    if 99.95 <= percent < 100:
        return "> 99.9 %"  # "100 %" is said only when it is all of them
    return f"{percent:.1f} %" if percent not in (0.0, 100.0) else f"{percent:.0f} %"


def gib(value: object) -> str:
    """Bytes in GiB: 14.96 GiB; small amounts in MiB."""
    found = number(value)
    if found is None:
        return MISSING
    if 0 < abs(found) < 0.1 * GIB:
        return f"{found / 2**20:,.1f} MiB"
    return f"{found / GIB:,.2f} GiB"
