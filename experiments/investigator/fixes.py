"""What to change for each cause, as the flag to set, with what it gives back.

Where model and GPU are known the effect is the difference of two ledgers, before and after. Otherwise it follows from the
figures at hand: a hundredth of utilisation is a hundredth of the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from .case import Candidate, Case
from .diagnosis import Cause, Fix, Phase
from .fix_effects import (
    fewer,
    fewer_at_once,
    flag,
    ledger_with,
    less_utilization,
    line_bytes,
    separate_prefill,
    tokens_in,
    tokens_lost,
)
from .fix_texts import TEXTS
from .fixes_allocator import THE_ALLOCATOR_S, allocator, fragmentation, pending
from .sizes import GIB, MIB, show


def fixes_for(case: Case, verdict: Candidate) -> tuple[Fix, ...]:
    """Fixes of one verdict, the most direct first; settings of the allocator by what the replay of a snapshot shows."""
    replayed = tuple(allocator(case)) if verdict.cause in THE_ALLOCATOR_S else ()
    named = {fix.change for fix in replayed}
    return (*replayed, *(fix for fix in _by_cause(case, verdict) if fix.change not in named))


def _by_cause(case: Case, verdict: Candidate) -> tuple[Fix, ...]:
    make = _FIXES.get(verdict.cause)
    if make is not None:
        return tuple(make(case, verdict))
    texts = TEXTS.get(verdict.cause, ())
    size = verdict.effect_bytes
    if size is None or not texts:
        return texts
    first = replace(texts[0], effect_gib=size / GIB, effect_tokens=tokens_in(case, size))
    return (first, *texts[1:])


def _peak(case: Case, verdict: Candidate) -> Iterator[Fix]:
    known, oom = case.known, case.oom
    tried = oom.tried.bytes if oom and oom.tried else None
    if "workspace" in verdict.detail:
        numbers = next((failure.numbers for failure in case.failures if "needed" in failure.numbers), {})
        if numbers:
            yield Fix(
                change=f"a workspace of at least {math.ceil(numbers['needed'] / MIB)} MiB (FlashInfer: the size of its "
                f"workspace buffer)",
                effect_gib=-(numbers["needed"] - numbers["available"]) / GIB,
                effect_tokens=tokens_lost(case, numbers["needed"] - numbers["available"]),
                basis="needed less available, taken from the pool",
            )
        yield Fix(
            change="lower --max-num-seqs: the planner asks by row and head", basis="no memory is missing on the GPU"
        )
        return
    if "encoder" in verdict.detail:
        yield Fix(
            change="--limit-mm-per-prompt to what requests really carry (for example image=1), or fewer pixels an image",
            basis="the encoder is profiled with the largest input the limits allow",
        )
    elif verdict.detail.startswith(("logits", "sampler")) or case.phase is Phase.SAMPLER_WARM_UP:
        rows = known.max_num_seqs or next(
            (int(failure.numbers["rows"]) for failure in case.failures if "rows" in failure.numbers), None
        )
        if rows is None and known.gpu is not None:
            rows = 1024 if known.gpu.total_bytes >= 70 * GIB else 256
        if tried and rows and ledger_with(case, max_num_seqs=rows) is None:
            yield Fix(
                change=f"{flag(case, 'max_num_seqs')} {max(1, rows // 2)}",
                effect_gib=tried / 2 / GIB,
                basis=f"half the rows: half of {show(tried)}",
            )
        else:
            yield from fewer(case, "max_num_seqs", rows, 1)
    if "prompt log" in verdict.detail or case.says(r"prompt_?logprobs"):
        yield Fix(
            change="lower --max-num-batched-tokens (log-probabilities are made for a whole chunk), or refuse prompt_logprobs",
            effect_gib=tried / 2 / GIB if tried else None,
            basis="half the rows are half the bytes" if tried else "",
        )
    elif not verdict.detail.startswith("sampler"):
        yield from fewer(
            case,
            "max_num_batched_tokens",
            known.max_num_batched_tokens or (8192 if known.shape else None),
            256,
        )
    if case.phase is Phase.PREFILL:
        yield from separate_prefill(case)
    if case.oom is not None:
        yield from less_utilization(case)


def _budget(case: Case, verdict: Candidate) -> Iterator[Fix]:
    if verdict.detail == "memory fraction":
        yield Fix(
            change="raise the memory fraction (torch.cuda.set_per_process_memory_fraction)",
            effect_gib=max(0.0, case.oom.tried.bytes) / GIB if case.oom and case.oom.tried else None,
            basis="the device has room",
        )
        return
    yield from less_utilization(case)
    yield from fewer(case, "max_num_seqs", case.known.max_num_seqs, 1)
    yield from fewer(case, "max_num_batched_tokens", case.known.max_num_batched_tokens, 256)


def _graphs(case: Case, verdict: Candidate) -> Iterator[Fix]:
    yield from less_utilization(case)
    ledger, small = ledger_with(case), ledger_with(case, max_num_seqs=32)
    graphs, fewer_graphs = line_bytes(ledger, "cuda_graphs"), line_bytes(small, "cuda_graphs")
    if graphs is not None and fewer_graphs is not None:
        saved = graphs - fewer_graphs
        yield Fix(
            change="--max-cudagraph-capture-size 64",
            effect_gib=saved / GIB,
            effect_tokens=tokens_in(case, saved),
            basis="ledger: graphs up to 64 tokens against all sizes",
        )
        yield Fix(
            change="--enforce-eager",
            effect_gib=graphs / GIB,
            effect_tokens=tokens_in(case, graphs),
            basis="ledger: all CUDA graphs; decode becomes slower",
        )
    else:
        pools = case.oom.private_pools if case.oom else None
        yield Fix(
            change="--max-cudagraph-capture-size 64 (fewer and smaller graphs)",
            basis="the effect needs --model and --gpu",
        )
        yield Fix(
            change="--enforce-eager",
            effect_gib=pools.gib if pools else None,
            basis="at least what lies free in the graphs' pools; decode becomes slower"
            if pools
            else "no graphs; decode becomes slower",
        )


def _weights(case: Case, verdict: Candidate) -> Iterator[Fix]:
    known = case.known
    need = known.weight_bytes
    if need is not None:
        yield Fix(
            change=f"--tensor-parallel-size {known.tp * 2}",
            effect_gib=need / 2 / GIB,
            effect_tokens=tokens_in(case, need / 2),
            basis=f"half of {show(need)} a rank ({known.weight_basis})",
        )
        if "x 2 B" in known.weight_basis or (known.shape and known.shape.quantization is None):
            yield Fix(
                change="--quantization fp8, or weights published quantised",
                effect_gib=need / 2 / GIB,
                effect_tokens=tokens_in(case, need / 2),
                basis="8 instead of 16 bits a weight",
            )
    else:
        yield Fix(
            change=f"--tensor-parallel-size {known.tp * 2}, or quantised weights", basis="the effect needs --model"
        )


def _kv(case: Case, verdict: Candidate) -> Iterator[Fix]:
    numbers = next(
        (failure.numbers for failure in case.failures if failure.kind.name == "one request does not fit"), {}
    )
    if "fits" in numbers:
        yield Fix(
            change=f"{flag(case, 'max_model_len')} {numbers['fits']:.0f}",
            effect_gib=numbers["needed"] - numbers["available"],
            basis="the longest request the pool holds, by the message",
        )
    before, after = ledger_with(case), ledger_with(case, kv_cache_dtype="fp8")
    if before is not None and after is not None and (case.known.kv_cache_dtype or "auto") == "auto":
        yield Fix(
            change="--kv-cache-dtype fp8",
            effect_gib=before.kv_tokens * before.kv_bytes_per_token / 2 / GIB,
            effect_tokens=after.kv_tokens - before.kv_tokens,
            basis="ledger: the same pool at half the bytes a token",
        )
    if "needed" in numbers:
        gap = numbers["needed"] - numbers["available"]
        total = case.total_bytes
        steps = math.ceil(gap * GIB / (0.01 * total)) if total else None
        yield Fix(
            change=f"--gpu-memory-utilization higher by {0.01 * steps:.2f}"
            if steps
            else "raise --gpu-memory-utilization",
            effect_gib=0.01 * steps * total / GIB if steps and total else None,
            effect_tokens=tokens_in(case, 0.01 * steps * total) if steps and total else None,
            basis=f"{gap:.2f} GiB are missing",
        )
    if verdict.detail == "pool larger than the GPU":
        yield Fix(
            change="set the pool's size yourself (free_gpu_memory_fraction, max_tokens, --kv-cache-memory-bytes)",
            basis="the automatic size ignores the device",
        )
    else:
        yield from fewer_at_once(case)
        yield Fix(
            change="an admission limit on tokens (--max-num-seqs, --max-num-queued-reqs), so that waiting replaces failing",
            basis="the load is more than the pool holds",
        )


def _others(case: Case, verdict: Candidate) -> Iterator[Fix]:
    held = sum(size.bytes for _, size in case.oom.others) if case.oom else 0.0
    if not held and case.oom and case.oom.unattributed_bytes:
        held = case.oom.unattributed_bytes
    start = next((failure.numbers for failure in case.failures if failure.kind.name == "free memory on start-up"), None)
    if start:
        held = (start["total"] - start["free"]) * GIB
        yield Fix(
            change=f"--gpu-memory-utilization {math.floor(100 * start['free'] / start['total']) / 100:.2f}",
            effect_gib=start["wanted"] - start["free"],
            basis="free at start over the total",
        )
    yield Fix(
        change="end or move the other process, or give this engine another GPU",
        effect_gib=held / GIB if held else None,
        effect_tokens=tokens_in(case, held) if held else None,
        basis="what the other holds",
    )
    total = case.total_bytes
    if not start and held and total:
        yield Fix(
            change=f"--gpu-memory-utilization at most {max(0.0, (total - held) / total - 0.02):.2f}",
            effect_gib=held / GIB,
            effect_tokens=tokens_lost(case, held),
            basis=f"1 - {show(held)} / {show(total)}, less 0.02 for context",
        )


_FIXES: dict[Cause, Callable[[Case, Candidate], Iterator[Fix]]] = {
    Cause.TRANSIENT_PEAK: _peak,
    Cause.BUDGET: _budget,
    Cause.CUDA_GRAPHS: _graphs,
    Cause.WEIGHTS: _weights,
    Cause.KV_CAPACITY: _kv,
    Cause.FRAGMENTATION: fragmentation,
    Cause.PENDING_FREES: pending,
    Cause.OTHER_PROCESS: _others,
    Cause.NON_TORCH: lambda case, verdict: less_utilization(case),
}
