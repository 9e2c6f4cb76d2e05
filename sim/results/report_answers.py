"""The answers a run gives, before any figure: did it keep up, and what limited it.

Read from the summary and the timeline alone, so that the terminal and the HTML report always say the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..core.config import EngineConfig
from .report_format import count, number, plural, seconds, share, statistic

if TYPE_CHECKING:
    from .result import Result

SELDOM = 0.01
"""Below this share of the busy time with a queue, nothing is called a limit."""
FULL = 0.98
"""A step that uses this share of a budget has used it up: what is left is smaller than a useful chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the run says about the engine under this load."""

    status: str
    """`good` (kept up), `strained` (kept up, with preemptions, missed objectives or clients lost) or `bad`."""
    verdict: str
    """Two to five words."""
    headline: str
    """The evidence, as sentences."""
    limit: str
    """`KV blocks`, `sequences`, `token budget`, `admission`, `step memory` or `nothing`."""
    limit_detail: str
    """How that was seen, as a sentence."""

    @property
    def limit_title(self) -> str:
        """The limit as two or three words of a title."""
        return "No limit was met" if self.limit == "nothing" else f"Limited by {self.limit}"


def answer(result: Result) -> Answer:
    """The answers of a run, whatever happened in it."""
    summary = result.summary
    total, finished = _count(summary, "num_requests"), _count(summary, "finished")
    limit, detail = binding_limit(result)
    if limit in ("nothing", "admission") and _count(summary, "oom_events"):
        limit, detail = "step memory", f"{plural(_count(summary, 'oom_events'), 'step')} ran out of memory. {detail}"
    lost = {name: _count(summary, name) for name in ("rejected", "timed_out", "failed")}
    unsteady = any("steady state" in str(warning) for warning in summary.get("warnings") or ())
    preemptions = _count(summary, "num_preemptions")
    attainment = number(summary.get("slo_attainment"))
    if total == 0:
        status, verdict = "bad", "Nothing to serve"
    elif finished == 0 or unsteady or lost["failed"] or _count(summary, "oom_events"):
        status, verdict = "bad", "Did not keep up"
    elif lost["rejected"] + lost["timed_out"] > 0.01 * total:
        status, verdict = (
            "bad",
            "Turned requests away" if lost["rejected"] >= lost["timed_out"] else "Clients gave up waiting",
        )
    elif attainment is not None and attainment < 0.99:
        status, verdict = "strained", "Kept up, but missed its objectives"
    elif preemptions:
        status, verdict = "strained", "Kept up, under memory pressure"
    else:
        status, verdict = ("strained", "Kept up, with losses") if any(lost.values()) else ("good", "Kept up")
    return Answer(
        status=status,
        verdict=verdict,
        headline=_headline(summary, total, finished, unsteady),
        limit=limit,
        limit_detail=detail,
    )


def _headline(summary: Mapping[str, Any], total: int, finished: int, unsteady: bool) -> str:
    if total == 0:
        return "No request arrived."
    if finished == total:
        served = "The only request finished." if total == 1 else f"All {count(total)} requests finished."
    else:
        ends = [
            f"{count(_count(summary, key))} {words}"
            for key, words in (
                ("rejected", "rejected"),
                ("timed_out", "timed out"),
                ("aborted", "cancelled by the client"),
                ("failed", "failed"),
            )
            if _count(summary, key)
        ]
        served = f"{count(finished)} of {plural(total, 'request')} finished" + (
            f" ({', '.join(ends)})." if ends else "."
        )
    sentences = [served]
    half, slow = statistic(summary, "ttft_s", "p50"), statistic(summary, "ttft_s", "p99")
    if half is not None and slow is not None and finished > 1:
        whose = "Half" if finished == total else "Of those, half"
        sentences.append(f"{whose} had their first token within {seconds(half)}, 99 % within {seconds(slow)}.")
    if unsteady:
        sentences.append("The queue kept growing while requests arrived: there is no steady state at this rate.")
    preemptions = _count(summary, "num_preemptions")
    if preemptions:
        computed = _count(summary, "input_tokens") + _count(summary, "output_tokens")
        recomputed = _count(summary, "recomputed_tokens")
        again = f", which cost {share(recomputed / computed)} of all tokens again" if computed and recomputed else ""
        sentences.append(f"{plural(preemptions, 'preemption')}{again}.")
    attainment = number(summary.get("slo_attainment"))
    if attainment is not None:
        sentences.append(f"{share(attainment)} of requests met the objectives.")
    return " ".join(sentences)


def binding_limit(result: Result) -> tuple[str, str]:
    """What kept requests waiting, and how that was seen, from the time-weighted timeline.

    An interval with a queue is put down to the first of these that it shows: every sequence slot taken, the token budget of the step
    used up, the KV pool at least half used or a preemption in the run; what is left is the admission rule.
    """
    table = timeline_arrays(result)
    duration, waiting = table["duration_s"], _left_waiting(result, table)
    busy = float(duration.sum())
    queued = float(duration[waiting].sum())
    if busy == 0:
        return "nothing", "The engine never ran."
    if queued < SELDOM * busy:
        return "nothing", f"Requests were left in the queue during {share(queued / busy)} of the busy time."
    tokens = (table["prefill_tokens"] + table["decode_tokens"]) / np.maximum(table["steps"], 1)
    pool = np.maximum(
        table["used_blocks"] + table["cached_blocks"] + table["free_blocks"] + table["quarantined_blocks"], 1
    )
    used = np.maximum(table["used_blocks"], table["used_blocks_end"]) / pool
    seqs = table["running"] >= engine_setting(result.scenario, "max_num_seqs")
    budget = ~seqs & (tokens >= FULL * engine_setting(result.scenario, "max_num_batched_tokens"))
    pressed = bool(_count(result.summary, "num_preemptions"))
    blocks = ~seqs & ~budget & ((used >= 0.5) | pressed)
    shares = {
        "sequences": float(duration[waiting & seqs].sum()) / queued,
        "token budget": float(duration[waiting & budget].sum()) / queued,
        "KV blocks": float(duration[waiting & blocks].sum()) / queued,
    }
    shares["admission"] = max(0.0, 1.0 - sum(shares.values()))
    limit = max(shares, key=lambda name: shares[name])
    reason = {
        "sequences": f"all {count(engine_setting(result.scenario, 'max_num_seqs'))} sequence slots (max_num_seqs) were taken",
        "token budget": (
            f"the step's {count(engine_setting(result.scenario, 'max_num_batched_tokens'))} tokens (max_num_batched_tokens) were "
            "used up, so prompts waited for compute"
        ),
        "KV blocks": "the KV pool had no room for the next request",
        "admission": "the next request was held back although slots, tokens and blocks were left",
    }[limit]
    return (
        limit,
        f"Requests were left in the queue during {share(queued / busy)} of the busy time; in {share(shares[limit])} of that, {reason}.",
    )


def _left_waiting(result: Result, table: Mapping[str, npt.NDArray[np.float64]]) -> npt.NDArray[np.bool_]:
    """Rows `[rows]` in which the engine left requests in the queue, not merely met some that came while a step ran.

    `waiting` may count requests that arrive within the row. Those of the row are taken off, for one replica exactly; where
    several share the arrivals, three times a replica's share and one more, which rather misses a queue than invents one.
    """
    arrivals = np.sort(np.asarray(result.request_columns["arrival_s"], dtype=np.float64))
    start, end = table["time_s"], table["time_s"] + table["duration_s"]
    came = np.searchsorted(arrivals, end, side="right") - np.searchsorted(arrivals, start, side="right")
    replicas = np.unique(table["replica"]).size
    if replicas > 1:
        came = np.minimum(came, 1 + 3 * came / replicas)
    left: npt.NDArray[np.bool_] = table["waiting"] > came
    return left


def engine_setting(scenario: Mapping[str, Any], name: str) -> int:
    """An engine setting of a scenario, or the engine's default where the scenario leaves it open."""
    table = scenario.get("engine")
    value = number(table.get(name)) if isinstance(table, Mapping) else None
    if value is None:
        value = number({field.name: field.default for field in fields(EngineConfig)}[name])
    return int(value or 0)


def timeline_arrays(result: Result) -> dict[str, npt.NDArray[np.float64]]:
    """The timeline's columns as float arrays `[rows]`."""
    return {name: np.asarray(values, dtype=np.float64) for name, values in result.timeline_columns.items()}


def _count(summary: Mapping[str, Any], name: str) -> int:
    return int(number(summary.get(name)) or 0)
