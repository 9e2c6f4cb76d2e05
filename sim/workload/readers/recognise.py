"""`read_trace`: recognise a trace format by what is in the file, never by its name, and read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sim.workload.errors import WorkloadError
from sim.workload.readers import azure, burstgpt, llm_d, llmservingsim, mooncake, requests_csv, vllm_bench
from sim.workload.readers.source import TextFile, quoted
from sim.workload.readers.table import header, json_object
from sim.workload.trace import Record, Trace, assemble

Reader = Callable[[TextFile, int | None], tuple[list[Record], list[str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A trace format that can be read."""

    name: str
    """As messages and results call it."""
    container: str
    """`csv`, `jsonl`, or `json`."""
    columns: tuple[str, ...]
    """Columns or keys that it must have."""
    signature: tuple[str, ...]
    """Columns or keys of which most are there in a file of this format, and in no other."""
    read: Reader
    """The reader."""
    may_have_ticks: bool = False
    """Whether recorders of this format round times to ticks."""


FORMATS = (
    Format(name=azure.NAME, container="csv", columns=azure.COLUMNS, signature=azure.COLUMNS, read=azure.read),
    Format(
        name=mooncake.NAME,
        container="jsonl",
        columns=(*mooncake.COLUMNS, "hash_ids"),
        signature=(*mooncake.COLUMNS, "hash_ids"),
        read=mooncake.read,
        may_have_ticks=True,
    ),
    Format(
        name=burstgpt.NAME,
        container="csv",
        columns=burstgpt.COLUMNS,
        signature=(*burstgpt.COLUMNS, "Total tokens"),
        read=burstgpt.read,
        may_have_ticks=True,
    ),
    Format(
        name=requests_csv.NAME,
        container="csv",
        columns=requests_csv.COLUMNS,
        signature=requests_csv.COLUMNS,
        read=requests_csv.read,
    ),
    Format(
        name=vllm_bench.NAME,
        container="json",
        columns=vllm_bench.COLUMNS,
        signature=("input_lens", "output_lens", "total_input_tokens", "request_throughput"),
        read=vllm_bench.read,
    ),
    Format(
        name=llmservingsim.REQUESTS_NAME,
        container="jsonl",
        columns=llmservingsim.REQUESTS_COLUMNS,
        signature=llmservingsim.REQUESTS_COLUMNS,
        read=llmservingsim.read_requests,
    ),
    Format(
        name=llmservingsim.LENGTHS_NAME,
        container="csv",
        columns=llmservingsim.LENGTHS_COLUMNS,
        signature=llmservingsim.LENGTHS_COLUMNS,
        read=llmservingsim.read_lengths,
    ),
    Format(name=llm_d.NAME, container="csv", columns=llm_d.COLUMNS, signature=llm_d.COLUMNS, read=llm_d.read),
)
"""Every format that `read_trace` knows."""


def read_trace(path: str | Path, *, seed: int = 0, spread_ticks: bool = True, max_requests: int | None = None) -> Trace:
    """Read a recorded workload; the format is recognised by content.

    Arrivals start at 0 with the first request and keep their distances. Times that a recorder rounded to ticks are
    spread uniformly inside the tick, drawn from the stream `ticks` of `seed` (`spread_ticks=False` replays them as
    recorded). `max_requests` stops reading after so many requests, for files of millions. What was dropped, sorted,
    inferred or spread is said in `Trace.notes`.

    Raises: TraceError with one message: file, line, column, what was found, what was expected.
    """
    if max_requests is not None and max_requests < 1:
        raise WorkloadError(f"max_requests is {max_requests}; it must be at least 1")
    file = TextFile.open(path)
    known = _recognise(file)
    records, notes = known.read(file, max_requests)
    trace = assemble(
        str(path),
        name=file.path.name,
        format_name=known.name,
        records=records,
        notes=notes,
        may_have_ticks=known.may_have_ticks,
    )
    return trace.with_ticks(spread=spread_ticks, seed=seed)


def _recognise(file: TextFile) -> Format:
    line, text = next(((number, text) for number, text in file.lines() if text.strip()), (1, ""))
    if not text.lstrip().startswith("{"):
        _, found = header(file)
        return _nearest(file, line, found, ("csv",), "a header")
    if text.strip() == "{":
        # One document over many lines: only the whole of it can be parsed.
        keys = list(json_object(file, 1, "\n".join(each for _, each in file.lines())))
        return _nearest(file, line, keys, ("json",), "an object")
    return _nearest(file, line, list(json_object(file, line, text)), ("jsonl", "json"), "an object")


def _nearest(file: TextFile, line: int, found: list[str], containers: tuple[str, ...], what: str) -> Format:
    """The format most of whose signature is there; its reader then names what is missing."""
    candidates = [known for known in FORMATS if known.container in containers]
    shares = [sum(name in found for name in known.signature) / len(known.signature) for known in candidates]
    best = max(range(len(candidates)), key=lambda i: shares[i])
    if shares[best] >= 0.5:
        return candidates[best]
    known_formats = "; ".join(f"{known.name} ({', '.join(known.columns)})" for known in FORMATS)
    file.fail(line, None, f"{what} with {quoted(', '.join(found))}", f"one of the formats {known_formats}")
