"""Files of text and JSON from outside: what cannot be read is one sentence that says where."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .errors import CalibrationError
from .tent import Array


def read_text(path: Path) -> str:
    """The text in `path`. Raises: CalibrationError when it is none; OSError."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{path}: not a text file: byte {error.start} is no UTF-8") from error


def begins_with(path: Path, word: str) -> bool:
    """Whether `word` occurs in the first 4,096 bytes of `path`, whatever else they are. Raises OSError."""
    with path.open("rb") as file:
        return word.encode() in file.read(4096)


def parse_object(text: str, where: str) -> dict[str, Any]:
    """The JSON object in `text`. Raises: CalibrationError when it holds none."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise CalibrationError(f"{where}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise CalibrationError(f"{where}: it holds {type(found).__name__}, not an object of named values")
    return found


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises: CalibrationError, OSError."""
    return parse_object(read_text(path), str(path))


def check_keys(document: Mapping[str, Any], keys: Collection[str], where: str) -> None:
    """Raise CalibrationError for the first of `keys` that is missing."""
    for key in keys:
        if key not in document:
            raise CalibrationError(f"{where}: it does not say {key!r}")


def numbers(values: Any, where: str, *, least: float | None = None) -> Array:
    """A list of finite numbers, at least `least` if given. Raises: CalibrationError naming the first that is none, counted from 1."""
    for place, value in enumerate(values if isinstance(values, list) else [values], start=1):
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and np.isfinite(value)
        if not good or (least is not None and value < least):
            bound = "" if least is None else f", at least {least:g},"
            which = f"number {place}" if isinstance(values, list) else "it"
            raise CalibrationError(f"{where}: {which} is {value!r}; a finite number{bound} is needed")
    return np.asarray(values, dtype=np.float64)
