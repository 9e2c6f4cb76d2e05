"""What the command prints: documents on stdout, progress and errors on stderr."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self


def print_json(document: Mapping[str, Any]) -> None:
    """One JSON document on stdout, and nothing else."""
    from sim.results.files import json_text

    sys.stdout.write(json_text(document))


def say(text: str) -> None:
    """One piece of text on stdout."""
    sys.stdout.write(text + "\n")


def complain(command: str, message: str) -> None:
    """One error message on stderr."""
    sys.stderr.write(f"{command}: {message}\n")


def number(value: float | None, digits: int = 4) -> str:
    """A number for a table: `digits` significant digits, thousands grouped, an absent one as a dash."""
    if value is None:
        return "–"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.{digits}g}" if abs(value) < 10**digits else f"{value:,.0f}"


class Progress:
    """One line on stderr that is rewritten as work goes on and cleared at the end; silent unless stderr is a terminal."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._shown = sys.stderr.isatty()

    def say(self, what: str) -> None:
        """Show where the work is."""
        if self._shown:
            sys.stderr.write(f"\r\x1b[2K{self._label}: {what}")
            sys.stderr.flush()

    def note(self, what: str) -> None:
        """One line that stays, on a terminal or not."""
        start = "\r\x1b[2K" if self._shown else ""
        sys.stderr.write(f"{start}{self._label}: {what}\n")
        sys.stderr.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
