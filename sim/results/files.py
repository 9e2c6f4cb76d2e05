"""Files that are whole or absent, and the same bytes for the same values.

A reader (a notebook, a sweep that resumes, a CI step) never sees half a file: the text is written beside its target and
then takes its name in one step. Numbers are written with the shortest text that reads back to the same float, so two
runs of the same scenario and seed give files that `cmp` calls equal.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Write `text` as UTF-8 with Unix line ends and put it at `path` atomically; missing folders are made.

    Raises OSError (nothing is left behind, and an older file at `path` stays as it was).
    """
    return write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike[str], data: bytes) -> Path:
    """Put `data` at `path`, as `write_text` does. An OSError names `path`."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # The temporary file is in the same folder, because a rename is atomic only within one file system.
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        Path(temporary).chmod(_mode(target))
        Path(temporary).replace(target)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if (
            isinstance(error, OSError) and error.errno is not None and error.filename is None
        ):  # a full disk does not say of which file
            raise OSError(error.errno, error.strerror, str(target)) from None
        raise
    return target


def _mode(target: Path) -> int:
    """Permissions of the file that is replaced, else what an ordinary `open` would give (mkstemp gives 0600)."""
    try:
        return target.stat().st_mode & 0o777
    except FileNotFoundError:
        umask = os.umask(0)
        os.umask(umask)
        return 0o666 & ~umask


def write_json(path: str | os.PathLike[str], value: Any) -> Path:
    """Write `value` as an indented JSON document, atomically. See `json_text` for how numbers are written."""
    return write_text(path, json_text(value))


def json_text(value: Any) -> str:
    """`value` as JSON that every parser accepts: not-a-number becomes null, infinity the string "inf" (as vLLM writes it).

    The order of keys is kept; numpy scalars are written as the Python numbers they stand for.
    """
    return json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """The same value out of JSON's own types."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, str | bool) or value is None:
        return value
    if hasattr(value, "tolist"):  # numpy scalars and arrays, without importing numpy
        return _plain(value.tolist())
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, int):
        return int(value)
    if isinstance(value, Sequence | set | frozenset):
        items = sorted(value, key=str) if isinstance(value, set | frozenset) else value
        return [_plain(item) for item in items]
    return str(value)


def write_csv(path: str | os.PathLike[str], columns: Mapping[str, Sequence[Any]]) -> Path:
    """Write columns of equal length as CSV with a header row, atomically. See `csv_text` for how cells are written."""
    return write_text(path, csv_text(columns))


def csv_text(columns: Mapping[str, Sequence[Any]]) -> str:
    """Columns as CSV text: a missing value (None, not-a-number) is an empty cell, a float its `repr`, a bool true or false.

    Raises ValueError when the columns differ in length.
    """
    lengths = {len(values) for values in columns.values()}
    if len(lengths) > 1:
        raise ValueError(f"columns differ in length: { {name: len(values) for name, values in columns.items()} }")
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*([_cell(value) for value in values] for values in columns.values()), strict=True))
    return stream.getvalue()


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return "" if math.isnan(value) else repr(value)
    return str(value)
