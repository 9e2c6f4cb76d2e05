"""A trace file as text with positions: opening it, and saying where something is wrong.

Knows nothing about any format. Every failure that a user's file can cause is a `TraceError`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from sim.workload.errors import TraceError

HEAD_BYTES = 65_536
LONGEST_QUOTE = 80


def quoted(value: object) -> str:
    """A value as an error message shows it: on one line, shortened."""
    text = repr(value)
    return text if len(text) <= LONGEST_QUOTE else text[: LONGEST_QUOTE - 3] + "..."


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFile:
    """A readable, non-empty UTF-8 file."""

    path: Path
    """As the user gave it."""

    @classmethod
    def open(cls, path: str | Path) -> TextFile:
        """Check that the path is a readable text file.

        Raises: TraceError for a missing file, a folder, an unreadable, empty or binary file.
        """
        file = cls(path=Path(path))
        try:
            if file.path.is_dir():
                raise TraceError(f"{path}: found a folder; expected a trace file")
            if not file.path.exists():
                raise TraceError(f"{path}: no such file; expected a trace file")
            with file.path.open("rb") as binary:
                head = binary.read(HEAD_BYTES)
        except (OSError, ValueError) as error:
            if isinstance(error, TraceError):
                raise
            raise TraceError(
                f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}); expected a readable trace file"
            ) from None
        if not head.strip(b"\xef\xbb\xbf \t\r\n"):
            raise TraceError(f"{path}: found an empty file; expected a trace with at least one request")
        if b"\0" in head:
            raise TraceError(
                f"{path}: found binary data (a zero byte at offset {head.index(0)}); expected a text file in UTF-8"
            )
        return file

    def lines(self) -> Iterator[tuple[int, str]]:
        """Line number from 1, and the line without its end.

        Raises: TraceError where a line is not UTF-8 or holds a zero byte.
        """
        with self.path.open("rb") as binary:
            for number, raw in enumerate(binary, start=1):
                if b"\0" in raw:
                    self.fail(
                        number, None, f"binary data (a zero byte at byte {raw.index(0)} of the line)", "text in UTF-8"
                    )
                try:
                    text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    self.fail(number, None, f"byte 0x{raw[error.start]:02x} at position {error.start}", "text in UTF-8")
                yield number, text.rstrip("\r\n")

    def fail(self, line: int | None, column: str | None, found: str, expected: str) -> NoReturn:
        """Raise the one message about this file: file, line, column, what was found, what was expected."""
        where = f"{self.path}" if line is None else f"{self.path}:{line}"
        what = "" if column is None else f"column {column!r}: "
        raise TraceError(f"{where}: {what}found {found}; expected {expected}")

    def tokens(self, line: int, column: str, value: object, *, least: int = 1) -> int:
        """A length in tokens: a whole number, at least `least`. Text such as `374` or `374.0` is accepted.

        Raises: TraceError for anything else.
        """
        expected = f"a whole number of tokens, at least {least}"
        number: float = math.nan
        if isinstance(value, str):
            try:
                number = int(value)
            except ValueError:
                try:
                    number = float(value)
                except ValueError:
                    self.fail(line, column, quoted(value) if value.strip() else "nothing", expected)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            number = value
        else:
            self.fail(line, column, quoted(value), expected)
        if not math.isfinite(number) or number != int(number) or number < least:
            self.fail(line, column, quoted(value), expected)
        return int(number)

    def number(self, line: int, column: str, value: object, *, unit: str, least: float = -math.inf) -> float:
        """A finite number, at least `least`.

        Raises: TraceError for anything else.
        """
        expected = f"a finite number of {unit}" + ("" if least == -math.inf else f", at least {least:g}")
        number = math.nan
        if isinstance(value, str):
            try:
                number = float(value)
            except ValueError:
                self.fail(line, column, quoted(value) if value.strip() else "nothing", expected)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            try:
                number = float(value)
            except OverflowError:
                self.fail(line, column, quoted(value), expected)
        else:
            self.fail(line, column, quoted(value), expected)
        if not math.isfinite(number) or number < least:
            self.fail(line, column, quoted(value), expected)
        return number
