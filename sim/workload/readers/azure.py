"""Azure LLM inference traces: the hour of 2023 and the week of 2024, conversation and code.

Source: Azure Public Dataset, `AzureLLMInferenceTrace_{conv,code}.csv` (Splitwise, ISCA 2024) and
`AzureLLMInferenceTrace_{conv,code}_1week.csv` (DynamoLLM, HPCA 2025), CC-BY-4.0.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime

from sim.workload.readers.source import TextFile, quoted
from sim.workload.readers.table import csv_rows
from sim.workload.trace import Record

NAME = "Azure CSV"
COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

_STAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?")


def read(file: TextFile, limit: int | None) -> tuple[list[Record], list[str]]:
    """At most `limit` requests of the file, and notes. Raises: TraceError."""
    records: list[Record] = []
    epoch_s: dict[tuple[str, str | None], float] = {}
    origin_s: float | None = None
    for line, (stamp, context, generated) in csv_rows(file, COLUMNS):
        match = _STAMP.fullmatch(stamp)
        if match is None:
            file.fail(line, "TIMESTAMP", quoted(stamp), "a time such as 2023-11-16 18:15:46.6805900")
        second, fraction, zone = match.groups()
        if (second, zone) not in epoch_s:
            try:
                moment = datetime.fromisoformat(second + (zone or ""))
            except ValueError as error:
                file.fail(line, "TIMESTAMP", f"{quoted(stamp)} ({error})", "a time such as 2023-11-16 18:15:46.6805900")
            epoch_s[second, zone] = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        # Times are taken from the first row's second, so that the recorded 100 ns survive in floating point.
        if origin_s is None:
            origin_s = epoch_s[second, zone]
        records.append(
            Record(
                line=line,
                arrival_s=epoch_s[second, zone] - origin_s + float(f"0.{fraction or 0}"),
                input_tokens=file.tokens(line, "ContextTokens", context),
                output_tokens=file.tokens(line, "GeneratedTokens", generated),
            )
        )
        if len(records) == limit:
            break
    return records, []
