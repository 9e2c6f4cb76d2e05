"""Mooncake JSON Lines: one request a line with the hash ids of its prompt's blocks.

The file does not say how many tokens a hash id stands for (512 in the published traces, 16 in traces made for
engines with 16-token blocks); it is inferred from all rows together.

Source: Mooncake, FAST 2025, `FAST25-release/traces`, Apache-2.0; also written by vLLM's timed traces and by aiperf.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sim.workload.readers.source import TextFile, quoted
from sim.workload.readers.table import json_rows
from sim.workload.trace import Record

NAME = "Mooncake JSONL"
COLUMNS = ("timestamp", "input_length", "output_length")
BLOCK_TOKENS = (512, 16)
"""Block sizes that are tried, in this order."""


def read(file: TextFile, limit: int | None) -> tuple[list[Record], list[str]]:
    """At most `limit` requests of the file, and notes. Raises: TraceError."""
    records: list[Record] = []
    for line, row in json_rows(file, COLUMNS):
        records.append(
            Record(
                line=line,
                arrival_s=file.number(line, "timestamp", row["timestamp"], unit="milliseconds", least=0) / 1e3,
                input_tokens=file.tokens(line, "input_length", row["input_length"]),
                output_tokens=file.tokens(line, "output_length", row["output_length"]),
                content_ids=_ids(file, line, row.get("hash_ids", [])),
            )
        )
        if len(records) == limit:
            break
    if not any(record.content_ids for record in records):
        return records, ["no row has hash_ids: prompts are taken to share nothing"]
    block_tokens = _block_tokens(file, records)
    records = [
        replace(record, content_block_tokens=block_tokens) if record.content_ids else record for record in records
    ]
    return records, [f"one hash id stands for {block_tokens} tokens (inferred from hash_ids and input_length)"]


def _ids(file: TextFile, line: int, ids: Any) -> tuple[int | str, ...]:
    if not isinstance(ids, list):
        file.fail(line, "hash_ids", quoted(ids), "a list of ids")
    if not {int, str}.issuperset(map(type, ids)):
        wrong = next(one for one in ids if type(one) not in (int, str))
        file.fail(line, "hash_ids", quoted(wrong), "integers or strings")
    return tuple(ids)


def _fits(record: Record, block_tokens: int) -> bool:
    # Rounded up in the published files; a vendor's page says rounded down, and files made after it exist.
    return len(record.content_ids) in (-(-record.input_tokens // block_tokens), record.input_tokens // block_tokens)


def _block_tokens(file: TextFile, records: list[Record]) -> int:
    misfits = []
    for block_tokens in BLOCK_TOKENS:
        misfit = next((record for record in records if not _fits(record, block_tokens)), None)
        if misfit is None:
            return block_tokens
        misfits.append(misfit)
    # The row to blame is the one that broke the reading which had held longest.
    blame = max(misfits, key=lambda record: record.line)
    expected = " or ".join(f"{-(-blame.input_tokens // tokens)} ({tokens}-token blocks)" for tokens in BLOCK_TOKENS)
    file.fail(
        blame.line,
        "hash_ids",
        f"{len(blame.content_ids)} ids for input_length {blame.input_tokens}",
        f"{expected}, the same on every row",
    )
