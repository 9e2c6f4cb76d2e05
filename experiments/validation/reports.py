"""The verdicts as files: JUnit XML for a CI system, one HTML page for a reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

from sim.results.page_parts import Markup, bullets, card, html_page, html_table, toned, verdict
from sim.results.report_format import escape

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
    headline = (
        f"{len(bad)} of {len(cells)} cells differ"
        if bad
        else f"All {len(cells)} cells agree: equal decisions, equal tokens, no leak, no fallback"
    )
    rows = [(name, *(_field(by_place.get((name, preset))) for preset in presets)) for name in scenarios]
    origin = [(key.replace("_", " "), value) for key, value in facts.items() if value is not None]
    problems = [f"{cell.scenario} under {cell.preset}: {cell.error or ''}" for cell in bad]
    return html_page(
        "kvtwin validate",
        verdict("bad" if bad else "good", ("kvtwin validate",), headline, _WHAT_A_CELL_DOES)
        + card("What differs", bullets(problems))
        + card("Every cell", html_table(("", *presets), rows, words=range(len(presets) + 1)), note=_SMALL_FIGURES)
        + card("Where this comes from", html_table(("", ""), origin, words=range(2))),
    )


def _field(cell: Cell | None) -> Markup:
    if cell is None:
        return Markup("")
    facts = cell.facts
    title = cell.error or ", ".join(f"{key} {value}" for key, value in facts.items())
    detail = (
        f"{facts.get('preemptions', 0)} / {facts.get('prefix_hit_tokens', 0)} / {facts.get('swapped_out_blocks', 0)}"
    )
    sign = toned("ok", "good") if cell.ok else toned("differs", "bad")
    return Markup(f'<span title="{escape(title)}">{sign}<br><small class="soft">{detail}</small></span>')


def _plain(text: str) -> str:
    """Without the control characters that XML forbids."""
    return "".join(letter for letter in text if letter >= " " or letter in "\t\n")


_WHAT_A_CELL_DOES = (
    "Each cell ran a scenario for real, replayed its measured durations through the simulator and compared every decision, and compared "
    "every token with a run that has unlimited memory."
)
_SMALL_FIGURES = "Small figures: preemptions / prefix tokens reused / blocks swapped out."
