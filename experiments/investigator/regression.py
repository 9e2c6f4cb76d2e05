"""A regression scenario: the diagnosed failure as a run that fails in the simulator, and the same run with its fix, which does not.

What the evidence says is taken over: the engine's settings, its pool, what held the memory and how much. What it does not say is
chosen so that the failure is certain: the load, and how little is left where the evidence has no figure. Both runs are carried
out before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.scenario_text import scenario_text
from sim.catalog.gpus import GIB
from sim.core.blocks import DoubleFreeError
from sim.core.config import ConfigError
from sim.core.plan import BatchShape
from sim.scenario import Scenario

from .case import Case
from .diagnosis import Cause, Diagnosis
from .errors import DiagnoseError
from .fix_effects import ledger_with
from .sizes import MIB

_MARGIN = 64 * MIB
"""How much is missing where the evidence does not say."""
_OUTPUT_TOKENS = 32
_REQUESTS = 24
_SPARE = 256 * MIB
"""What a fix by a smaller pool leaves beyond what was missing, as vLLM's own suggestion does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Regression:
    """The failure and its mending, as scenarios."""

    failing: Scenario
    """Runs out of memory (or, for KV capacity, preempts)."""
    fixed: Scenario
    """The same with the fix; runs through."""
    fix: str
    """The fix in words."""

    def write(self, path: Path) -> tuple[Path, Path]:
        """Write both as TOML, the second beside the first with `.fixed` in its name; returns the paths. Raises OSError."""
        from sim.results.files import write_text

        fixed = path.with_name(f"{path.stem}.fixed{path.suffix or '.toml'}")
        said = (("It fails. The fix: ", self.failing, path), ("It runs through, with the fix: ", self.fixed, fixed))
        for words, scenario, target in said:
            comments = ["A regression scenario, made by kvtwin diagnose.", f"{words}{self.fix}."]
            tables = scenario.resolved()
            write_text(target, scenario_text({name: tables[name] for name in tables if name != "slo"}, comments))
        return path, fixed


def regression(case: Case, diagnosis: Diagnosis) -> Regression:
    """The failure of `case` as a scenario, and the same mended; both have been run.

    Raises DiagnoseError when model or GPU is not known, when a run of the engine cannot show the cause, or when it does not.
    """
    known = case.known
    if known.shape is None or known.gpu is None or ledger_with(case) is None:
        raise DiagnoseError(
            "--scenario-out: the model and the GPU must be known to simulate the failure; give --model and --gpu"
        )
    make = _MAKERS.get(diagnosis.cause)
    if make is None:
        raise DiagnoseError(
            f"--scenario-out: “{diagnosis.headline}” is nothing that a run of the simulator can show; it shows "
            f"{', '.join(_MAKERS)}"
        )
    try:
        base = _base(case)
        made = make(case, base)
    except ConfigError as error:
        raise DiagnoseError(f"--scenario-out: the engine of the evidence cannot be simulated: {error}") from None
    if not fails(made.failing) or fails(made.fixed):
        what = "does not fail" if not fails(made.failing) else "fails with the fix too"
        raise DiagnoseError(
            f"--scenario-out: the scenario made for “{diagnosis.headline}” {what} in the simulator; no file is written"
        )
    return made


def fails(scenario: Scenario) -> bool:
    """Whether the run of a regression scenario fails: out of memory, a failed request, a preemption, a double release."""
    from sim.simulation import simulate

    try:
        summary = simulate(scenario).summary
    except DoubleFreeError:
        return True
    return bool(summary["oom_events"] or summary["failed"] or summary["num_preemptions"])


def _base(case: Case) -> Scenario:
    """The engine of the evidence, with its pool, under a load that fills its steps."""
    known = case.known
    shape, gpu = known.shape, known.gpu
    assert shape is not None
    assert gpu is not None
    engine: dict[str, Any] = {
        "tensor_parallel_size": known.tp,
        "gpu_memory_utilization": known.gpu_memory_utilization,
        "max_num_seqs": known.max_num_seqs,
        "max_num_batched_tokens": known.max_num_batched_tokens,
        "max_model_len": known.max_model_len,
        "block_size": known.block_size,
        "kv_cache_dtype": known.kv_cache_dtype,
        "num_gpu_blocks_override": known.num_gpu_blocks,
    }
    given = {key: value for key, value in engine.items() if value is not None}
    length = max((tokens for tokens in known.prompt_tokens), default=1024)
    workload = {
        "workload": "uniform",
        "input_tokens": max(1, min(length, (known.max_model_len or length + _OUTPUT_TOKENS) - _OUTPUT_TOKENS)),
        "output_tokens": _OUTPUT_TOKENS,
        "num_requests": _REQUESTS,
        "rate": 100.0,
    }
    scenario = Scenario(model=shape.name, gpu=gpu.name, engine=given, workload=workload)
    from sim.resolve import resolve

    # The pool is pinned: a fix that lowers a limit must not be eaten up by a larger pool.
    return scenario.with_(num_gpu_blocks_override=resolve(scenario).ledger.num_gpu_blocks)


