"""Puts a rank's account into lines that add up, exactly, to the physical memory of the GPU.

Inside the budget: `weights`, `draft_weights`, `lora`, `non_torch`, `communication`, `peak_activation`, `cuda_graphs` (from the release on
that budgets an estimate), `kv_pool`, `unused`. Outside: `other_processes`, `context`, `input_buffers`, `kernel_workspaces`,
`fragmentation`, `cuda_graphs` (before that release) and `outside_budget`, which is what nobody has claimed. SGLang's budget holds weights
and KV only. Lines that do not apply are left out.
"""

from __future__ import annotations

from sim.catalog.gpus import Gpu

from .account import RankAccount
from .graphs import ACTUAL_SHARE
from .ledger import LedgerLine
from .ops import Op, total
from .settings import Settings

_ALWAYS = frozenset({"weights", "non_torch", "peak_activation", "cuda_graphs", "kv_pool"})
"""Lines that an account has even when they are empty."""


def ledger_lines(gpu: Gpu, settings: Settings, account: RankAccount, blocks: int) -> tuple[LedgerLine, ...]:
    """Every line of the account; together exactly the physical total."""
    release = settings.release
    engine_budgets = release.engine == "vllm"
    graphs_inside = release.graphs_in_budget and engine_budgets
    peak = account.peak
    counts = release.context_in_budget
    lines = [
        _sum("other_processes", account.other_processes, "in use by other programs", inside=counts),
        _sum("context", account.context, "the engine process's CUDA context", inside=counts),
        _sum("weights", account.weights, "sum over tensors of allocated(numbers * bytes) + rotary table"),
        _sum("draft_weights", account.draft_weights, "the draft model's weights on the rank that holds it"),
        _sum("lora", account.adapters, "slots * rank * (inputs + outputs of every matrix)"),
        _sum("non_torch", account.libraries, "loaded kernels, library handles, stacks", inside=engine_budgets),
        _sum("communication", account.communication, "buffers of collectives", inside=engine_budgets),
        LedgerLine(
            name="peak_activation",
            bytes=peak.bytes,
            formula="max(forward pass of max_num_batched_tokens, sampler of max_num_seqs)",
            numbers=peak.text,
            inside_budget=engine_budgets,
            ops=peak.ops,
        ),
        _graph_line(account, graphs_inside),
        _sum("input_buffers", account.buffers, "made before profiling, counted by no engine", inside=False),
        _sum("kernel_workspaces", account.workspaces, "fixed buffers of the attention backend", inside=False),
        LedgerLine(
            name="fragmentation",
            bytes=peak.reserved_bytes - peak.bytes,
            formula="reserved - allocated at the peak: ends of segments",
            numbers=f"{peak.reserved_bytes} B - {peak.bytes} B",
            inside_budget=False,
        ),
        _pool_line(settings, account, blocks),
    ]
    lines = [line for line in lines if line.bytes or line.name in _ALWAYS]
    spent = sum(line.bytes for line in lines if line.inside_budget)
    outer = sum(line.bytes for line in lines if not line.inside_budget)
    outside = gpu.total_bytes - account.budget_bytes
    share = f"{settings.gpu_memory_utilization:g}"
    budget = f"ceil({share} x {gpu.total_bytes} B)" if engine_budgets else f"{share} x free before loading"
    lines.append(
        LedgerLine(
            name="unused",
            bytes=account.budget_bytes - spent,
            formula="budget - everything in it",
            numbers=f"{budget} = {account.budget_bytes} B - {spent} B",
            inside_budget=True,
        )
    )
    left = LedgerLine(
        name="outside_budget",
        bytes=outside - outer,
        formula="total - budget - the lines outside it",
        numbers=f"{gpu.total_bytes} B - {account.budget_bytes} B - {outer} B",
        inside_budget=False,
    )
    return (left, *lines)


def _sum(name: str, ops: tuple[Op, ...], formula: str, *, inside: bool = True) -> LedgerLine:
    numbers = " + ".join(f"{op.name} {op.formula}" for op in ops) or "0 B"
    return LedgerLine(name=name, bytes=total(ops), formula=formula, numbers=numbers, inside_budget=inside, ops=ops)


def _graph_line(account: RankAccount, inside: bool) -> LedgerLine:
    estimate, actual = account.graphs_estimate_bytes, account.graphs_bytes
    formula = "graphs * layers * bytes a layer + tensors of the largest batch"
    if inside:
        return LedgerLine(
            name="cuda_graphs",
            bytes=estimate,
            formula=formula,
            numbers=f"{account.graphs_text}; the captures themselves take about {actual} B of it",
            inside_budget=True,
        )
    return LedgerLine(
        name="cuda_graphs",
        bytes=actual,
        formula=formula,
        numbers=f"{ACTUAL_SHARE:g} x ({account.graphs_text}), captured after the pool",
        inside_budget=False,
    )


def _pool_line(settings: Settings, account: RankAccount, blocks: int) -> LedgerLine:
    layout = account.layout
    if layout.is_hybrid:
        form = "blocks * layers a group * bytes of the widest layer's block"
        numbers = f"{blocks} blocks x {layout.block_bytes} B ({len(layout.groups)} groups of {layout.layers_per_group} layers)"
    else:
        form = "blocks * block_size * KV bytes per token"
        numbers = f"{blocks} blocks x {settings.block_size} tokens x {account.kv_bytes_per_token} B"
    kept = int(settings.watermark * blocks)
    parts = (
        _blocks("blocks for requests", blocks - kept, layout.block_bytes),
        _blocks("safety watermark", kept, layout.block_bytes),
    )
    ops = tuple(op for op in parts if op.requested_bytes)
    return LedgerLine(
        name="kv_pool", bytes=blocks * layout.block_bytes, formula=form, numbers=numbers, inside_budget=True, ops=ops
    )


def _blocks(name: str, count: int, block_bytes: int) -> Op:
    return Op(name=name, requested_bytes=count * block_bytes, formula=f"{count} x {block_bytes} B", is_tensor=False)
