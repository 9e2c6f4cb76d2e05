"""A regression scenario: the diagnosed failure as a run that fails in the simulator, and the same run with its fix, which does not.

What the evidence says is taken over: the engine's settings, its pool, what held the memory and how much. What it does not say is
chosen so that the failure is certain: the load, and how little is left where the evidence has no figure. Both runs are carried
out before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sim.catalog.gpus import GIB
from sim.core.config import ConfigError
from sim.scenario import Scenario

from .case import Case
from .diagnosis import Cause, Diagnosis, Phase
from .errors import DiagnoseError
from .fix_effects import ledger_with
from .regression_parts import KEPT, MARGIN, Regression, base_of, fails, room, smaller_pool
from .regression_start import capture, start_peak, weights

Maker = Callable[[Case, Scenario, Phase], Regression]
"""Makes the scenarios of one cause from the evidence, the engine of the evidence, which starts, and the phase."""


def regression(case: Case, diagnosis: Diagnosis) -> Regression:
    """The failure of `case` as a scenario, and the same mended; both have been run.

    Raises DiagnoseError when model or GPU is not known, when a run of the engine cannot show the cause, or when it does not.
    """
    known = case.known
    starts = diagnosis.cause is Cause.WEIGHTS or ledger_with(case) is not None
    if known.shape is None or known.gpu is None or not starts:
        raise DiagnoseError(
            "--scenario-out: the model and the GPU must be known to simulate the failure; give --model and --gpu"
        )
    make = _MAKERS.get(diagnosis.cause)
    if make is None and diagnosis.cause is not Cause.WEIGHTS:
        raise DiagnoseError(
            f"--scenario-out: “{diagnosis.headline}” is nothing that a run of the simulator can show; it shows "
            f"{', '.join([*_MAKERS, Cause.WEIGHTS])}"
        )
    try:
        # Weights may be why no engine starts; every other failure is one of an engine that does.
        made = weights(case) if make is None else make(case, base_of(case), diagnosis.phase)
    except ConfigError as error:
        raise DiagnoseError(f"--scenario-out: the engine of the evidence cannot be simulated: {error}") from None
    if not fails(made.failing) or fails(made.fixed):
        what = "does not fail" if not fails(made.failing) else "fails with the fix too"
        raise DiagnoseError(
            f"--scenario-out: the scenario made for “{diagnosis.headline}” {what} in the simulator; no file is written"
        )
    return made


def _held(kind: str, observed: Callable[[Case], float | None], fix: str) -> Maker:
    """A failure because something holds memory: as much as was seen, or as much as it takes. The fix: nothing holds it."""

    def make(case: Case, base: Scenario, phase: Phase) -> Regression:
        left, need, _ = room(base)
        size = max(observed(case) or 0.0, left - need + MARGIN)
        fault = {"kind": kind, "gib": size / GIB}
        return Regression(failing=base.with_(faults=[fault]), fixed=base, fix=fix)

    return make


def _non_torch(case: Case) -> float | None:
    ledger = ledger_with(case)
    if case.oom is None or case.oom.non_torch_bytes is None or ledger is None:
        return None
    own = sum(line.bytes for line in ledger.lines if line.name in ("context", "non_torch", "communication"))
    return case.oom.non_torch_bytes - own


def _unallocated(case: Case) -> float | None:
    return case.oom.unallocated.bytes if case.oom and case.oom.unallocated else None


def _tight(base: Scenario, need: int) -> list[dict[str, Any]]:
    """A fault that leaves too little for a step that needs `need` bytes, if the account leaves more."""
    left, _, _ = room(base)
    return [{"kind": "non_torch", "gib": (left - need + MARGIN) / GIB}] if left >= need else []


def _extra_work(kind: str, extra: str, fix: str) -> Maker:
    """A failure because steps do work that nobody profiled; the fix: they do not."""

    def make(case: Case, base: Scenario, phase: Phase) -> Regression:
        _, need, _ = room(base, frozenset({extra}))
        faults = _tight(base, need)
        work = {"kind": kind}
        return Regression(failing=base.with_(faults=[work, *faults]), fixed=base.with_(faults=faults), fix=fix)

    return make


def _peak(case: Case, base: Scenario, phase: Phase) -> Regression:
    """A failure because the ordinary tensors of a step do not fit; the fix: a pool that leaves them room."""
    if case.says("prompt_?logprobs"):
        return _extra_work(
            "prompt_logprobs", "prompt_logprobs", "refuse prompt_logprobs, or lower --max-num-batched-tokens"
        )(case, base, phase)
    if phase in (Phase.PROFILING, Phase.SAMPLER_WARM_UP):
        return start_peak(case, base, phase)
    left, first, widest = room(base)
    faults = _tight(base, first)
    return smaller_pool(base, faults, widest - (first - MARGIN if faults else left))


def _kv(case: Case, base: Scenario, phase: Phase) -> Regression:
    """More load than the pool holds; the fix: fewer requests at a time, as few as it takes."""
    from sim.resolve import resolve

    resolved = resolve(base)
    length = resolved["workload"]["input_tokens"]
    ledger, seqs = resolved.ledger, resolved["engine"]["max_num_seqs"]
    grown = ledger.request_blocks(min(2 * length, ledger.max_model_len))
    # As many requests as fill the pool when they are admitted, and outgrow it together when they have doubled.
    requests = min(2 * ledger.num_gpu_blocks // grown + 2, seqs)
    crowded = base.with_(num_requests=requests, output_tokens=min(length, ledger.max_model_len - length))
    if requests < 2 * ledger.num_gpu_blocks // grown + 2:  # the pool is shrunk to the load that the engine takes
        crowded = crowded.with_(num_gpu_blocks_override=max(grown, requests * grown * 2 // 3))
    while seqs > 1:
        seqs = max(1, min(seqs, requests) // 2)
        fixed = crowded.with_(max_num_seqs=seqs)
        if not fails(fixed):
            return Regression(failing=crowded, fixed=fixed, fix=f"--max-num-seqs {seqs}")
    return Regression(failing=crowded, fixed=crowded, fix="")


def _double_release(case: Case, base: Scenario, phase: Phase) -> Regression:
    fault = {"kind": "double_release"}
    return Regression(failing=base.with_(faults=[fault]), fixed=base, fix="release once")


_captured_later = _held(
    "cuda_graphs",
    lambda case: case.oom.private_pools.bytes if case.oom and case.oom.private_pools else None,
    "no graphs beyond the account: --max-cudagraph-capture-size, or --enforce-eager",
)


def _graphs(case: Case, base: Scenario, phase: Phase) -> Regression:
    return capture(case, base) if phase is Phase.GRAPH_CAPTURE else _captured_later(case, base, phase)


def _cached(case: Case, base: Scenario, phase: Phase) -> Regression:
    """Memory that the allocator keeps while nothing needs it: as much as was seen; the fix gives it back."""
    facts = case.curve_facts
    kept = facts.unallocated_last if facts is not None else case.snapshot.inactive if case.snapshot else None
    fault = {"kind": "cached", "gib": max(kept or 0.0, 2 * KEPT) / GIB}
    fix = "torch.cuda.empty_cache() when idle, or PYTORCH_ALLOC_CONF=expandable_segments:True"
    return Regression(failing=base.with_(faults=[fault]), fixed=base, fix=fix)


_MAKERS: dict[Cause, Maker] = {
    Cause.OTHER_PROCESS: _held(
        "other_process",
        lambda case: sum(size.bytes for _, size in case.oom.others) if case.oom else None,
        "end or move the other process",
    ),
    Cause.NON_TORCH: _held("non_torch", _non_torch, "no growth outside PyTorch"),
    Cause.LEAK: _held("leak", lambda case: None, "release on every path"),
    Cause.FRAGMENTATION: _held("fragmentation", _unallocated, "PYTORCH_ALLOC_CONF=expandable_segments:True"),
    Cause.PENDING_FREES: _held("pending_frees", _unallocated, "synchronise before the allocation"),
    Cause.CUDA_GRAPHS: _graphs,
    Cause.RESERVED_ONLY: _cached,
    Cause.KERNEL_FALLBACK: _extra_work(
        "kernel_fallback", "plain_attention", "an attention backend that does not write out the scores"
    ),
    Cause.TRANSIENT_PEAK: _peak,
    Cause.BUDGET: _peak,
    Cause.KV_CAPACITY: _kv,
    Cause.DOUBLE_RELEASE: _double_release,
}
"""How each cause is shown."""
