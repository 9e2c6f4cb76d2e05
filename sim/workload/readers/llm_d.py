"""llm-d-benchmark CSV: one row a request of a real run, arrivals in `launch_time`.

Source: llm-d-benchmark, Apache-2.0. Rows with `ttft <= 0` are failed requests.
"""

from __future__ import annotations

from sim.workload.readers.source import TextFile
from sim.workload.readers.table import csv_rows
from sim.workload.trace import Record

NAME = "llm-d CSV"
COLUMNS = ("prompt_tokens", "generation_tokens", "ttft", "launch_time")


def read(file: TextFile, limit: int | None) -> tuple[list[Record], list[str]]:
    """At most `limit` requests of the file, and notes. Raises: TraceError."""
    records: list[Record] = []
    failed = 0
    for line, (prompt, generation, ttft, launch) in csv_rows(file, COLUMNS):
        if file.number(line, "ttft", ttft, unit="seconds") <= 0:
            failed += 1
            continue
        records.append(
            Record(
                line=line,
                arrival_s=file.number(line, "launch_time", launch, unit="seconds"),
                input_tokens=file.tokens(line, "prompt_tokens", prompt),
                output_tokens=file.tokens(line, "generation_tokens", generation),
            )
        )
        if len(records) == limit:
            break
    return records, [f"{failed:,} failed rows (ttft <= 0) dropped"] if failed else []
