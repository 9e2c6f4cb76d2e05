"""What a resolved scenario is made of: its requests, engine settings, policy, memory and prices. Each part by itself, so that others
than a simulation can be put together from them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .policy_choice import choose_policy
from .resolve import ROOFLINE, Resolved
from .scenario_errors import ScenarioError

if TYPE_CHECKING:
    from sim.core.config import AttentionGroup, EngineConfig
    from sim.core.policy import Policy
    from sim.costs.protocol import CostModel
    from sim.memory import Ledger
    from sim.memory.device import Device
    from sim.workload import BuiltWorkload


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
    config = engine_config(resolved)
    return config, choose_policy(resolved["policy"], config, limit_s, engine["max_loras"] if loras else None)


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
    raise StartUpError(message, start_up_log(memory, start_arguments(resolved, engine_config(resolved)), failure))


def start_arguments(resolved: Resolved, config: EngineConfig) -> dict[str, Any]:
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


def _length(given: int | list[int] | None) -> int | tuple[int, int] | None:
    return (given[0], given[1]) if isinstance(given, list) else given
