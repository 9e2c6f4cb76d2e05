"""The report's tables of requests: by prompt length, those that did not finish, and the slowest that did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .page_parts import html_table
from .report_format import MISSING, count, escape, number, plural, seconds
from .statistics import percentile

if TYPE_CHECKING:
    from .result import Result

CLASSES = ((0, 256), (256, 1024), (1024, 4096), (4096, 16384), (16384, 65536), (65536, None))
"""Prompt-length classes in tokens, half-open `[low, high)`."""
ROWS = 12
"""Rows of a table of requests."""
P99_NEEDS = 100
"""Values below which a 99th percentile is only the largest of them, and is not shown."""


def length_classes(result: Result) -> list[dict[str, Any]]:
    """Finished requests by prompt length: name, counts, and p50, p90, p99 of TTFT, TPOT and E2EL in seconds (None: too few)."""
    columns = result.request_columns
    lengths = np.asarray(columns["input_tokens"], dtype=np.float64)
    finished = np.asarray([outcome == "finished" for outcome in columns["outcome"]], dtype=bool)
    preemptions = np.asarray(columns["preemptions"], dtype=np.float64)
    rows: list[dict[str, Any]] = []
    for low, high in CLASSES:
        inside = (lengths >= low) & (lengths < (np.inf if high is None else high))
        if not inside.any():
            continue
        name = f"{low:,} and more" if high is None else (f"below {high:,}" if low == 0 else f"{low:,} to {high - 1:,}")
        row: dict[str, Any] = {"name": name, "requests": int(inside.sum()), "finished": int((inside & finished).sum())}
        row["preemptions"] = float(np.nansum(preemptions[inside]))
        for metric in ("ttft", "tpot", "e2el"):
            values = np.asarray(columns[f"{metric}_s"], dtype=np.float64)[inside & finished]
            values = values[np.isfinite(values)]
            for q in (50, 90, 99):
                enough = values.size >= (P99_NEEDS if q == 99 else 1)
                row[f"{metric}_p{q}"] = percentile(values, q) if enough else None
        rows.append(row)
    return rows


def classes_html(classes: Sequence[Mapping[str, Any]]) -> str:
    """The table beside the figures of `length_classes`."""
    head = [
        "Prompt tokens",
        "Requests",
        "Finished",
        "Preemptions",
        "TTFT p50",
        "p90",
        "p99",
        "TPOT p50",
        "p90",
        "p99",
        "E2EL p50",
        "p99",
    ]
    body = [
        [row["name"], count(row["requests"]), count(row["finished"]), count(row["preemptions"])]
        + [seconds(row[f"{metric}_{q}"]) for metric in ("ttft", "tpot") for q in ("p50", "p90", "p99")]
        + [seconds(row["e2el_p50"]), seconds(row["e2el_p99"])]
        for row in classes
    ]
    return html_table(head, body)


def requests_html(result: Result) -> str:
    """Who had it worst: the requests that did not finish, with the reason, and the slowest of those that did."""
    columns = result.request_columns
    outcomes = list(columns["outcome"])
    parts: list[str] = []
    lost = [index for index, outcome in enumerate(outcomes) if outcome != "finished"]
    if lost:
        reasons = result.summary.get("rejected_by_reason") or {}
        by_reason = "; ".join(f"{reason}: {count(number_of)}" for reason, number_of in reasons.items() if number_of)
        worst = sorted(lost, key=lambda index: (_SEVERITY.get(outcomes[index], 0), index))[:ROWS]
        head = ["Request", "Outcome", "Reason", "Arrived", "Input", "Output", "Retry after"]
        body = [
            [columns["request_id"][index], str(outcomes[index]).replace("_", " "), columns["reason"][index] or MISSING,
             seconds(columns["arrival_s"][index]), count(columns["input_tokens"][index]), count(columns["output_tokens"][index]),
             seconds(columns["retry_after_s"][index])]
            for index in worst
        ]  # fmt: skip
        note = _shown(len(worst), len(lost)) + (f" Rejected by reason: {by_reason}." if by_reason else "")
        parts.append(
            f'<section class="card"><h2>Requests that did not finish</h2><p class="soft small">{escape(note)}</p>'
            f"{html_table(head, body, words=range(3), wrap=(2,))}</section>"
        )
    latency = np.asarray(columns["e2el_s"], dtype=np.float64)
    done = [index for index, outcome in enumerate(outcomes) if outcome == "finished" and np.isfinite(latency[index])]
    if done:
        slow = sorted(done, key=lambda index: (-latency[index], index))[:ROWS]
        head = [
            "Request",
            "Arrived",
            "Input",
            "Output",
            "Queue",
            "TTFT",
            "TPOT",
            "E2EL",
            "Preempted",
            "Recomputed",
            "Peak blocks",
        ]
        body = [
            [columns["request_id"][index], seconds(columns["arrival_s"][index]), count(columns["input_tokens"][index]),
             count(columns["output_tokens"][index]), seconds(_queue(columns, index)), seconds(columns["ttft_s"][index]),
             seconds(columns["tpot_s"][index]), seconds(columns["e2el_s"][index]), count(columns["preemptions"][index]),
             count(columns["recomputed_tokens"][index]), count(columns["peak_blocks"][index])]
            for index in slow
        ]  # fmt: skip
        parts.append(
            f'<section class="card"><h2>Slowest requests</h2><p class="soft small">By end-to-end latency. '
            f"{escape(_shown(len(slow), len(done)))}</p>{html_table(head, body)}</section>"
        )
    return "".join(parts)


_SEVERITY = {"failed": -4, "rejected": -3, "timed_out": -2, "aborted": -1}


def _queue(columns: Mapping[str, Sequence[Any]], index: int) -> float | None:
    scheduled = number(columns["scheduled_s"][index])
    return None if scheduled is None else scheduled - columns["arrival_s"][index]


def _shown(shown: int, of: int) -> str:
    return f"{plural(of, 'request')}." if shown == of else f"{count(shown)} of {plural(of, 'request')} shown."
