"""The parts of the report that are text: answer, key figures, memory waterfall, provenance. Every string is escaped here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sim.catalog.host import HOST

from .report_answers import Answer
from .report_format import GIB, MISSING, count, escape, figure, gib, number, seconds, share, statistic
from .report_template import DEFINITIONS

if TYPE_CHECKING:
    from .result import Ledger, LedgerLine, Result


def answer_html(answer: Answer, scenario: Mapping[str, Any], warnings: Sequence[object]) -> str:
    """The top of the page: what was run, the verdict, the limit, the warnings."""
    facts = "".join(f"<span>{escape(fact)}</span>" for fact in scenario_facts(scenario))
    notes = "".join(f"<li>{escape(warning)}</li>" for warning in warnings)
    return (
        f'<section class="answer {answer.status}"><div class="eyebrow"><b>kvtwin</b>{facts}</div>'
        f'<h1>{escape(answer.verdict)}</h1><p class="headline">{escape(answer.headline)}</p>'
        f'<p class="limit"><b>{escape(answer.limit_title)}.</b> {escape(answer.limit_detail)}</p>'
        + (f'<ul class="warnings" aria-label="warnings">{notes}</ul>' if notes else "")
        + "</section>"
    )


def scenario_facts(scenario: Mapping[str, Any]) -> list[str]:
    """Model, GPU, workload, policy, replicas and seed of a scenario, as far as it names them."""

    def get(table: str, key: str) -> Any:
        found = scenario.get(table)
        return found.get(key) if isinstance(found, Mapping) else None

    workload = get("workload", "trace") or get("workload", "workload")
    rate, replicas, seed = number(get("workload", "rate")), get("run", "replicas"), get("run", "seed")
    parallel = get("engine", "tensor_parallel_size")
    gpu = get("gpu", "gpu")
    named = [
        get("model", "model"),
        f"{parallel} x {gpu}" if gpu and parallel not in (None, 1) else gpu,
        str(workload).rsplit("/", 1)[-1] if workload else None,
        None if rate is None else f"{rate:,.10g} requests/s",
        get("policy", "policy"),
        f"{replicas} replicas" if replicas not in (None, 1) else None,
        None if seed is None else f"seed {seed}",
    ]
    return [str(item) for item in named if item]


def tiles_html(summary: Mapping[str, Any]) -> str:
    """The key figures."""
    total = int(number(summary.get("num_requests")) or 0)

    def latency(label: str, metric: str) -> tuple[str, str, str]:
        values = {name: statistic(summary, metric, name) for name in ("p50", "p99")}
        if values["p99"] is None:
            return f"{label}, p99", MISSING, "no value"
        return f"{label}, p99", seconds(values["p99"]), f"p50 {seconds(values['p50'])}"

    blocks, size = number(summary.get("num_gpu_blocks")), number(summary.get("block_size"))
    pool = f"of {count(blocks)} blocks" if blocks else ""
    tiles = [
        ("Requests finished", count(summary.get("finished") or 0), f"of {count(total)}"),
        ("Throughput", f"{figure(summary.get('request_throughput_per_s') or 0)} req/s",
         f"{figure(summary.get('output_throughput_tokens_per_s') or 0)} output tokens/s"),
        latency("First token (TTFT)", "ttft_s"),
        latency("Per token (TPOT)", "tpot_s"),
        latency("End to end (E2EL)", "e2el_s"),
        latency("Queue", "queue_s"),
        ("KV usage, peak", share(statistic(summary, "kv_usage", "max")), f"mean {share(statistic(summary, 'kv_usage', 'mean'))} {pool}"),
        ("KV pool, tokens", count(blocks * size) if blocks and size else MISSING, f"{count(blocks)} blocks x {count(size)} tokens"),
        ("Prefix hit rate", share(summary.get("prefix_hit_rate")), "of prompt tokens"),
        ("Preemptions", count(summary.get("num_preemptions") or 0), f"{count(summary.get('recomputed_tokens') or 0)} tokens recomputed"),
    ]  # fmt: skip
    if number(summary.get("slo_attainment")) is not None:
        goodput = f"goodput {figure(summary.get('goodput_per_s'))} req/s"
        tiles.append(("Objectives met", share(summary["slo_attainment"]), goodput))
    simulated = summary.get("simulated_time_s")
    how = "Measured" if summary.get("executors") else "Simulated"
    tiles.append((how, seconds(simulated), f"{count(summary.get('engine_steps') or 0)} engine steps"))
    return '<section class="tiles" aria-label="key figures">' + "".join(
        f'<div class="tile"><div class="label">{escape(label)}</div><div class="value">{escape(value)}</div>'
        f'<div class="note">{escape(note)}</div></div>'
        for label, value, note in tiles
    ) + "</section>"  # fmt: skip


def waterfall_html(ledger: Ledger | None, *, measured: bool = False) -> str:
    """The memory account as a waterfall: each line starts where the one above it ends, from the whole GPU to the KV pool.

    `measured` says that the run was carried out for real, so that the account of a nominal device can be told from what it took.
    """
    lines = list(ledger.lines) if ledger is not None else []
    if not lines:
        return ""
    rest = sum(line.bytes for line in lines[1:])
    # An account may open with its total; it is then no part of the sum.
    opens_with_total = len(lines) > 1 and abs(lines[0].bytes - rest) <= 1e-3 * rest
    total = lines[0].bytes if opens_with_total else rest + lines[0].bytes
    parts = lines[1:] if opens_with_total else lines
    if total <= 0:
        return ""
    parts = sorted(parts, key=lambda line: line.inside_budget)  # stable: first what the engine may not use
    nominal = getattr(ledger, "gpu", None) == HOST.name
    whole = "Nominal memory" if nominal else "GPU memory"
    rows = [_waterfall_row(whole, total, 0, total, "total", _reckoning(lines[0]) if opens_with_total else "")]
    begin = 0
    for line in parts:
        kind = (
            "outside" if not line.inside_budget else ("pool" if re.search("kv", line.name, re.IGNORECASE) else "inside")
        )
        rows.append(_waterfall_row(_line_name(line.name), line.bytes, begin, total, kind, _reckoning(line)))
        begin += max(line.bytes, 0)
    return (
        '<section class="card"><h2>Where the memory goes</h2><p class="soft small">Bytes a rank. Light grey lies outside the '
        f"engine's budget, blue is the KV pool.{_nominal_note(measured) if nominal else ''}</p>"
        '<div class="scroll"><table class="waterfall"><thead><tr><th class="text">Line</th><th></th><th>GiB</th><th>Share</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _nominal_note(measured: bool) -> str:
    taken = "What this run really took is under What ran." if measured else "What this machine has plays no part in it."
    return (
        f" The CPU is budgeted as a nominal device of {HOST.total_gib:.0f} GiB, the same on every machine, with the account of an engine "
        f"on a GPU. {taken}"
    )


def _line_name(name: str) -> str:
    """`kv_pool` as people write it: KV pool."""
    words = name.replace("_", " ")
    for short in ("KV", "CUDA", "NCCL", "GPU"):
        words = re.sub(rf"\b{short}\b", short, words, flags=re.IGNORECASE)
    return words[:1].upper() + words[1:]


def _reckoning(line: LedgerLine) -> str:
    """How a line came about: its formula, and the same with its numbers where the account has them."""
    numbers = getattr(line, "numbers", "")
    return f"{line.formula} = {numbers}" if numbers else line.formula


def _waterfall_row(name: str, size: int, begin: int, total: int, kind: str, formula: str) -> str:
    left, width = begin / total * 100, max(size, 0) / total * 100
    note = f'<div class="formula">{escape(formula)}</div>' if formula else ""
    return (
        f'<tr><td class="text wrap">{escape(name)}{note}</td><td><div class="bar" title="{escape(gib(size))}">'
        f'<i class="{kind}" style="left:{left:.3f}%;width:{min(width, 100 - left):.3f}%"></i></div></td>'
        f"<td>{size / GIB:,.2f}</td><td>{escape(share(size / total))}</td></tr>"
    )


def provenance_html(result: Result) -> str:
    """Where the numbers come from, how to repeat the run, and what each metric means."""
    summary, provenance = result.summary, dict(result.provenance)
    command = provenance.pop("command", None)
    provenance.pop("settings", None)  # they have a card of their own
    facts: dict[str, object] = {"kvtwin": summary.get("kvtwin_version"), "seed": summary.get("seed")}
    facts |= {
        str(key).replace("_", " "): value for key, value in provenance.items() if key not in ("kvtwin_version", "seed")
    }
    facts |= {"requests": " ".join(f"{text}." for text in summary["notes"])} if summary.get("notes") else {}
    wall = number(summary.get("wall_time_s"))
    if wall is not None:
        facts["computed in"] = f"{seconds(wall)} on this computer, {count(summary.get('events'))} events"
    items = "".join(
        f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in facts.items() if value is not None
    )
    repeat = (
        f'<p class="small" style="margin-top:.9rem"><b>Repeat this run</b></p><pre>{escape(command)}</pre>'
        if command
        else ""
    )
    meaning = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in DEFINITIONS.items())
    definitions = f'<section class="card"><h2>What the words mean</h2><dl>{meaning}</dl></section>'
    if not items and not repeat:
        return definitions
    return f'{definitions}<footer class="card"><h2>Provenance</h2><dl>{items}</dl>{repeat}</footer>'
