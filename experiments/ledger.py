"""`kvtwin ledger`: the memory account of a GPU before anything runs on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .ledger_text import as_text, fit_text, suggestion_lines
from .outputs import make_room
from .terminal import print_json, say

if TYPE_CHECKING:
    from sim.catalog.shape import ModelShape
    from sim.memory import Ledger, Op
    from sim.memory.target import Suggestion, Target
    from sim.scenario import Scenario


def ledger(
    scenario: Scenario,
    *,
    explain: bool = False,
    fit: str | None = None,
    html: Path | None = None,
    out: Path | None = None,
    json: bool = False,
) -> int:
    """Draw up the account and print it; with `fit`, say what a target load needs. Returns the exit code, 1 when it does not fit.

    Raises ConfigError where the model does not fit at all and no change was asked for.
    """
    from sim.core.config import ConfigError
    from sim.memory.target import parse_target, suggestions
    from sim.resolve import least_budget, ledger_settings, resolve
    from sim.results.files import write_json, write_text
    from sim.results.report_settings import settings_text

    make_room(out, html)
    target = parse_target(fit) if fit is not None else None
    found: list[Suggestion] = []
    if target is not None:
        settings = ledger_settings(scenario)
        _check_length(settings["model"], target)
        found = suggestions(settings, target, least_tokens=least_budget(scenario))[1]
    try:
        resolved = resolve(scenario)
    except ConfigError as problem:
        if target is None or not found:
            raise
        return _does_not_start(str(problem), target, found, json=json)
    account, warnings = resolved.ledger, list(resolved.warnings)
    if resolved.gpu.nominal:
        warnings.append(
            f"{resolved.gpu.name} is a nominal device of {resolved.gpu.total_gib:.0f} GiB, the same on every machine; what this machine "
            "has is asked when the scenario is run with --executor torch"
        )
    document = as_document(account, warnings=warnings)
    if target is not None:
        document["fit"] = _fit_document(account, target, found)
    if out is not None:
        write_json(out / "ledger.json", document)
    if html is not None:
        write_text(html, page(account))
    if json:
        print_json(document)
    else:
        said = settings_text({"settings": resolved.settings()})
        say(as_text(account, warnings, explain=explain, settings=said))
        if target is not None:
            say(fit_text(account, target, found))
        for path in (out and out / "ledger.json", html):
            if path is not None:
                say(f"wrote {path}")
    return 0 if target is None or target.fits(account) else 1


def _check_length(model: str | ModelShape, target: Target) -> None:
    """Refuse a target that no memory would make possible. Raises ConfigError."""
    from sim.catalog.models import model_shape
    from sim.core.config import ConfigError

    shape = model_shape(model) if isinstance(model, str) else model
    if target.tokens > shape.max_position_embeddings:
        raise ConfigError(
            f"--fit '{target}': {shape.name} takes at most {shape.max_position_embeddings:,} tokens, prompt and output together"
        )


def as_document(account: Ledger, warnings: Sequence[str]) -> dict[str, Any]:
    """The account as JSON values: bytes are those of one rank, the poorest, which sizes the pool of all."""
    return {
        "num_gpu_blocks": account.num_gpu_blocks,
        "block_size": account.block_size,
        "block_bytes": account.block_bytes,
        "kv_tokens": account.kv_tokens,
        "max_model_len": account.max_model_len,
        "max_model_len_that_fits": account.max_model_len_that_fits,
        "max_concurrency": account.max_concurrency,
        "kv_bytes_per_token": account.kv_bytes_per_token,
        "engine": account.engine,
        "engine_version": account.engine_version,
        "gpu_memory_utilization": account.gpu_memory_utilization,
        "max_num_seqs": account.max_num_seqs,
        "max_num_batched_tokens": account.max_num_batched_tokens,
        "pipeline_rank": account.pipeline_rank,
        "lines": [
            {
                "name": line.name,
                "bytes": line.bytes,
                "formula": line.formula,
                "numbers": line.numbers,
                "inside_budget": line.inside_budget,
                "origin": line.origin or "counted",
                "low_bytes": line.low_bytes,
                "high_bytes": line.high_bytes,
                "ops": [_op(op) for op in line.ops],
            }
            for line in account.lines
        ],
        "phases": [
            {
                "phase": phase.phase,
                "bytes": phase.bytes,
                "reserved_bytes": phase.reserved_bytes,
                "profiled": phase.profiled,
                "ops": [_op(op) for op in phase.ops],
            }
            for phase in account.phases
        ],
        "stages": [asdict(stage) for stage in account.stages],
        "kv_groups": [
            {"layers": group.layers, "block_size": group.block_size, "window": group.window}
            for group in account.layout.groups
        ],
        "warnings": list(warnings),
    }


def _op(op: Op) -> dict[str, Any]:
    return {
        "name": op.name,
        "requested_bytes": op.requested_bytes,
        "allocated_bytes": op.allocated_bytes,
        "reserved_bytes": op.reserved_bytes,
        "formula": op.formula,
    }


def _does_not_start(problem: str, target: Target, found: Sequence[Suggestion], *, json: bool) -> int:
    """What to say where the engine would not even start as configured, but would after a change."""
    if json:
        print_json({"error": problem, "fit": {"target": str(target), "fits": False, "suggestions": _changes(found)}})
    else:
        say("\n".join([problem, f"\n  {target}:", *suggestion_lines(found)]))
    return 1


def _fit_document(account: Ledger, target: Target, found: Sequence[Suggestion]) -> dict[str, Any]:
    return {
        "target": str(target),
        "fits": target.fits(account),
        "blocks_needed": target.blocks(account),
        "shortage_bytes": max(0, target.shortage_bytes(account)),
        "unfilled_tokens": target.unfilled_tokens(account),
        "suggestions": _changes(found),
    }


def _changes(found: Sequence[Suggestion]) -> list[dict[str, Any]]:
    return [
        {
            "change": one.change,
            "effect_gib": one.effect_gib,
            "effect_tokens": one.effect_tokens,
            "requests": one.requests,
            "fits": one.fits,
        }
        for one in found
    ]


def page(account: Ledger) -> str:
    """The account as one self-contained HTML file: the waterfall of the report, on a page of its own."""
    from sim.results.page_parts import html_page, verdict
    from sim.results.report_format import count, gib
    from sim.results.report_tables import waterfall_html

    what = f"{account.model} on {account.gpu}, {account.engine} {account.engine_version}"
    pool = (
        f"{count(account.num_gpu_blocks)} KV blocks of {gib(account.block_bytes)}: {count(account.kv_tokens)} tokens, "
        f"{account.max_concurrency:.1f} requests of {count(account.max_model_len)} tokens at once"
    )
    return html_page(
        f"Memory account: {what}", verdict("plain", ("kvtwin ledger", what), pool) + waterfall_html(account)
    )
