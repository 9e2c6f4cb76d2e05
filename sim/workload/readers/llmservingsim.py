"""LLMServingSim files: `requests.jsonl` of a real run, and the `lengths.csv` of the workload that it was given.

`lengths.csv` says how many leading 16-token blocks of a prompt had been seen before, not whose they were. Content ids
are made that reproduce those counts with an unlimited cache: each hit borrows the beginning of an earlier request,
one whose whole prompt it is where there is one (so it is in the published files: 31 of 32 hits fit an earlier prompt).

Source: LLMServingSim 2 (KAIST CASYS), MIT.
"""

from __future__ import annotations

from sim.workload.readers.source import TextFile
from sim.workload.readers.table import csv_rows, json_rows
from sim.workload.trace import Record

REQUESTS_NAME = "llmservingsim requests.jsonl"
REQUESTS_COLUMNS = ("request_id", "input_toks", "output_toks", "arrival_time")
LENGTHS_NAME = "llmservingsim lengths.csv"
LENGTHS_COLUMNS = ("arrival_time_ns", "input_toks", "output_toks", "prefix_hit_blocks16")
BLOCK_TOKENS = 16


def read_requests(file: TextFile, limit: int | None) -> tuple[list[Record], list[str]]:
    """At most `limit` requests of a `requests.jsonl`, with the file's ids, and notes. Raises: TraceError."""
    records: list[Record] = []
    for line, row in json_rows(file, REQUESTS_COLUMNS):
        records.append(
            Record(
                line=line,
                arrival_s=file.number(line, "arrival_time", row["arrival_time"], unit="seconds"),
                input_tokens=file.tokens(line, "input_toks", row["input_toks"]),
                output_tokens=file.tokens(line, "output_toks", row["output_toks"]),
                request_id=str(row["request_id"]),
            )
        )
        if len(records) == limit:
            break
    return records, [
        "requests.jsonl holds no content ids: prompts are taken to share nothing (the workload's lengths.csv has them)"
    ]


def read_lengths(file: TextFile, limit: int | None) -> tuple[list[Record], list[str]]:
    """At most `limit` requests of a `lengths.csv`, with content ids that reproduce its prefix hits, and notes. Raises: TraceError."""
    rows: list[tuple[int, float, int, int, int]] = []
    for line, (arrival, tokens_in, tokens_out, hits) in csv_rows(file, LENGTHS_COLUMNS):
        rows.append(
            (
                line,
                file.number(line, "arrival_time_ns", arrival, unit="nanoseconds", least=0) / 1e9,
                file.tokens(line, "input_toks", tokens_in),
                file.tokens(line, "output_toks", tokens_out),
                file.tokens(line, "prefix_hit_blocks16", hits, least=0),
            )
        )
        input_tokens, hit_blocks = rows[-1][2], rows[-1][4]
        if hit_blocks * BLOCK_TOKENS > input_tokens:
            most = input_tokens // BLOCK_TOKENS
            file.fail(
                line,
                "prefix_hit_blocks16",
                str(hit_blocks),
                f"at most {most}, the whole blocks of {input_tokens} prompt tokens",
            )
        if len(rows) == limit:
            break
    # Hits are defined by what came before, so the order of time decides, not the order of lines.
    rows.sort(key=lambda row: row[1])
    records: list[Record] = []
    chains: list[tuple[int, ...]] = []
    prompt_blocks: list[int] = []
    next_id = short = hit_requests = 0
    for line, arrival_s, input_tokens, output_tokens, hit_blocks in rows:
        parent = _parent(chains, prompt_blocks, hit_blocks)
        shared = chains[parent][:hit_blocks] if parent is not None else ()
        short += hit_blocks - len(shared)
        hit_requests += hit_blocks > 0
        # Ids run on past the prompt: they name the blocks of the output too, which a long follow-up turn can hit.
        fresh = (input_tokens + output_tokens) // BLOCK_TOKENS - len(shared)
        chains.append(shared + tuple(range(next_id, next_id + fresh)))
        prompt_blocks.append(input_tokens // BLOCK_TOKENS)
        next_id += fresh
        records.append(
            Record(
                line=line,
                arrival_s=arrival_s,
                input_tokens=input_tokens,
                output_tokens=output_tokens,
                content_ids=chains[-1],
                content_block_tokens=BLOCK_TOKENS,
            )
        )
    if not hit_requests:
        return records, []
    notes = [
        f"{hit_requests:,} requests were given content ids that reproduce their recorded prefix hits (whose prefix it was is not recorded)"
    ]
    if short:
        notes.append(f"{short:,} recorded hit blocks could not be reproduced: no earlier request was long enough")
    return records, notes


def _parent(chains: list[tuple[int, ...]], prompt_blocks: list[int], hit_blocks: int) -> int | None:
    """The earlier request to borrow `hit_blocks` from.

    The one whose prompt is just long enough, or else whose prompt and output are, or else the longest; of equals the latest.
    """
    if hit_blocks == 0 or not chains:
        return None
    return min(
        range(len(chains)),
        key=lambda i: (
            -min(len(chains[i]), hit_blocks),
            prompt_blocks[i] < hit_blocks,
            abs(prompt_blocks[i] - hit_blocks),
            -i,
        ),
    )