def _room(scenario: Scenario, extra: frozenset[str] = frozenset()) -> tuple[int, int, int]:
    """Bytes that the account leaves for a step, what the first step of the load needs, and the most that any may need."""
    from sim.resolve import resolve
    from sim.simulation import device

    resolved = resolve(scenario)
    memory = device(resolved)
    budget, length = resolved["engine"]["max_num_batched_tokens"], resolved["workload"]["input_tokens"]
    seqs = min(resolved["engine"]["max_num_seqs"], _REQUESTS)
    first = BatchShape(prefill=((min(budget, length), 0),), sampled_seqs=1)
    widest = BatchShape(prefill=((min(budget, seqs * length), 0),), decode_seqs=seqs, sampled_seqs=seqs)
    need = memory.steps.need(first, extra=extra).bytes
    return memory.workspace_bytes, need, memory.steps.need(widest, extra=extra).bytes


def _held(kind: str, observed: Callable[[Case], float | None], fix: str) -> Callable[[Case, Scenario], Regression]:
    """A failure because something holds memory: as much as was seen, or as much as it takes. The fix: nothing holds it."""

    def make(case: Case, base: Scenario) -> Regression:
        left, need, _ = _room(base)
        size = max(observed(case) or 0.0, left - need + _MARGIN)
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
    left, _, _ = _room(base)
    return [{"kind": "non_torch", "gib": (left - need + _MARGIN) / GIB}] if left >= need else []


def _extra_work(kind: str, extra: str, fix: str) -> Callable[[Case, Scenario], Regression]:
    """A failure because steps do work that nobody profiled; the fix: they do not."""

    def make(case: Case, base: Scenario) -> Regression:
        _, need, _ = _room(base, frozenset({extra}))
        faults = _tight(base, need)
        work = {"kind": kind}
        return Regression(failing=base.with_(faults=[work, *faults]), fixed=base.with_(faults=faults), fix=fix)

    return make


def _peak(case: Case, base: Scenario) -> Regression:
    """A failure because the ordinary tensors of a step do not fit; the fix: a pool that leaves them room."""
    if case.says("prompt_?logprobs"):
        return _extra_work(
            "prompt_logprobs", "prompt_logprobs", "refuse prompt_logprobs, or lower --max-num-batched-tokens"
        )(case, base)
    left, first, widest = _room(base)
    faults = _tight(base, first)
    return _smaller_pool(base, faults, widest - (first - _MARGIN if faults else left))


def _smaller_pool(base: Scenario, faults: list[dict[str, Any]], missing: int) -> Regression:
    from sim.resolve import resolve

    resolved = resolve(base)
    ledger = resolved.ledger
    fewer = -(-(missing + _SPARE) // ledger.block_bytes)
    blocks = ledger.num_gpu_blocks - fewer
    fix = f"a KV pool of {blocks} instead of {ledger.num_gpu_blocks} blocks, by --gpu-memory-utilization or --num-gpu-blocks-override"
    return Regression(
        failing=base.with_(faults=faults or None),
        fixed=base.with_(faults=faults or None, num_gpu_blocks_override=blocks),
        fix=fix,
    )


def _kv(case: Case, base: Scenario) -> Regression:
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


def _double_release(case: Case, base: Scenario) -> Regression:
    fault = {"kind": "double_release"}
    return Regression(failing=base.with_(faults=[fault]), fixed=base, fix="release once")


_MAKERS: dict[Cause, Callable[[Case, Scenario], Regression]] = {
    Cause.OTHER_PROCESS: _held(
        "other_process",
        lambda case: sum(size.bytes for _, size in case.oom.others) if case.oom else None,
        "end or move the other process",
    ),
    Cause.NON_TORCH: _held("non_torch", _non_torch, "no growth outside PyTorch"),
    Cause.LEAK: _held("leak", lambda case: None, "release on every path"),
    Cause.FRAGMENTATION: _held("fragmentation", _unallocated, "PYTORCH_ALLOC_CONF=expandable_segments:True"),
    Cause.PENDING_FREES: _held("pending_frees", _unallocated, "synchronise before the allocation"),
    Cause.CUDA_GRAPHS: _held(
        "cuda_graphs",
        lambda case: case.oom.private_pools.bytes if case.oom and case.oom.private_pools else None,
        "no graphs beyond the account: --max-cudagraph-capture-size, or --enforce-eager",
    ),
    Cause.KERNEL_FALLBACK: _extra_work(
        "kernel_fallback", "plain_attention", "an attention backend that does not write out the scores"
    ),
    Cause.TRANSIENT_PEAK: _peak,
    Cause.BUDGET: _peak,
    Cause.KV_CAPACITY: _kv,
    Cause.DOUBLE_RELEASE: _double_release,
}
"""How each cause is shown."""
