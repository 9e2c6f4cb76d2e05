"""BurstGPT CSV: ChatGPT and GPT-4 requests of a campus, time in seconds.

Source: BurstGPT, KDD 2025, `BurstGPT_*.csv`, CC-BY-4.0. Rows with 0 response tokens are failed requests.
"""

from __future__ import annotations

from sim.workload.readers.source import TextFile
from sim.workload.readers.table import csv_rows
from sim.workload.trace import Record

NAME = "BurstGPT CSV"
COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def read(file: TextFile, limit: int | None) -> tuple[list[Record], list[str]]:
    """At most `limit` requests of the file, and notes. Raises: TraceError."""
    records: list[Record] = []
    failed = 0
    for line, (stamp, request, response) in csv_rows(file, COLUMNS):
        output_tokens = file.tokens(line, "Response tokens", response, least=0)
        if output_tokens == 0:
            failed += 1
            continue
        records.append(
            Record(
                line=line,
                arrival_s=file.number(line, "Timestamp", stamp, unit="seconds", least=0),
                input_tokens=file.tokens(line, "Request tokens", request),
                output_tokens=output_tokens,
            )
        )
        if len(records) == limit:
            break
    return records, [f"{failed:,} failed rows (0 response tokens) dropped"] if failed else []
