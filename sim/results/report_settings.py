"""Which settings the engine ran with, and where each came from: typed, pasted, or the preset's, where it differs from vLLM V1.

`settings` of a result's provenance says it: by key, `value` and `from`. What is in neither is a default of release, GPU and model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .report_format import escape

if TYPE_CHECKING:
    from .result import Result

_WHERE = {"given": "typed", "pasted": "pasted vLLM flags", "preset": "preset"}
"""Places by their names in provenance, in the order in which they are told."""


def settings_text(provenance: Mapping[str, Any]) -> str:
    """Everything that is no default, in one sentence; empty where nothing is."""
    told: Mapping[str, Mapping[str, Any]] = provenance.get("settings") or {}
    parts = []
    for place, words in _WHERE.items():
        named = [
            key if isinstance(entry["value"], list | dict) else f"{key} {shown(entry['value'])}"
            for key, entry in told.items()
            if entry["from"] == place
        ]
        if named:
            parts.append(f"{words}: {', '.join(named)}")
    return "; ".join(parts)


def settings_html(result: Result) -> str:
    """The settings as a card: what is no default first, the defaults folded away."""
    told: Mapping[str, Mapping[str, Any]] = result.provenance.get("settings") or {}
    if "settings" not in result.provenance:
        return ""
    policy = result.scenario.get("policy", {}).get("policy", "")
    where = {**_WHERE, "preset": f"preset {policy}"}
    rows = [
        (key, entry["value"], where[place]) for place in _WHERE for key, entry in told.items() if entry["from"] == place
    ]
    defaults = [(key, value, "default") for key, value in _all(result.scenario) if key not in told]
    note = "A default is that of the engine's release, the GPU and the model."
    return (
        f'<section class="card"><h2>Engine settings: {escape(policy)}</h2><p class="soft small">{note}</p>'
        + (_table(rows) if rows else '<p class="small">Everything is a default.</p>')
        + f'<details><summary class="small">{len(defaults)} defaults</summary>{_table(defaults)}</details></section>'
    )


def shown(value: object) -> str:
    """A value as people write it in a scenario."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def _all(scenario: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    for table in ("engine", "policy"):
        for key, value in scenario.get(table, {}).items():
            if value is not None and key not in ("policy", "vllm_args"):
                yield key, value


def _table(rows: Sequence[tuple[str, object, str]]) -> str:
    cells = "".join(
        f'<tr><td class="text">{escape(key)}</td><td class="text wrap">{escape(shown(value))}</td>'
        f'<td class="text">{escape(place)}</td></tr>'
        for key, value, place in rows
    )
    head = '<tr><th class="text">Setting</th><th class="text">Value</th><th class="text">From</th></tr>'
    return f'<div class="scroll"><table><thead>{head}</thead><tbody>{cells}</tbody></table></div>'
