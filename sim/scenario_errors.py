"""One clear message for anything that is wrong with a scenario: what, where, what was found, what would be right."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from .catalog.naming import nearest
from .scenario_tables import TABLE_NAMES, TABLE_OF_KEY, TABLES

_KINDS = {int: "a whole number", float: "a number", str: "text in quotes", bool: "true or false"}
_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text in quotes",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a table",
}
"""Pydantic's names for what a value is not."""
_MOST_SHOWN = 120
"""Characters of a value that a message repeats."""
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_COMMAND_LINE_ONLY = ("out", "html", "json", "decision_log")

Label = Callable[[str, str], str]
"""(table, key) -> the place as the user wrote it; an empty key means the table itself, an empty table the top level."""


class ScenarioError(ValueError):
    """A scenario that cannot be read or run. The message names the file or flag, the table, the key and the remedy."""


def choices(name: str, known: Iterable[str]) -> str:
    """What may have been meant by `name`, where something is like it, and all that there is."""
    listed = list(known)
    close = nearest(name, listed, most=1)
    return f"nearest is {close[0]} (there are {', '.join(listed)})" if close else f"there are {', '.join(listed)}"


def unknown_key(table: str, key: str, label: str) -> ScenarioError:
    """The error for a key that `[table]` does not have; `label` is the key as the user wrote it, and where."""
    known = [*TABLES[table].model_fields]
    if key in TABLE_OF_KEY:
        hint = f"it belongs in [{TABLE_OF_KEY[key]}]"
    elif key in _COMMAND_LINE_ONLY:
        hint = f"where results go is said on the command line: --{key.replace('_', '-')}"
    else:
        hint = choices(key, known)
    return ScenarioError(f"{label} is not a key of [{table}]; {hint}")


def unknown_name(name: str, label: str) -> ScenarioError:
    """The error for something at the top level that is neither a table nor, where keys may stand alone, a key."""
    if name in TABLE_OF_KEY:
        return ScenarioError(f"{label} must stand in its table: [{TABLE_OF_KEY[name]}] {name} = …")
    close = nearest(name, [*TABLE_NAMES, *TABLE_OF_KEY], most=1)
    tables = " ".join(f"[{table}]" for table in TABLE_NAMES)
    if not close:
        return ScenarioError(f"{label} is neither a table nor a key; tables are {tables}")
    hint = f"[{close[0]}]" if close[0] in TABLE_NAMES else f"{close[0]} in [{TABLE_OF_KEY[close[0]]}]"
    return ScenarioError(f"{label} is neither a table nor a key; nearest is {hint} (tables: {tables})")


def bad_values(
    table: str, given: Mapping[str, Any], error: ValidationError, label: Callable[[str, str], str]
) -> ScenarioError:
    """The error for the values `given` for `[table]` that are of a wrong type or out of range; one clause each, in one message."""
    details: dict[str, list[Any]] = {}
    for detail in error.errors(include_url=False):
        key = str(detail["loc"][0])
        if detail["type"] == "extra_forbidden":
            return unknown_key(table, key, label(table, key))
        details.setdefault(key, []).append(detail)
    clauses = [
        _clause(label(table, key), given.get(key), TABLES[table].model_fields[key], found)
        for key, found in details.items()
    ]
    return ScenarioError("; ".join(clauses))


def _clause(label: str, value: object, field: FieldInfo, details: list[Any]) -> str:
    """What is wrong with one key: the innermost place that is, what stands there, and what would be right."""
    places = [_place(value, detail["loc"][1:]) for detail in details]
    innermost = max(places, key=lambda place: place.count("[") + place.count("."))
    here = [detail for place, detail in zip(places, details, strict=True) if place == innermost]
    found = shown(here[0]["input"])
    if here[0]["loc"][-1] == "[key]":
        return f"{label} has the key {found}; {_wanted(here)} was expected ({field.description})"
    if innermost or _kind(field) is None:
        return f"{label}{innermost} is {found}; it must be {_wanted(here)} ({field.description})"
    return f"{label} is {found}; {expectation(field)}"


def _place(value: object, steps: Iterable[Any]) -> str:
    """Where in a value an error is, as `[0].key`. What pydantic puts between (which of several types it tried) names no place."""
    place = ""
    for step in steps:
        if isinstance(value, Mapping) and (step in value or str(step) in value):  # TOML knows only text for keys
            value, place = value[step if step in value else str(step)], f"{place}.{step}"
        elif isinstance(value, list) and isinstance(step, int) and step < len(value):
            value, place = value[step], f"{place}[{step}]"
    return place


def _wanted(details: list[Any]) -> str:
    """What pydantic would have taken, in words, by the errors of all that it tried."""
    words = [
        _TYPES.get(detail["type"]) or _limit(detail.get("ctx", {})) or detail["msg"].removeprefix("Input should be ")
        for detail in details
    ]
    if "a number" in words:
        words = [word for word in words if word != "a whole number"]
    return " or ".join(dict.fromkeys(words))


def _limit(context: Mapping[str, Any]) -> str | None:
    """A bound that was broken."""
    length = context.get("max_length") or context.get("min_length")
    if length is not None:
        return f"a list of {length}"
    return next((f"{words} {context[name]:g}" for name, words in _BOUNDS.items() if name in context), None)


def expectation(field: FieldInfo) -> str:
    """What a value of this field must be, in words: its kind, its range, its meaning."""
    kind = _kind(field) or "a value"
    bounds = [
        f"{words} {getattr(constraint, name):g}"
        for constraint in field.metadata
        for name, words in _BOUNDS.items()
        if getattr(constraint, name, None) is not None
    ]
    limits = f", {' and '.join(bounds)}" if bounds else ""
    return f"it must be {kind}{limits} ({field.description})"


def _kind(field: FieldInfo) -> str | None:
    """The kind of a field's values in words; None for one that holds others."""
    annotation = _without_none(field.annotation)
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(annotation))
    return _KINDS.get(annotation)


def shown(value: object) -> str:
    """A value found, as it should appear in a message."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"{value!r} (text)"
    if isinstance(value, Mapping):
        return "a table"
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, types.UnionType):
        return next(choice for choice in get_args(annotation) if choice is not type(None))
    return annotation
