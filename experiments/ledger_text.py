"""The memory account in a terminal: a waterfall of lines, each formula with its numbers, and what a target load would need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from sim.catalog.gpus import GIB

from .terminal import number

if TYPE_CHECKING:
    from sim.memory import Ledger, LedgerLine, Op
    from sim.memory.target import Suggestion, Target

_BAR = 40
"""Width of the waterfall, in characters, for the whole GPU."""


def as_text(account: Ledger, warnings: Sequence[str], *, explain: bool, settings: str = "") -> str:
    """The account as a table; with `explain`, each line is followed by its formula, its numbers and its parts, and `settings` say where
    those came from that are no defaults.
    """
    ranks = account.tensor_parallel_size * account.pipeline_parallel_size
    stage = (
        f", stage {account.pipeline_rank} of {account.pipeline_parallel_size}"
        if account.pipeline_parallel_size > 1
        else ""
    )
    text = [
        f"{account.model} on {ranks if ranks > 1 else 'one'} {account.gpu}, {_engine(account)}{stage}: GiB a rank",
        "",
        *_waterfall(account, explain=explain),
        "",
        f"  KV pool             {number(account.num_gpu_blocks)} blocks of {number(account.block_bytes)} bytes = "
        f"{number(account.kv_tokens)} tokens at {number(account.kv_bytes_per_token)} bytes a token",
        f"  maximum concurrency {account.max_concurrency:.2f} requests of {number(account.max_model_len)} tokens",
        f"  longest request     {number(account.max_model_len_that_fits)} tokens fit the pool",
        f"  block rounding      the last block of a sequence wastes at most {account.block_size - 1} tokens, "
        f"{(account.block_size - 1) / 2:g} on average: {(account.block_size - 1) / 2 * account.kv_bytes_per_token / 2**20:.2f} MiB",
    ]
    if account.layout.is_hybrid:
        groups = ", ".join(_groups(account))
        text.append(f"  groups              {groups}")
    if explain and settings:
        text.append(f"  settings            {settings}")
    if explain:
        text += ["", "  phases of a step (allocated GiB; * is run by the start-up profile)", *_phases(account)]
    return "\n".join([*text, *(f"  note: {warning}" for warning in warnings)])


def _engine(account: Ledger) -> str:
    """The engine whose account it is."""
    name = "vLLM" if account.engine == "vllm" else "SGLang"
    version = account.engine_version.lower().removeprefix(account.engine).lstrip("-=@ ")
    if account.measured is None:
        return f"{name} {version}"
    return f"{account.measured.engine.split(',')[0]} as measured (otherwise {name} {version})"


def _groups(account: Ledger) -> Iterator[str]:
    """Layers that share a block table, equal groups together."""
    kinds = Counter((group.layers, group.window, group.block_size) for group in account.layout.groups)
    for (layers, window, size), times in kinds.items():
        what = f"{layers} layers {'window ' + str(window) if window else 'full'}, blocks of {size}"
        yield f"{times} x ({what})" if times > 1 else what


def fit_text(account: Ledger, target: Target, found: Sequence[Suggestion]) -> str:
    """Whether the target fits, and what would make it fit."""
    needed = target.blocks(account)
    unfilled = target.unfilled_tokens(account)
    ends = f" ({number(unfilled)} of their slots are the unfilled ends of last blocks)" if unfilled else ""
    head = f"\n  {target}: {number(needed)} blocks needed{ends}, {number(account.num_gpu_blocks)} there"
    if target.fits(account):
        return f"{head}: it fits"
    short = target.shortage_bytes(account)
    seqs = target.requests * target.sequences
    reasons = [f"{short / GIB:.2f} GiB a rank short"] if short > 0 else []
    if seqs > account.max_num_seqs:
        reasons.append(f"{seqs} sequences are more than max_num_seqs {account.max_num_seqs}")
    lines = [f"{head}: {' and '.join(reasons)}", ""]
    return "\n".join([*lines, *suggestion_lines(found)])


def suggestion_lines(found: Sequence[Suggestion]) -> list[str]:
    """One line a suggestion: the flags, their effect on the pool, and how many requests of the target fit then."""
    if not found:
        return ["  no change of the settings that kvtwin knows makes it fit"]
    width = max(len(one.change) for one in found) + 2
    return [
        f"  {one.change:<{width}}{one.effect_gib:>+8.2f} GiB {one.effect_tokens:>+10,} tokens  {one.requests:>6,} requests"
        f"  {'fits' if one.fits else 'not enough'}"
        for one in found
    ]


def _waterfall(account: Ledger, *, explain: bool) -> Iterator[str]:
    """Lines as a waterfall: each bar begins where the one above it ends, from the whole GPU down."""
    width = max(len(line.name) for line in account.lines) + 2
    begin = 0
    for line in sorted(account.lines, key=lambda line: line.inside_budget):
        mark = " " if line.inside_budget else "·"
        yield f"  {line.name:<{width}}{line.gib:>10.3f}  {mark} {_bar(line, begin, account.total_bytes)}".rstrip()
        begin += max(0, line.bytes)
        if explain:
            yield f"      = {line.formula}"
            yield f"      = {line.numbers}"
            if line.origin:
                yield f"      from {line.origin}"
            if line.low_bytes is not None and line.high_bytes is not None:
                yield f"      95 % interval {number(line.low_bytes)} to {number(line.high_bytes)} B"
            yield from (f"        {_op(op)}" for op in line.ops)
    total = sum(line.bytes for line in account.lines)
    yield f"  {'total':<{width}}{total / GIB:>10.3f}  (· outside the engine's share of {account.budget_bytes / GIB:.3f})"


def _bar(line: LedgerLine, begin: int, total: int) -> str:
    """From where the bar above ends; what is more than the whole GPU, in a what-if, is cut off with an arrow."""
    first, last = round(begin / total * _BAR), round((begin + max(0, line.bytes)) / total * _BAR)
    if last > _BAR:
        return " " * min(first, _BAR) + "█" * max(0, _BAR - first) + "→"
    return " " * first + "█" * (last - first) or " " * first + ("▏" if line.bytes else "")


def _op(op: Op) -> str:
    rounded = f", allocated {number(op.allocated_bytes)} B" if op.allocated_bytes != op.requested_bytes else ""
    return f"{op.requested_bytes / GIB:>8.4f} GiB  {op.name}: {op.formula}{rounded}"


def _phases(account: Ledger) -> Iterator[str]:
    for phase in sorted(account.phases, key=lambda phase: -phase.bytes):
        yield f"  {phase.bytes / GIB:>8.3f} {'*' if phase.profiled else ' '} {phase.phase}"
        yield from (f"          {_op(op)}" for op in phase.ops)
