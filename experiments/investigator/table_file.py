"""CSV tables with units in their column names: reading one, and saying where it is wrong."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import DiagnoseError
from .sizes import GIB, KIB, MIB

BYTE_UNITS = {"_bytes": 1, "_b": 1, "_kib": KIB, "_mib": MIB, "_gib": GIB}
"""Endings of columns that hold memory."""
TIME_UNITS = {"_s": 1.0, "_ms": 1e-3, "_us": 1e-6}
"""Endings of columns that hold time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A header and its rows, still text."""

    name: str
    """The file, for messages."""
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def has(self, *columns: str) -> bool:
        """True when all of `columns` are there."""
        return set(columns) <= set(self.header)

    def text(self, column: str) -> list[str]:
        """A column as it is; empty cells where it is absent."""
        if column not in self.header:
            return [""] * len(self.rows)
        at = self.header.index(column)
        return [row[at].strip() for row in self.rows]

    def numbers(self, column: str, scale: float = 1.0) -> list[float]:
        """A column as numbers times `scale`; an empty cell is not-a-number.

        Raises DiagnoseError naming file, line and column where a cell is no number.
        """
        values = []
        for line, cell in enumerate(self.text(column), start=2):
            try:
                value = float(cell) if cell else math.nan
            except ValueError:
                raise DiagnoseError(
                    f"{self.name}:{line}: column {column!r} has {cell!r}; a number was expected"
                ) from None
            if math.isinf(value):
                raise DiagnoseError(f"{self.name}:{line}: column {column!r} is infinite; a finite number was expected")
            values.append(value * scale)
        return values

    def counts(self, column: str) -> list[float]:
        """A column of things counted; an empty cell is not-a-number.

        Raises DiagnoseError as `numbers` does, and where a cell is negative.
        """
        values = self.numbers(column)
        for line, value in enumerate(values, start=2):
            if value < 0:
                raise DiagnoseError(
                    f"{self.name}:{line}: column {column!r} is {value:g}; a count of 0 or more was expected"
                )
        return values

    def quantity(self, stem: str, units: Mapping[str, float]) -> list[float] | None:
        """The column `stem` + a unit of `units`, in base units; None when there is none.

        Raises DiagnoseError when the column is there without its unit.
        """
        for ending, scale in units.items():
            if stem + ending in self.header:
                return self.numbers(stem + ending, float(scale))
        if stem in self.header:
            endings = ", ".join(stem + ending for ending in units)
            raise DiagnoseError(f"{self.name}: column {stem!r} has no unit; name it one of {endings}")
        return None


def read_table(name: str, text: str) -> Table | None:
    """`text` as a table; None when it is none: no header of at least two plain names, or rows of another width.

    Raises DiagnoseError for a table that is broken in the middle (a last row that was cut off is dropped).
    """
    try:
        lines = list(csv.reader(io.StringIO(text)))
    except csv.Error:  # a cell longer than any table's, behind a quotation mark that is never closed
        return None
    lines = [line for line in lines if any(cell.strip() for cell in line)]
    if not lines:
        return None
    header = tuple(cell.strip().lower().lstrip("\ufeff") for cell in lines[0])
    plain = all(cell and cell.replace("_", "").replace("-", "").isalnum() and not cell[0].isdigit() for cell in header)
    if len(header) < 2 or not plain:
        return None
    rows = [tuple(line) for line in lines[1:]]
    if rows and len(rows[-1]) != len(header):
        rows = rows[:-1]
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise DiagnoseError(f"{name}:{number}: {len(row)} cells; the header has {len(header)} columns")
    return Table(name=name, header=header, rows=tuple(rows))
