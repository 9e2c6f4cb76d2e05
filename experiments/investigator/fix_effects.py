"""What a change is worth: by two ledgers where model and GPU are known, else by the figures at hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sim.core.config import ConfigError

from .case import Case
from .diagnosis import Fix
from .sizes import GIB, MIB, show

if TYPE_CHECKING:
    from sim.memory import Ledger

_MARGIN = 150 * MIB
"""Left free beyond what was missing. **Source:** the buffer of vLLM's own suggestion after warm-up."""
_WORTH_A_CHANGE = 64 * MIB
"""A limit that returns less is not worth lowering: another term makes the peak."""
_SGLANG_FLAGS = {
    "gpu_memory_utilization": "--mem-fraction-static",
    "max_num_seqs": "--max-running-requests",
    "max_num_batched_tokens": "--chunked-prefill-size",
    "max_model_len": "--context-length",
}


def flag(case: Case, setting: str) -> str:
    """How the engine of this case spells a setting; vLLM's way where nothing says which engine it is."""
    if case.known.engine == "sglang" and setting in _SGLANG_FLAGS:
        return _SGLANG_FLAGS[setting]
    return "--" + setting.replace("_", "-")


def ledger_with(case: Case, **changes: Any) -> Ledger | None:
    """The account of this engine, with `changes`; None when model or GPU is not known, or nothing fits."""
    known = case.known
    if known.shape is None or known.gpu is None:
        return None
    settings: dict[str, Any] = {
        "tensor_parallel_size": known.tp,
        "gpu_memory_utilization": known.gpu_memory_utilization or 0.9,
        "max_num_seqs": known.max_num_seqs,
        "max_num_batched_tokens": known.max_num_batched_tokens,
        "kv_cache_dtype": known.kv_cache_dtype or "auto",
    }
    from sim.memory import build_ledger

    try:
        return build_ledger(known.shape, known.gpu, **(settings | changes))
    except ConfigError:
        return None


def line_bytes(ledger: Ledger | None, name: str) -> int | None:
    """Bytes of one line of an account; None when there is no account, or no such line in it."""
    if ledger is None:
        return None
    return next((line.bytes for line in ledger.lines if line.name == name), None)


def tokens_in(case: Case, size: float) -> int | None:
    """KV tokens that `size` bytes hold on one rank; None when the model is not known."""
    each = case.known.kv_bytes_per_token
    return None if each is None else round(size / each)


def less_utilization(case: Case, missing: float | None = None) -> Iterator[Fix]:
    """A lower utilisation: the KV pool shrinks by what becomes free."""
    total = case.total_bytes
    if total is None:
        yield Fix(
            change=f"lower {flag(case, 'gpu_memory_utilization')} by 0.01",
            basis="each 0.01 frees a hundredth of the GPU; its size is not known",
        )
        return
    missing = max(0.0, (case.shortage_bytes or 0.0) if missing is None else missing)
    steps = max(1, math.ceil((missing + _MARGIN) / (0.01 * total)))
    if missing + _MARGIN > 0.01 * total and missing <= 0.9 * 0.01 * total:
        steps = 1  # the margin alone is no reason to take a second hundredth
    now = case.known.gpu_memory_utilization
    name = flag(case, "gpu_memory_utilization")
    change = f"{name} {now - 0.01 * steps:.2f}" if now and now > 0.01 * steps else f"lower {name} by {0.01 * steps:.2f}"
    freed = 0.01 * steps * total
    yield Fix(
        change=change,
        effect_gib=freed / GIB,
        effect_tokens=tokens_lost(case, freed),
        basis=f"{steps} x 0.01 x {show(total)}; {show(missing)} were missing",
    )


def tokens_lost(case: Case, size: float) -> int | None:
    """The same, as a loss of the pool."""
    tokens = tokens_in(case, size)
    return None if tokens is None else -tokens


def fewer(case: Case, name: str, now: int | None, least: int) -> Iterator[Fix]:
    """Half of a limit: the peak and the pool as the ledger has them, before and after."""
    if now is None or now <= least:
        return
    half = max(least, now // 2)
    before, after = ledger_with(case, **{name: now}), ledger_with(case, **{name: half})
    if before is None or after is None:
        yield Fix(change=f"{flag(case, name)} {half}", basis=f"half of {now}; the effect needs --model and --gpu")
        return
    yield from _gain(
        before,
        after,
        change=f"{flag(case, name)} {half}",
        basis=f"ledger: what a lower peak leaves to the KV pool, {after.kv_tokens:,} instead of {before.kv_tokens:,} tokens",
    )


def _gain(before: Ledger, after: Ledger, *, change: str, basis: str) -> Iterator[Fix]:
    """A change with the tokens that it adds to the KV pool, if they are worth it."""
    gained = after.kv_tokens - before.kv_tokens
    if gained * after.kv_bytes_per_token >= _WORTH_A_CHANGE:
        yield Fix(
            change=change,
            effect_gib=gained * after.kv_bytes_per_token / GIB,
            effect_tokens=gained,
            basis=basis,
        )


def fewer_at_once(case: Case) -> Iterator[Fix]:
    """As many sequences as the pool holds of the longest that was seen: the others wait instead of taking blocks from each other."""
    requests, log, ledger = case.requests, case.log, ledger_with(case)
    pool = (log.account.get("kv_tokens") if log else None) or (case.known.num_gpu_blocks or 0) * (
        case.known.block_size or 16
    )
    pool = pool or (ledger.kv_tokens if ledger is not None else 0)
    if requests is None or not requests.largest_use or not pool:
        return
    seqs = int(pool // requests.largest_use)
    over = requests.max_running * requests.largest_use - pool
    if seqs < 1 or requests.max_running <= seqs:
        return
    each = case.known.kv_bytes_per_token
    yield Fix(
        change=f"{flag(case, 'max_num_seqs')} {seqs}",
        effect_gib=None if each is None else over * each / GIB,
        effect_tokens=round(over),
        basis=f"{seqs} requests of {requests.largest_use:,} tokens fill the pool of {pool:,.0f}; {requests.max_running} ran at once: "
        "so much less is asked of it",
    )


def separate_prefill(case: Case) -> Iterator[Fix]:
    """Prefill on engines of its own: a step of the others has a token a sequence, and what its peak leaves goes to the pool."""
    known = case.known
    seqs = known.max_num_seqs or 256
    before, after = ledger_with(case), ledger_with(case, max_num_batched_tokens=seqs)
    if before is None or after is None:
        return
    yield from _gain(
        before,
        after,
        change=f"prefill and decode on separate engines; {flag(case, 'max_num_batched_tokens')} {seqs} on those that decode",
        basis=f"ledger: steps of {seqs} instead of {before.max_num_batched_tokens:,} tokens",
    )
