"""Rules on the account that an engine prints at start-up: what is left for KV, and what is left after it."""

from __future__ import annotations

from collections.abc import Iterator

from .case import Candidate, Case, Verdict
from .diagnosis import Cause, Phase
from .fix_effects import ledger_with
from .sizes import GIB, show

_SURELY_MORE = 1.08
"""The account's own error is at most 6 per cent of the blocks."""
_LITTLE_GIB = 0.3
"""Less than this after the pool does not hold the graphs of any model."""


def ordered_pool(case: Case) -> Iterator[Verdict]:
    """A pool with more blocks than the budget holds: somebody ordered them."""
    blocks, ledger = case.known.num_gpu_blocks, ledger_with(case)
    if case.oom is None or not blocks or ledger is None or blocks <= _SURELY_MORE * ledger.num_gpu_blocks:
        return
    sentence = (
        f"the pool has {blocks:,} blocks, and the budget holds {ledger.num_gpu_blocks:,} by the account: "
        f"{show((blocks - ledger.num_gpu_blocks) * ledger.block_bytes)} were ordered beyond it"
    )
    yield Candidate(
        cause=Cause.BUDGET, score=0.85, detail="pool ordered beyond it", evidence=(sentence,), phase=Phase.SERVING
    )


def account(case: Case) -> Iterator[Verdict]:
    """A pool below zero, a pool shorter than one request, and a pool that left nothing."""
    if case.log is None:
        return
    lines = case.log.account
    kv = lines.get("kv_gib")
    if kv is not None and kv <= 0:
        yield from _overdrawn(case, lines)
        return
    yield from _short(case, lines)
    left = lines.get("free_after_pool_gib")
    if left is not None and left < _LITTLE_GIB and "graphs_gib" not in lines:
        sentence = (
            f"{left:.2f} GiB were free after the pool was allocated, and CUDA graphs and activations come on top of it"
        )
        yield Candidate(cause=Cause.BUDGET, score=0.6, evidence=(sentence,), phase=Phase.GRAPH_CAPTURE)


def _overdrawn(case: Case, lines: dict[str, float]) -> Iterator[Verdict]:
    """The budget is spent before KV: the larger of weights and activations did it."""
    weights, peak = lines.get("weights_gib", 0.0), lines.get("peak_activation_gib", 0.0)
    total = case.total_bytes
    util = case.known.gpu_memory_utilization or 0.9
    budget = f", the budget is {util * total / GIB:.2f} GiB" if total else ""
    sentence = f"{lines['kv_gib']:.2f} GiB are left for KV: weights take {weights:.2f} GiB, the profiled peak {peak:.2f} GiB{budget}"
    large = total is not None and peak > 0.25 * util * total / GIB and weights < 0.7 * util * total / GIB
    if large:
        yield Candidate(
            cause=Cause.TRANSIENT_PEAK,
            score=0.82,
            detail="profiled forward pass",
            evidence=(sentence,),
            phase=Phase.PROFILING,
        )
    else:
        yield Candidate(
            cause=Cause.WEIGHTS,
            score=0.82,
            detail="they leave no room for KV",
            evidence=(sentence,),
            phase=Phase.START_UP,
        )


def _short(case: Case, lines: dict[str, float]) -> Iterator[Verdict]:
    """The pool against max_model_len."""
    tokens, longest = lines.get("kv_tokens"), case.known.max_model_len
    if tokens is None and "gpu_blocks" in lines:
        tokens = lines["gpu_blocks"] * (case.known.block_size or 16)
    if tokens and longest and tokens < longest:
        sentence = f"the pool has {tokens:,.0f} tokens, one request of max_model_len needs {longest:,}: {tokens / longest:.2f} of one fits"
        yield Candidate(
            cause=Cause.KV_CAPACITY,
            score=0.8,
            detail="one request does not fit the pool",
            evidence=(sentence,),
            phase=Phase.START_UP,
        )
