"""The summary of a run on a terminal: the answer, then the figures behind it.

Reads well at 80 columns and in a pipe: colour and weight only repeat what the words say, and without a terminal there are
no control codes. Only ASCII words; the lines of the table fall back to ASCII where the output cannot show them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .report_answers import Answer, answer
from .report_format import count, figure, gib, number, plural, seconds, share, statistic
from .report_settings import settings_text
from .report_tables import scenario_facts

if TYPE_CHECKING:
    from .result import Result

COLOURS = {"good": "green", "strained": "yellow", "bad": "red"}
WIDEST = 100
"""A wider terminal only pulls a row's name and its numbers apart."""

LATENCIES = (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("ITL", "itl_s"), ("E2EL", "e2el_s"), ("Queue", "queue_s"))
STATISTICS = ("mean", "p50", "p90", "p99", "max")


def print_summary(result: Result, console: Console | None = None) -> None:
    """Print the summary of `result` on `console` (default: standard output)."""
    console = console or Console()
    console.print(summary_view(result), width=min(console.width, WIDEST))


def summary_view(result: Result) -> RenderableType:
    """The summary as something rich can print."""
    found = answer(result)
    parts: list[RenderableType] = [_verdict(found, result.scenario), _latencies(result.summary), _facts(result)]
    remarks = [("warning:", str(text)) for text in result.summary.get("warnings") or ()]
    remarks += [("note:", str(text)) for text in result.summary.get("notes") or ()]
    if remarks:
        parts.append(_remarks(remarks))
    return Group(*parts)


def _verdict(found: Answer, scenario: Mapping[str, Any]) -> Panel:
    colour = COLOURS[found.status]
    body = Text()
    body.append(found.verdict, style=f"bold {colour}")
    body.append(f". {found.headline}\n")
    body.append(found.limit_title, style="bold")
    body.append(f". {found.limit_detail}")
    # Text, not markup: a model's path may hold square brackets.
    title = Text(", ".join(scenario_facts(scenario)) or "kvtwin", style="bold")
    return Panel(body, title=title, title_align="left", border_style=colour, box=box.ROUNDED, padding=(0, 1))


def _latencies(summary: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, expand=True, padding=(0, 1), pad_edge=False)
    table.add_column("Latency", no_wrap=True)
    for name in STATISTICS:
        table.add_column(name, justify="right", no_wrap=True)
    for label, metric in LATENCIES:
        table.add_row(Text(label, style="bold"), *(seconds(statistic(summary, metric, name)) for name in STATISTICS))
    return table


def _facts(result: Result) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    for name, text in _fact_rows(result.summary):
        grid.add_row(name, Text(text))
    settings = settings_text(result.provenance)
    if settings:
        grid.add_row("Settings", Text(settings))
    return grid


def _fact_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    get = summary.get
    ends = [f"{count(get(key) or 0)} {word}" for key, word in (
        ("finished", "finished"), ("rejected", "rejected"), ("aborted", "aborted"), ("timed_out", "timed out"), ("failed", "failed")
    )]  # fmt: skip
    rows = [("Requests", ", ".join(ends))]
    for key, label in (("rejected_by_reason", "  rejected for"), ("degraded_by_rung", "  degraded by")):
        reasons = {name: number_of for name, number_of in (get(key) or {}).items() if number_of}
        if reasons:
            rows.append((label, ", ".join(f"{name} ({count(number_of)})" for name, number_of in reasons.items())))
    rows.append((
        "Throughput",
        f"{figure(get('request_throughput_per_s') or 0)} requests/s, {figure(get('output_throughput_tokens_per_s') or 0)} output tokens/s",
    ))  # fmt: skip
    if number(get("slo_attainment")) is not None:
        rows.append(
            ("Objectives", f"met by {share(get('slo_attainment'))}; goodput {figure(get('goodput_per_s'))} requests/s")
        )
    if get("num_gpu_blocks"):
        usage = {name: share(statistic(summary, "kv_usage", name)) for name in ("mean", "p99", "max")}
        pool = f"of {count(get('num_gpu_blocks'))} blocks x {count(get('block_size'))} tokens"
        rows.append(("KV usage", f"mean {usage['mean']}, p99 {usage['p99']}, peak {usage['max']} {pool}"))
    if number(get("prefix_hit_rate")) is not None:
        rows.append(("Prefix hits", f"{share(get('prefix_hit_rate'))} of prompt tokens"))
    rows.append(("Preemptions", _preemptions(summary)))
    end = get("kv_blocks_at_end")
    if isinstance(end, Mapping):
        rows.append(("Blocks at end", ", ".join(f"{count(value)} {name}" for name, value in end.items())))
    rows += _memory_rows(summary)
    simulated, wall = get("simulated_time_s"), number(get("wall_time_s"))
    took = "" if wall is None else f", computed in {seconds(wall)}"
    how = "Measured" if get("executors") else "Simulated"  # a real run's time is what its steps took
    rows.append((how, f"{seconds(simulated)} in {plural(int(get('engine_steps') or 0), 'engine step')}{took}"))
    return rows


def _memory_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The widest step, the tightest moment, and what did not fit by line; nothing where no device is known."""
    peak, least = number(summary.get("peak_workspace_bytes")), number(summary.get("min_headroom_bytes"))
    if peak is None or least is None:
        return []
    room = f"at least {gib(least)} free" if least >= 0 else f"{gib(-least)} missing at the tightest step"
    rows = [("Step memory", f"widest step {gib(peak)}, {room}")]
    failed = summary.get("oom_by_line") or {}
    if failed:
        lines = ", ".join(f"{line} ({count(steps)})" for line, steps in failed.items())
        rows.append(("Out of memory", f"{plural(sum(failed.values()), 'step')}: {lines}"))
    return rows


def _preemptions(summary: Mapping[str, Any]) -> str:
    preemptions = int(number(summary.get("num_preemptions")) or 0)
    if not preemptions:
        return "none"
    most = count(summary.get("max_preemptions_per_request"))
    text = (
        f"{count(preemptions)} (at most {most} a request), {count(summary.get('recomputed_tokens'))} tokens recomputed"
    )
    swapped = int(number(summary.get("swapped_out_blocks")) or 0)
    return f"{text}, {plural(swapped, 'block')} swapped out" if swapped else text


def _remarks(remarks: list[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column()
    grid.add_row("", "")
    for kind, text in remarks:
        grid.add_row(Text(kind, style="bold yellow" if kind == "warning:" else "bold"), Text(text))
    return grid
