"""The comparison as text for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .terminal import number

_HEADS = ("metric", "baseline", "candidate", "difference", "95 % interval", "verdict")


def as_text(document: Mapping[str, Any]) -> str:
    """One table a candidate: metric, both means, the difference with its interval, the verdict."""
    count = document["replications"]
    runs = "one run each" if count == 1 else f"{count} replications on the same requests"
    lines: list[str] = []
    for candidate in document["candidates"]:
        rows = [row for row in document["metrics"] if row["scenario"] == candidate]
        cells = [_HEADS, *(_cells(row) for row in rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(_HEADS))]
        lines += [f"{candidate} against {document['baseline']}: {runs}", ""]
        lines += [
            "  "
            + "  ".join(
                _aligned(cell, width, column) for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in cells
        ]
        lines.append("")
    if document["correlation"] is not None:
        lines.append(
            f"correlation of {document['correlation_of']} between the scenarios: {document['correlation']:.3f}"
        )
    lines += [f"note: {note}" for note in document["notes"]]
    return "\n".join(lines).rstrip()


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    relative = f" ({row['difference'] / row['baseline']:+.1%})" if row["baseline"] else ""
    interval = "–" if row["low"] is None else f"[{number(row['low'])}, {number(row['high'])}]"
    return (
        row["name"],
        number(row["baseline"]),
        number(row["candidate"]),
        number(row["difference"]) + relative,
        interval,
        row["verdict"],
    )


def _aligned(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column in (0, len(_HEADS) - 1) else cell.rjust(width)
