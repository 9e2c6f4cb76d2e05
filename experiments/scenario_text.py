"""A scenario as the text of a TOML file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sim.preset_settings import settings_of
from sim.scenario_tables import TABLES


def scenario_text(tables: Mapping[str, Mapping[str, Any]], comments: Sequence[str] = ()) -> str:
    """`tables` as TOML, with `comments` above; keys without a value or with their default are left out, but for what a preset may have
    otherwise by itself.

    >>> print(scenario_text({"model": {"model": "llama-3.1-8b"}, "run": {"seed": 0}}, ["Two lines."]), end="")
    # Two lines.
    <BLANKLINE>
    [model]
    model = "llama-3.1-8b"
    """
    parts = ["\n".join(f"# {comment}" for comment in comments)] if comments else []
    decided = settings_of(str(tables.get("policy", {}).get("policy", "vllm-v1")))
    for name, keys in tables.items():
        said = {key: value for key, value in keys.items() if value is not None}
        lines = [
            f"{key} = {_value(value)}"
            for key, value in said.items()
            if key in decided or not _is_default(name, key, value)
        ]
        if lines:
            parts.append("\n".join([f"[{name}]", *lines]))
    return "\n\n".join(parts) + "\n"


def _is_default(table: str, key: str, value: Any) -> bool:
    return table in TABLES and bool(value == TABLES[table].model_fields[key].default)


def _value(value: Any) -> str:
    """One value. The only strings in scenarios are names and paths, which need no more than a basic string's escapes."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        if value == "inf":
            return "inf"
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    return repr(value)
