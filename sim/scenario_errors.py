"""One clear message for anything that is wrong with a scenario: what, where, what was found, what would be right."""

from __future__ import annotations

import difflib
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from .scenario_tables import TABLE_NAMES, TABLE_OF_KEY, TABLES

_KINDS = {int: "a whole number", float: "a number", str: "text in quotes", bool: "true or false"}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_COMMAND_LINE_ONLY = ("out", "html", "json", "decision_log")

Label = Callable[[str, str], str]
"""(table, key) -> the place as the user wrote it; an empty key means the table itself, an empty table the top level."""


class ScenarioError(ValueError):
    """A scenario that cannot be read or run. The message names the file or flag, the table, the key and the remedy."""


def nearest(name: str, known: Sequence[str]) -> str:
    """The known name most like `name`."""
    return difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]


def unknown_key(table: str, key: str, label: str) -> ScenarioError:
    """The error for a key that `[table]` does not have; `label` is the key as the user wrote it, and where."""
    known = [*TABLES[table].model_fields]
    if key in TABLE_OF_KEY:
        hint = f"it belongs in [{TABLE_OF_KEY[key]}]"
    elif key in _COMMAND_LINE_ONLY:
        hint = f"where results go is said on the command line: --{key.replace('_', '-')}"
    else:
        hint = f"nearest is {nearest(key, known)} (known: {', '.join(known)})"
    return ScenarioError(f"{label} is not a key of [{table}]; {hint}")


def unknown_name(name: str, label: str) -> ScenarioError:
    """The error for something at the top level that is neither a table nor, where keys may stand alone, a key."""
    if name in TABLE_OF_KEY:
        return ScenarioError(f"{label} must stand in its table: [{TABLE_OF_KEY[name]}] {name} = …")
    guess = nearest(name, [*TABLE_NAMES, *TABLE_OF_KEY])
    hint = f"[{guess}]" if guess in TABLE_NAMES else f"{guess} in [{TABLE_OF_KEY[guess]}]"
    tables = " ".join(f"[{table}]" for table in TABLE_NAMES)
    return ScenarioError(f"{label} is neither a table nor a key; nearest is {hint} (tables: {tables})")


def bad_values(table: str, error: ValidationError, label: Callable[[str, str], str]) -> ScenarioError:
    """The error for the values of `[table]` that are of a wrong type or out of range; one clause each, in one message."""
    clauses: dict[str, str] = {}
    for detail in error.errors(include_url=False, include_context=False):
        key = str(detail["loc"][0])
        if detail["type"] == "extra_forbidden":
            return unknown_key(table, key, label(table, key))
        clauses[key] = (
            f"{label(table, key)} is {shown(detail['input'])}; {expectation(TABLES[table].model_fields[key])}"
        )
    return ScenarioError("; ".join(clauses.values()))


def expectation(field: FieldInfo) -> str:
    """What a value of this field must be, in words: its kind, its range, its meaning."""
    annotation = _without_none(field.annotation)
    if get_origin(annotation) is Literal:
        kind = "one of " + ", ".join(str(choice) for choice in get_args(annotation))
    else:
        kind = _KINDS.get(annotation, "a value")
    bounds = [
        f"{words} {getattr(constraint, name):g}"
        for constraint in field.metadata
        for name, words in _BOUNDS.items()
        if getattr(constraint, name, None) is not None
    ]
    limits = f", {' and '.join(bounds)}" if bounds else ""
    return f"it must be {kind}{limits} ({field.description})"


def shown(value: object) -> str:
    """A value found, as it should appear in a message."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"{value!r} (text)"
    if isinstance(value, Mapping):
        return "a table"
    return f"{value!r}"


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, types.UnionType):
        return next(choice for choice in get_args(annotation) if choice is not type(None))
    return annotation
