"""A request log (`requests.csv`): how requests ended, how many ran at once, and how much of what was promised they used."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .table_file import Table

NEEDED = ("request_id", "arrival_s", "input_tokens", "output_tokens")
"""Columns by which a request log is recognised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLog:
    """Totals of one log."""

    name: str
    num_requests: int
    outcomes: dict[str, int]
    """Requests by outcome."""
    reasons: dict[str, int]
    """Requests that did not finish, by the first words of the reason."""
    max_running: int
    """Most requests that were scheduled at once."""
    waited: int
    """Requests that queued for more than a tenth of their time in the system."""
    input_tokens: int
    output_tokens: int
    requested_tokens: int
    """Output tokens asked for, 0 where that was not recorded."""
    largest_reservation: int
    """Input plus requested output of the greediest request."""
    largest_use: int
    """Input plus output of the longest request."""
    preemptions: int
    recomputed_tokens: int


def is_request_log(table: Table) -> bool:
    """True for a table with the columns of a request log."""
    return table.has(*NEEDED)


def read_request_log(table: Table) -> RequestLog:
    """The totals of `table`. Raises DiagnoseError where a cell is no number, or a count is negative."""
    inputs, outputs = _whole(table, "input_tokens"), _whole(table, "output_tokens")
    requested = _whole(table, "output_tokens_requested")
    outcomes: dict[str, int] = {}
    reasons: dict[str, int] = {}
    for outcome, reason in zip(table.text("outcome"), table.text("reason"), strict=True):
        outcomes[outcome or "unknown"] = outcomes.get(outcome or "unknown", 0) + 1
        if reason and outcome != "finished":
            key = " ".join("N" if word.strip(".,;()").isdigit() else word for word in reason.split()[:12])
            reasons[key] = reasons.get(key, 0) + 1
    return RequestLog(
        name=table.name,
        num_requests=len(table.rows),
        outcomes=outcomes,
        reasons=reasons,
        max_running=_most_at_once(table),
        waited=_waited(table),
        input_tokens=sum(inputs),
        output_tokens=sum(outputs),
        requested_tokens=sum(requested),
        largest_reservation=max((a + max(b, c) for a, b, c in zip(inputs, requested, outputs, strict=True)), default=0),
        largest_use=max((a + b for a, b in zip(inputs, outputs, strict=True)), default=0),
        preemptions=sum(_whole(table, "preemptions")),
        recomputed_tokens=sum(_whole(table, "recomputed_tokens")),
    )


def _whole(table: Table, column: str) -> list[int]:
    if column not in table.header:
        return [0] * len(table.rows)
    return [0 if math.isnan(value) else int(value) for value in table.counts(column)]


def _most_at_once(table: Table) -> int:
    if not table.has("scheduled_s", "finished_s"):
        return 0
    spans = [
        (start, end)
        for start, end in zip(table.numbers("scheduled_s"), table.numbers("finished_s"), strict=True)
        if not math.isnan(start) and not math.isnan(end)
    ]
    # An end frees its place before a start at the same moment takes one.
    events = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans], key=lambda event: event)
    most = now = 0
    for _, change in events:
        now += change
        most = max(most, now)
    return most


def _waited(table: Table) -> int:
    if not table.has("queued_s", "e2el_s"):
        return 0
    return sum(
        1
        for queued, total in zip(table.numbers("queued_s"), table.numbers("e2el_s"), strict=True)
        if not math.isnan(queued) and not math.isnan(total) and queued > 0.1 * total > 0
    )
