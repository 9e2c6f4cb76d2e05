"""The result file of `vllm bench serve --save-result --save-detailed`: its requests, offered again as they were sent.

Source: vLLM `benchmarks/serve.py`. Arrays are in seconds and exist only with `--save-detailed`.
"""

from __future__ import annotations

from typing import Any

from sim.workload.readers.source import TextFile, quoted
from sim.workload.readers.table import json_object
from sim.workload.trace import Record

NAME = "vLLM bench JSON"
COLUMNS = ("input_lens", "output_lens", "start_times")


def read(file: TextFile, limit: int | None) -> tuple[list[Record], list[str]]:
    """At most `limit` requests of the file, and notes. Raises: TraceError."""
    document = json_object(file, 1, "\n".join(text for _, text in file.lines()))
    arrays = {}
    for name in COLUMNS:
        array: Any = document.get(name)
        if array is None:
            file.fail(
                None,
                name,
                "no such array",
                f"{', '.join(COLUMNS)}: run `vllm bench serve` with --save-result and --save-detailed",
            )
        if not isinstance(array, list):
            file.fail(None, name, quoted(array), "an array, one value a request")
        arrays[name] = array
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        file.fail(None, None, f"arrays of different lengths {lengths}", "one value a request in each")
    errors = document.get("errors")
    if not (isinstance(errors, list) and len(errors) == lengths["input_lens"]):
        errors = [""] * lengths["input_lens"]
    records: list[Record] = []
    failed = 0
    for i, (tokens_in, tokens_out, start) in enumerate(zip(*arrays.values(), strict=True)):
        # A failed request has an error text, or no output at all.
        if errors[i] or tokens_out == 0:
            failed += 1
            continue
        records.append(
            Record(
                line=1,
                arrival_s=file.number(1, f"start_times[{i}]", start, unit="seconds"),
                input_tokens=file.tokens(1, f"input_lens[{i}]", tokens_in),
                output_tokens=file.tokens(1, f"output_lens[{i}]", tokens_out),
            )
        )
        if len(records) == limit:
            break
    return records, [f"{failed:,} failed requests dropped"] if failed else []
