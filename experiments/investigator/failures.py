"""The memory failures that are not PyTorch's own message: found in a text, with the numbers in it.

A failure says what happened in its own terms; what caused it is judged together with everything else that is known.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .failure_kinds import Kind
from .failure_kinds_device import DEVICE
from .failure_kinds_engines import ENGINES


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One occurrence."""

    kind: Kind
    line: int
    """From 1."""
    text: str
    """The matched text, shortened."""
    numbers: dict[str, float]
    """By name of the group."""


def read_failures(text: str) -> tuple[Failure, ...]:
    """Every known failure in `text`, by position; of repeats of one kind (ranks, restarts) the first."""
    found = {}
    for kind in (*ENGINES, *DEVICE):
        match = kind.pattern.search(text)
        if match and kind.name not in found:
            numbers = {
                key: float(value.replace(",", ""))
                for key, value in match.groupdict().items()
                if value and not key.startswith("_")
            }
            found[kind.name] = Failure(
                kind=kind,
                line=text.count("\n", 0, match.start()) + 1,
                text=" ".join(match[0].split())[:160],
                numbers=numbers | (_pool_books(text, match.start()) if kind.name == "pool books" else {}),
            )
    return tuple(sorted(found.values(), key=lambda failure: failure.line))


_BOOKS = {
    "total": r"(?:max_total_num_tokens|total|expected)[a-z_]*\D{0,6}(\d+)",
    "available": r"avail[a-z_]*\D{0,6}(\d+)",
    "evictable": r"evict[a-z_]*\D{0,6}(\d+)",
    "protected": r"protected[a-z_]*\D{0,6}(\d+)",
    "held": r"session_held[a-z_]*\D{0,6}(\d+)",
}


def _pool_books(text: str, start: int) -> dict[str, float]:
    window = text[start : start + 800]
    found = {name: re.search(pattern, window) for name, pattern in _BOOKS.items()}
    return {name: float(match[1]) for name, match in found.items() if match}
