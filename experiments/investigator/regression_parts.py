"""What regression scenarios are made of: an engine as the evidence has it, how much room it has, and whether its run fails."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.scenario_text import scenario_text
from sim.core.batch_shape import BatchShape
from sim.core.blocks import DoubleFreeError
from sim.memory import NoRoomError
from sim.memory.start_up import StartUpError
from sim.scenario import Scenario

from .case import Case
from .sizes import MIB

MARGIN = 64 * MIB
"""How much is missing where the evidence does not say."""
_OUTPUT_TOKENS = 32
_REQUESTS = 24
KEPT = 256 * MIB
"""Reserved memory beyond what steps ever took: more than this is kept for nothing."""
SPARE = 256 * MIB
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
            try:
                tables = scenario.resolved()
            except NoRoomError:  # it fails by not starting: what was given is all there is
                tables = scenario.given()
            write_text(target, scenario_text({name: tables[name] for name in tables if name != "slo"}, comments))
        return path, fixed


def fails(scenario: Scenario) -> bool:
    """Whether the run of a regression scenario fails: it does not start, runs out of memory, ends a request as failed, preempts,
    releases twice, or keeps memory that nothing uses.
    """
    from sim.simulation import simulate

    try:
        result = simulate(scenario)
    except (DoubleFreeError, StartUpError, NoRoomError):
        return True
    summary = result.summary
    if summary["oom_events"] or summary["failed"] or summary["num_preemptions"]:
        return True
    memory = result.memory_columns
    kept = max(memory["workspace_bytes"], default=0)
    return any(
        reserved - allocated - kept >= KEPT
        for reserved, allocated in zip(memory["reserved_bytes"], memory["allocated_bytes"], strict=True)
    )


def engine_of(case: Case) -> Scenario:
    """The engine of the evidence, under a load that fills its steps."""
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
    return Scenario(model=shape.name, gpu=gpu.name, engine=given, workload=workload)


def base_of(case: Case) -> Scenario:
    """The same, with its pool. Raises ConfigError where it does not start."""
    from sim.resolve import resolve

    scenario = engine_of(case)
    # The pool is pinned: a fix that lowers a limit must not be eaten up by a larger pool.
    return scenario.with_(num_gpu_blocks_override=resolve(scenario).ledger.num_gpu_blocks)


def room(scenario: Scenario, extra: frozenset[str] = frozenset()) -> tuple[int, int, int]:
    """Bytes that the account leaves for a step, what the first step of the load needs, and the most that any may need."""
    from sim.assembly import device
    from sim.resolve import resolve

    resolved = resolve(scenario)
    memory = device(resolved)
    budget, length = resolved["engine"]["max_num_batched_tokens"], resolved["workload"]["input_tokens"]
    seqs = min(resolved["engine"]["max_num_seqs"], _REQUESTS)
    first = BatchShape(prefill=((min(budget, length), 0),), sampled_seqs=1)
    widest = BatchShape(prefill=((min(budget, seqs * length), 0),), decode_seqs=seqs, sampled_seqs=seqs)
    need = memory.steps.need(first, extra=extra).bytes
    return memory.workspace_bytes, need, memory.steps.need(widest, extra=extra).bytes


def smaller_pool(base: Scenario, faults: list[dict[str, Any]], missing: int) -> Regression:
    """A failure with `faults`, and as its fix a pool that is smaller by what was `missing` in bytes, and a margin."""
    from sim.resolve import resolve

    resolved = resolve(base)
    ledger = resolved.ledger
    fewer = -(-(missing + SPARE) // ledger.block_bytes)
    blocks = ledger.num_gpu_blocks - fewer
    fix = f"a KV pool of {blocks} instead of {ledger.num_gpu_blocks} blocks, by --gpu-memory-utilization or --num-gpu-blocks-override"
    return Regression(
        failing=base.with_(faults=faults or None),
        fixed=base.with_(faults=faults or None, num_gpu_blocks_override=blocks),
        fix=fix,
    )
