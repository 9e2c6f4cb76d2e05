"""Results of runs that never were, row by row; and what to leave out when two runs are compared."""

import io
from dataclasses import dataclass

from rich.console import Console

from sim.results.console import print_summary
from sim.results.result import MARK_COLUMNS, REQUEST_COLUMNS, TIMELINE_COLUMNS, Result

GIB = 2**30


@dataclass(frozen=True)
class Line:
    name: str
    bytes: int
    formula: str
    inside_budget: bool


@dataclass(frozen=True)
class Account:
    lines: tuple[Line, ...]


ACCOUNT = Account((
    Line("outside the budget", 6 * GIB, "(1 - 0.925) x 80 GiB", False),
    Line("weights", 15 * GIB, "8 G parameters x 2 bytes <b>", True),
    Line("KV pool", 59 * GIB, "rest", True),
))  # fmt: skip


def request(number, outcome="finished", **changes):
    row = dict.fromkeys(REQUEST_COLUMNS)
    row |= {
        "request_id": f"req-{number}", "arrival_s": 0.1 * number, "input_tokens": 100 * (number % 30 + 1), "output_tokens_requested": 50,
        "output_tokens": 50, "priority": 0, "outcome": outcome, "degraded": False, "prefix_hit_tokens": 0, "preemptions": 0,
        "recomputed_tokens": 0, "peak_blocks": 12, "kv_block_seconds": 3.5, "queued_s": 0.1 * number,
    }  # fmt: skip
    if outcome == "finished":
        arrival = row["arrival_s"]
        row |= {
            "finish_reason": "length",
            "scheduled_s": arrival + 0.01,
            "first_token_s": arrival + 0.05,
            "finished_s": arrival + 1.03,
        }
        row |= {"ttft_s": 0.05 + 1e-4 * number, "tpot_s": 0.02, "e2el_s": 1.03 + 1e-3 * number}
    return row | changes


def step(number, **changes):
    row = {
        "time_s": 0.1 * number, "duration_s": 0.1, "steps": 4, "running": 8, "waiting": 0, "used_blocks": 50, "used_blocks_end": 52,
        "cached_blocks": 20, "free_blocks": 30, "quarantined_blocks": 0, "prefill_tokens": 0, "decode_tokens": 32, "replica": 0,
    }  # fmt: skip
    return row | changes


def columns(rows, contract):
    return {name: [row[name] for row in rows] for name in contract}


SPREAD = {"mean": 0.06, "p50": 0.05, "p90": 0.09, "p95": 0.1, "p99": 0.12, "max": 0.2}


def make(requests=(), steps=(), marks=(), ledger=ACCOUNT, **summary):
    outcomes = [row["outcome"] for row in requests]
    known = {"num_requests": len(outcomes)}
    known |= {name: outcomes.count(name) for name in ("finished", "rejected", "aborted", "timed_out", "failed")}
    known |= {
        "num_gpu_blocks": 100,
        "block_size": 16,
        "engine_steps": 4 * len(steps),
        "simulated_time_s": 1.0,
        "wall_time_s": 0.25,
    }
    if known["finished"]:
        known |= dict.fromkeys(("ttft_s", "tpot_s", "itl_s", "e2el_s", "queue_s"), SPREAD)
    return Result(
        summary=known | {"warnings": []} | summary,
        request_columns=columns(requests, REQUEST_COLUMNS),
        timeline_columns=columns(steps, TIMELINE_COLUMNS),
        mark_columns=columns([dict(zip(MARK_COLUMNS, mark, strict=True)) for mark in marks], MARK_COLUMNS),
        ledger=ledger,
        provenance={"kvtwin_version": "0.1.0", "scenario_hash": "9f3ab2", "date": "2026-01-05", "command": "kvtwin run --seed 0"},
        scenario={
            "model": {"model": "llama-3.1-8b"}, "gpu": {"gpu": "h100-sxm-80gb"},
            "engine": {"max_num_seqs": 8, "max_num_batched_tokens": 64},
            "workload": {"trace": "a/b/[red]chat.csv"}, "slo": {"ttft_p99": 0.06}, "run": {"seed": 0},
        },
    )  # fmt: skip


def good():
    return make([request(n) for n in range(40)], [step(n) for n in range(40)])


def printed(result, width=80):
    stream = io.StringIO()
    print_summary(result, Console(file=stream, width=width))
    return stream.getvalue()


def without_clock(summary: dict[str, object]) -> dict[str, object]:
    """A summary without what a clock on the wall says."""
    return {key: value for key, value in summary.items() if key not in ("wall_time_s", "core_time_s")}
