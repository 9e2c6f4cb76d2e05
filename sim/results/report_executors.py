"""The report's card of what really ran: kernels by operation, fallbacks, graphs, and the operation that held the memory peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .page_parts import Markup, html_table
from .report_format import count, escape, gib, plural

_MOST_ROWS = 12
"""Operations of a followed step that are shown: those with the most live bytes."""


def on_cpu(summary: Mapping[str, Any]) -> bool:
    """Whether a run was carried out for real, on the CPU."""
    return any(executor["device"] == "cpu" for executor in summary.get("executors") or ())


def executors_html(summary: Mapping[str, Any]) -> str:
    """One card an executor; empty for a simulation."""
    executors: Sequence[Mapping[str, Any]] = summary.get("executors") or ()
    again = sum(executor["steps"] for executor in executors) - summary.get("engine_steps", 0)
    cards = []
    for index, executor in enumerate(executors):
        title = "What ran" if len(executors) == 1 else f"What ran: replica {index}"
        parts = [
            _facts(executor, again if len(executors) == 1 else 0),
            _fallbacks(executor),
            _served(executor),
            _peak(executor.get("peak_by_op")),
        ]
        cards.append(f'<section class="card"><h2>{title}</h2>{"".join(parts)}</section>')
    return "".join(cards)


def _facts(executor: Mapping[str, Any], again: int) -> str:
    """What it did in words; `again` are steps that were run and did not count."""
    sizes, blocks = executor["bytes"], executor["blocks"]
    sentences = [
        f"{count(executor['steps'])} steps on {executor['device']}, {count(executor['oom_steps'])} of them out of memory, "
        f"{count(executor['split_steps'])} in several passes",
        f"weights {gib(sizes['weights'])}, KV pool {gib(sizes['kv_cache'])}, workspace {gib(sizes['workspace'])} "
        f"(used {gib(sizes['workspace_high_water'])} at the most), input and output of steps {gib(sizes['buffers'])}, through "
        f"{gib(sizes['staging'])} of the host's memory",
        f"in the end {plural(blocks['allocated'], 'block')} held, {plural(blocks['quarantined'], 'block')} in quarantine",
    ]
    if again > 0:
        sentences.append(f"{plural(again, 'step')} did not count: an arrival cut the stretch, and the work came again")
    graphs = executor.get("graphs")
    if graphs is None:
        sentences.append("no captured decode batches: every step was eager")
    else:
        replayed, eager = sum(graphs["replays"].values()), graphs["eager_steps"]
        why = "; ".join(f"{count(steps)}: {reason}" for reason, steps in eager.items())
        sentences.append(f"{plural(replayed, 'step')} by captured batches, others eager ({why or 'none'})")
    nvml = executor.get("nvml") or {}
    if "absent" in nvml:
        sentences.append(f"NVML not read: {nvml['absent']}")
    told = ". ".join(sentence[:1].upper() + sentence[1:] for sentence in sentences)
    return f'<p class="soft small">{escape(told)}.</p>'


def _fallbacks(executor: Mapping[str, Any]) -> str:
    rows = [
        f"<b>{escape(entry['operation'])}</b> fell back to {escape(entry['served'])} {count(entry['calls'])} times: "
        f"{escape(entry['reason'])}"
        for entry in executor["fallbacks"]
    ]
    return (
        f'<p style="color:var(--bad)">{"<br>".join(rows)}</p>'
        if rows
        else '<p class="small">No operation fell back.</p>'
    )


def _served(executor: Mapping[str, Any]) -> str:
    rows = [
        (operation, implementation, count(calls))
        for operation, by in executor["served"].items()
        for implementation, calls in by.items()
    ]
    return html_table(("Operation", "Served by", "Calls"), rows, words=range(2))


def _peak(document: Mapping[str, Any] | None) -> str:
    if document is None:
        return ""
    widest = sorted(document["operations"], key=lambda row: -row["live_bytes"])[:_MOST_ROWS]
    head = ("Operation", "Served by", "Into", "Live bytes", "Ledger: its line", "Ledger: its phase")
    title = f"Memory peak of step {count(document['step'])}"
    return (
        f'<h3 style="margin-top:1rem">{title}</h3><p class="soft small">{escape(document["answer"])}</p>'
        f"{html_table(head, [_operation_row(row) for row in widest], words=range(3))}"
    )


def _operation_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    name = row["operation"]
    return (
        Markup(f"<b>{escape(name)}</b>") if row["is_peak"] else name,
        row["served_by"] + (" (fallback)" if row["fallback"] else ""),
        row["into"],
        count(row["live_bytes"]),
        _or_dash(row["predicted_bytes"]),
        _or_dash(row["predicted_phase_bytes"]),
    )


def _or_dash(value: int | None) -> str:
    return "–" if value is None else count(value)
