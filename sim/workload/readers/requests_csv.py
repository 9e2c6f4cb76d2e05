"""Our own `requests.csv`: the requests of an earlier run, offered again.

What a request asked for is read; what it got (outcome, times) is not. A rejected or aborted request is offered again too.
"""

from __future__ import annotations

from sim.workload.readers.source import TextFile, quoted
from sim.workload.readers.table import csv_rows, header
from sim.workload.trace import Record

NAME = "requests.csv"
COLUMNS = ("request_id", "arrival_s", "input_tokens", "output_tokens_requested")


def read(file: TextFile, limit: int | None) -> tuple[list[Record], list[str]]:
    """At most `limit` requests of the file, and notes. Raises: TraceError."""
    records: list[Record] = []
    notes = ["requests.csv holds no content ids: prompts are taken to share nothing"]
    for line, (request_id, arrival, tokens_in, tokens_out, priority) in csv_rows(file, COLUMNS, ("priority",)):
        if not request_id:
            file.fail(line, "request_id", "nothing", "an id")
        try:
            rank = int(priority or 0)
        except ValueError:
            file.fail(line, "priority", quoted(priority), "a whole number")
        records.append(
            Record(
                line=line,
                arrival_s=file.number(line, "arrival_s", arrival, unit="seconds", least=0),
                input_tokens=file.tokens(line, "input_tokens", tokens_in),
                output_tokens=file.tokens(line, "output_tokens_requested", tokens_out),
                request_id=request_id,
                priority=rank,
            )
        )
        if len(records) == limit:
            break
    if records and "priority" not in header(file)[1]:
        notes.append("no column 'priority': every request has priority 0")
    return records, notes
