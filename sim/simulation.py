"""One run, as a recipe: scenario, requests, memory, engine, prices, world, summary.

The module is not called `simulate`, because importing it would then hide the function `sim.simulate` of the same name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ._version import __version__
from .policy_choice import choose_policy
from .policy_parts import idle_parts
from .provenance import provenance
from .resolve import ROOFLINE, Resolved, resolve
from .scenario_errors import ScenarioError
from .sequences import sequences
from .steady_state import steady_state_warnings

if TYPE_CHECKING:
    from sim.core.config import AttentionGroup, EngineConfig
    from sim.core.engine import EngineCore
    from sim.core.plan import Executor
    from sim.core.policy import Policy
    from sim.core.request import RequestSpec
    from sim.costs.protocol import CostModel
    from sim.memory import Ledger
    from sim.memory.device import Device
    from sim.results.result import Result
    from sim.workload import BuiltWorkload

    from .scenario import Scenario


class RealEngine(Protocol):
    """What runs engine cores for real. This package has none: a caller brings one (`experiments.real_run` does)."""

    def executor(self, core: EngineCore) -> Executor:
        """An executor for one core."""
        ...

    def report(self) -> list[dict[str, Any]]:
        """What each executor did, as JSON values."""
        ...

    def memory_columns(self) -> dict[str, list[Any]]:
        """The columns of memory.csv, measured."""
        ...


MakeRealEngine = Callable[["Resolved", "Sequence[RequestSpec]"], RealEngine]
"""Makes what runs a resolved scenario with these requests."""


def simulate(
    scenario: Scenario,
    seed: int | None = None,
    *,
    replication: int = 0,
    cost: CostModel | None = None,
    decision_log: Callable[[dict[str, Any]], None] | None = None,
    executor: Callable[[EngineCore], Executor] | None = None,
    real: MakeRealEngine | None = None,
    **changes: Any,
) -> Result:
    """Simulate `scenario` and return everything that came of it.

    `seed` replaces the scenario's own; `replication` k draws the k-th independent set of requests from the same seed, the same set
    whatever the engine's settings. `changes` are keys to change first, as in `Scenario.with_`: `simulate(s, rate=4.0)`. `cost`
    replaces the cost model; `decision_log` is called with each step's entry. Equal arguments give equal results, wall-clock times aside.

    With executor "torch" in `[run]` nothing is simulated but the clients: every step really runs, and its measured duration is
    the time that passes. The caller then brings in `real` what runs it; `experiments.real_run.run_scenario` does. `executor`
    (made for each engine core) does the steps instead of either.

    Raises ScenarioError, and the errors of the parts it uses (all ValueErrors with one clear message); StartUpError, with a log, when
    faults make the engine run out of memory while it starts.
    """
    from sim.results import (
        Result,
        bill_columns,
        itl_columns,
        mark_columns,
        memory_columns,
        oom_log,
        oom_snapshot,
        request_columns,
        summarize,
        timeline_columns,
    )
    from sim.world.run import run_world

    started_s = time.perf_counter()
    resolved = resolve(scenario.with_(**changes, **({} if seed is None else {"seed": seed})))
    run = resolved["run"]

    built = build_workload(resolved, replication)
    config, policy = policy_of(resolved)
    sent = sequences(resolved.tables, config, built.requests, replication)
    memory = device(resolved)
    ran = None
    if executor is None and run["executor"] == "torch":
        if real is None:
            raise ScenarioError(
                "[run] executor is 'torch', and sim.simulate only simulates; `kvtwin run`, or experiments.real_run.run_scenario in "
                "Python, runs it for real"
            )
        ran = real(resolved, sent)
        executor = ran.executor
    if executor is not None and memory.faults:
        raise ScenarioError(
            "[run] faults are injected into a simulated device, but here an executor runs the steps; leave one of them out"
        )
    check_start(resolved, memory)
    prices = cost or cost_model(resolved)
    record = run_world(
        config,
        prices,
        sent,
        replicas=run["replicas"],
        router=run["router"],
        max_concurrency=resolved["workload"]["max_concurrency"],
        stepping=run["stepping"],
        check=run["check"],
        decision_log=decision_log,
        policy=policy,
        device=memory,
        # What really runs has a device of its own, that says itself when its memory runs out.
        memory_limit=executor is None and has_memory_limit(resolved, memory),
        executor=executor,
    )
    requests, timeline = request_columns(record), timeline_columns(record)
    unsteady = steady_state_warnings(timeline, until_s=max(requests["arrival_s"]))
    summary = summarize(
        record,
        scenario=resolved.what_was_run(config),
        seed=run["seed"],
        version=__version__,
        limits_s=resolved.slo.limits_s if resolved.slo else None,
        warnings=[
            *resolved.warnings,
            *(prices.warnings() if executor is None else []),
            *_idle_ladder(policy, sent),
            *idle_parts(resolved["policy"], policy, config, sent),
            *dict.fromkeys(sentence for recorder in record.recorders for sentence in recorder.core.diagnose()),
            *unsteady,
        ],
        notes=built.notes,
        wall_time_s=time.perf_counter() - started_s,
    )
    facts = provenance(resolved, profile=prices.name if executor is None else "measured", replication=replication)
    if ran is not None:
        summary["executors"] = ran.report()
    return Result(
        summary=summary,
        request_columns=requests,
        timeline_columns=timeline,
        mark_columns=mark_columns(record),
        memory_columns=memory_columns(record) if ran is None else ran.memory_columns(),
        bill_columns=bill_columns(record.requests, config.slots_per_block, memory.block_bytes(config.num_gpu_blocks)),
        itl_columns=itl_columns(record) if ran is not None else {},
        oom_log=oom_log(record, _arguments(resolved, config)),
        oom_snapshot=oom_snapshot(record),
        ledger=resolved.ledger,
        provenance=facts,
        scenario=resolved.as_dict(),
    )


def build_workload(resolved: Resolved, replication: int = 0) -> BuiltWorkload:
    """The requests: the same for every engine setting. Raises ScenarioError, WorkloadError, TraceError."""
    from sim.workload import build_requests, read_trace

    workload = resolved["workload"]
    seed = resolved["run"]["seed"]
    if workload["trace"] is None and workload["workload"] is None:
        raise ScenarioError(
            "no workload is given; for example --workload azure-conv or --trace FILE, or a key in [workload]"
        )
    return build_requests(
        read_trace(workload["trace"], seed=seed) if workload["trace"] else workload["workload"],
        num_requests=workload["num_requests"],
        duration_s=workload["duration"],
        rate_per_s=workload["rate"],
        burstiness=workload["burstiness"],
        seed=seed,
        replication=replication,
        cancel_rate=workload["cancel_rate"],
        timeout_s=workload["timeout"],
        input_tokens=_length(workload["input_tokens"]),
        output_tokens=_length(workload["output_tokens"]),
        spread_ticks=workload["spread_ticks"],
        arrival=workload["arrival"],
        priorities=workload["priorities"],
        tenants=workload["tenants"],
        loras=workload["loras"],
        **({} if workload["cancel_age_mean_s"] is None else {"cancel_age_mean_s": workload["cancel_age_mean_s"]}),
    )


def policy_of(resolved: Resolved) -> tuple[EngineConfig, Policy]:
    """The engine settings and the policy of a scenario. Raises ScenarioError and ConfigError for what no engine could run with."""
    engine, limit_s = resolved["engine"], resolved.slo.limits_s.get("ttft") if resolved.slo else None
    loras = resolved["workload"]["loras"]
    if loras and not engine["max_loras"]:
        raise ScenarioError(
            f"[workload] loras names {len(loras)} adapters, but [engine] max_loras is 0: the engine holds none; set it to the number that "
            "it holds at once"
        )
    return choose_policy(resolved["policy"], engine_config(resolved), limit_s, engine["max_loras"] if loras else None)


def engine_config(resolved: Resolved) -> EngineConfig:
    """The settings of the decision core. Raises ConfigError for a contradiction."""
    from sim.core.config import EngineConfig

    engine, policy, ledger = resolved["engine"], resolved["policy"], resolved.ledger
    return EngineConfig(
        num_gpu_blocks=ledger.num_gpu_blocks,
        block_size=engine["block_size"],
        max_model_len=engine["max_model_len"],
        max_num_seqs=engine["max_num_seqs"],
        max_num_batched_tokens=engine["max_num_batched_tokens"],
        enable_prefix_caching=engine["enable_prefix_caching"],
        enable_chunked_prefill=engine["enable_chunked_prefill"],
        async_scheduling=engine["async_scheduling"],
        scheduling_policy=policy["scheduling_policy"],
        reserve_full_prompt=policy["scheduler_reserve_full_isl"],
        sliding_window=None if ledger.layout.is_hybrid else ledger.layout.groups[0].window,
        kv_groups=core_groups(ledger),
        in_flight_tokens=ledger.in_flight_tokens,
        num_cpu_blocks=policy["num_cpu_blocks"],
        num_cpu_prefix_blocks=policy["num_cpu_prefix_blocks"],
        cpu_prefix_mode=policy["cpu_prefix_mode"],
        watermark=policy["watermark"],
    )


def core_groups(ledger: Ledger) -> tuple[AttentionGroup, ...]:
    """The attention groups of the pool that a ledger sized; none for a model with one kind of layer."""
    from sim.core.config import AttentionGroup

    if not ledger.layout.is_hybrid:
        return ()
    return tuple(AttentionGroup(block_size=group.block_size, window=group.window) for group in ledger.layout.groups)


def device(resolved: Resolved) -> Device:
    """The memory of one GPU, with the faults that the scenario injects. Raises ConfigError for a fault that makes no sense."""
    from sim.memory.device import Device
    from sim.memory.faults import read_faults

    return Device(resolved.model, resolved.gpu, resolved.ledger, read_faults(resolved["run"]["faults"]))


def check_start(resolved: Resolved, memory: Device) -> None:
    """Raise StartUpError, with the log it would leave, when the faults of `memory` keep the engine from starting."""
    from sim.memory.start_up import StartUpError, start_up_failure

    failure = start_up_failure(memory, resolved.model)
    if failure is None:
        return
    from sim.catalog.gpus import GIB
    from sim.results.start_up_log import start_up_log

    message = (
        f"the engine does not start: in {failure.phase}, {failure.what} asked for {failure.tried_bytes / GIB:.2f} GiB and "
        f"{failure.free_bytes / GIB:.2f} GiB were free"
    )
    raise StartUpError(message, start_up_log(memory, _arguments(resolved, engine_config(resolved)), failure))


def _arguments(resolved: Resolved, config: EngineConfig) -> dict[str, Any]:
    """What an engine prints of its settings when it starts."""
    engine = resolved["engine"]
    return {
        "model": resolved.model.name,
        "gpu": resolved.gpu.name,
        **{key: engine[key] for key in ("tensor_parallel_size", "gpu_memory_utilization", "kv_cache_dtype")},
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "block_size": config.block_size,
        "num_gpu_blocks": config.num_gpu_blocks,
    }


def has_memory_limit(resolved: Resolved, memory: Device) -> bool:
    """Whether steps may run out of memory. A pool of more blocks than the GPU has is a what-if, unless the scenario insists."""
    asked = resolved["run"]["memory_limit"]
    return memory.workspace_bytes > 0 if asked is None else bool(asked)


def cost_model(resolved: Resolved) -> CostModel:
    """The cost model that the scenario names: `roofline`, `auto`, a profile of the library, or a profile file.

    `resolve` has refused an unknown one. Raises ScenarioError where none prices the device, ConfigError for one that cannot price this
    scenario.
    """
    from sim.catalog.host import HOST
    from sim.costs import Roofline
    from sim.costs.fitted import fitted_cost
    from sim.costs.overlap import overlapped

    profile = resolved["gpu"]["profile"]
    settings = {
        "dtype": resolved["model"]["dtype"],
        "quantization": resolved["model"]["quantization"],
        **{
            key: resolved["engine"][key]
            for key in ("tensor_parallel_size", "pipeline_parallel_size", "kv_cache_dtype", "block_size")
        },
    }
    planned_ahead = overlapped if resolved["engine"]["async_scheduling"] else lambda cost: cost
    if profile == ROOFLINE and resolved.gpu.name == HOST.name and resolved["run"]["executor"] == "model":
        raise ScenarioError(
            "[gpu] gpu is 'cpu', whose data sheet prices no step; give a profile that was measured (--profile auto, or one from "
            "`kvtwin calibrate measure` and `fit`), or run it for real with --executor torch"
        )
    if resolved.ledger.layout.is_hybrid:
        settings["block_bytes"] = resolved.ledger.block_bytes
    if profile == ROOFLINE:
        return planned_ahead(Roofline(resolved.model, resolved.gpu, **settings))
    eager = resolved["engine"]["enforce_eager"]
    cost = fitted_cost(profile, resolved.model, resolved.gpu, **settings, enforce_eager=eager)
    return overlapped(cost) if eager else planned_ahead(cost)  # launches run ahead of the device


def _idle_ladder(policy: Policy, requests: Sequence[RequestSpec]) -> list[str]:
    """Rungs that may touch nobody are probably not what was meant."""
    from sim.core.ladder import WHOEVER_IT_IS

    if policy.ladder is None or any(spec.priority > policy.ladder.guard_priority for spec in requests):
        return []
    idle = [rung.action for rung in policy.ladder.rungs if rung.action not in WHOEVER_IT_IS]
    if not idle:
        return []
    return [
        f"the ladder's {', '.join(idle)} can touch nobody: every request is at least as important as its guard (priority "
        f"{policy.ladder.guard_priority}); give less important requests a larger priority ([workload] priorities), or lower [policy] "
        "guard_priority"
    ]


def _length(given: int | list[int] | None) -> int | tuple[int, int] | None:
    return (given[0], given[1]) if isinstance(given, list) else given
