"""Rows of a CSV file by column name, and objects of a JSON Lines file, each with its line number."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from typing import Any

from sim.workload.errors import did_you_mean
from sim.workload.readers.source import TextFile, quoted


def header(file: TextFile) -> tuple[int, list[str]]:
    """Line number and column names of the first line that is not blank."""
    for number, text in file.lines():
        if text.strip():
            return number, [cell.strip() for cell in _cells(file, number, text)]
    file.fail(None, None, "only blank lines", "a header and rows")


def csv_rows(file: TextFile, required: Sequence[str], optional: Sequence[str] = ()) -> Iterator[tuple[int, list[str]]]:
    """Line number and the cells of the required, then the optional columns, of each row; an absent optional column gives `""`.

    Blank lines are skipped. Raises: TraceError when a required column is missing (naming the nearest that exists),
    a column is there twice, or a row is shorter or longer than the header.
    """
    header_line, names = header(file)
    for name in required:
        if name not in names:
            file.fail(
                header_line,
                None,
                f"no column {name!r}{did_you_mean(name, names)}",
                f"the columns {', '.join(required)}",
            )
    for name in (*required, *optional):
        if names.count(name) > 1:
            file.fail(header_line, name, f"it {names.count(name)} times", "each column once")
    places = [names.index(name) if name in names else -1 for name in (*required, *optional)]
    # Line by line, so that a stray quote cannot swallow the rest of the file and errors keep their line.
    for number, text in file.lines():
        if number <= header_line or not text.strip():
            continue
        cells = _cells(file, number, text)
        if len(cells) != len(names):
            file.fail(number, None, f"{len(cells)} values in {quoted(text)}", f"{len(names)}, as in the header")
        yield number, [cells[place].strip() if place >= 0 else "" for place in places]


def _cells(file: TextFile, line: int, text: str) -> list[str]:
    """The values of one line. Raises: TraceError for quoting that does not end on the line."""
    if '"' not in text:
        return text.split(",")
    try:
        return next(csv.reader([text], strict=True))
    except csv.Error as error:
        file.fail(line, None, f"{quoted(text)} ({error})", "comma-separated values on one line")


def json_rows(file: TextFile, required: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and object of each line of a JSON Lines file. Blank lines are skipped.

    Raises: TraceError for a line that is not a JSON object, or lacks a required key (naming the nearest that exists).
    """
    for number, text in file.lines():
        if not text.strip():
            continue
        row = json_object(file, number, text)
        for name in required:
            if name not in row:
                file.fail(
                    number, None, f"no key {name!r}{did_you_mean(name, row)}", f"an object with {', '.join(required)}"
                )
        yield number, row


def json_object(file: TextFile, line: int, text: str) -> dict[str, Any]:
    """The JSON object in a text that starts on that line.

    Raises: TraceError with line and column where the JSON is malformed or is not an object.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        where = line + error.lineno - 1
        context = text.splitlines()[error.lineno - 1 : error.lineno] or [""]
        file.fail(
            where,
            None,
            f"malformed JSON at character {error.colno} ({error.msg}): {quoted(context[0])}",
            "a JSON object",
        )
    except (RecursionError, ValueError) as error:
        file.fail(line, None, f"JSON that cannot be read ({error})", "a JSON object")
    if not isinstance(value, dict):
        file.fail(line, None, quoted(value), "a JSON object")
    return value
