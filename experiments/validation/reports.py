"""The verdicts as files: JUnit XML for a CI system, one HTML page for a reader."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

from .cell import Cell


def junit_text(cells: Sequence[Cell], seconds: float) -> str:
    """A JUnit test suite with a test case a cell; a cell that is not well is a failure with its reason."""
    failures = [cell for cell in cells if not cell.ok]
    suite = ElementTree.Element(
        "testsuite",
        name="kvtwin validate",
        tests=str(len(cells)),
        failures=str(len(failures)),
        errors="0",
        time=f"{seconds:.3f}",
    )
    for cell in cells:
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"validate.{cell.device}.{cell.preset}", name=cell.scenario
        )
        if not cell.ok:
            ElementTree.SubElement(case, "failure", message=_plain(cell.error or "")).text = _plain(cell.error or "")
    ElementTree.indent(suite)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


def page_text(cells: Sequence[Cell], facts: Mapping[str, Any]) -> str:
    """One page: the verdict, a grid of scenarios and presets, what is wrong, and where the run comes from."""
    presets = list(dict.fromkeys(cell.preset for cell in cells))
    scenarios = list(dict.fromkeys(cell.scenario for cell in cells))
    by_place = {(cell.scenario, cell.preset): cell for cell in cells}
    bad = [cell for cell in cells if not cell.ok]
    verdict = (
        f"{len(bad)} of {len(cells)} cells differ"
        if bad
        else f"All {len(cells)} cells agree: equal decisions, equal tokens, no leak, no fallback"
    )
    head = "".join(f"<th>{html.escape(name)}</th>" for name in presets)
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th>"
        + "".join(_field(by_place.get((name, preset))) for preset in presets)
        + "</tr>"
        for name in scenarios
    )
    problems = "".join(
        f"<li><b>{html.escape(cell.scenario)}</b> under <b>{html.escape(cell.preset)}</b>: {html.escape(cell.error or '')}</li>"
        for cell in bad
    )
    origin = "".join(
        f"<tr><th>{html.escape(str(key).replace('_', ' '))}</th><td>{html.escape(str(value))}</td></tr>"
        for key, value in facts.items()
        if value is not None
    )
    return _PAGE.format(
        verdict=html.escape(verdict),
        tone="bad" if bad else "good",
        head=head,
        rows=rows,
        problems=f"<h2>What differs</h2><ul>{problems}</ul>" if bad else "",
        origin=origin,
    )


def _field(cell: Cell | None) -> str:
    if cell is None:
        return "<td></td>"
    facts = cell.facts
    title = cell.error or ", ".join(f"{key} {value}" for key, value in facts.items())
    sign = "ok" if cell.ok else "differs"
    detail = (
        f"{facts.get('preemptions', 0)} / {facts.get('prefix_hit_tokens', 0)} / {facts.get('swapped_out_blocks', 0)}"
    )
    return f'<td class="{"good" if cell.ok else "bad"}" title="{html.escape(title)}">{sign}<br><small>{detail}</small></td>'


def _plain(text: str) -> str:
    """Without the control characters that XML forbids."""
    return "".join(letter for letter in text if letter >= " " or letter in "\t\n")


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>kvtwin validate</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #1c2733; }}
table {{ border-collapse: collapse; }} th, td {{ border: 1px solid #d5dbe1; padding: .25rem .5rem; text-align: left; }}
td.good {{ background: #e6f4ea; }} td.bad {{ background: #fbe4e2; font-weight: 600; }}
small {{ white-space: nowrap; }}
p.good {{ color: #146c2e; font-size: 1.25rem; }} p.bad {{ color: #a1201b; font-size: 1.25rem; }}
</style></head><body>
<h1>kvtwin validate</h1>
<p class="{tone}">{verdict}.</p>
<p>Each cell ran a scenario for real, replayed its measured durations through the simulator and compared every decision, and
compared every token with a run that has unlimited memory. Small figures: preemptions / prefix tokens reused / blocks swapped out.</p>
<table><tr><th></th>{head}</tr>{rows}</table>
{problems}
<h2>Where this comes from</h2>
<table>{origin}</table>
</body></html>
"""
