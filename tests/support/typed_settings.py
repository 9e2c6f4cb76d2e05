"""Every key of `[engine]` and `[policy]` with admissible values, scenarios in which they are typed, and where each of them acts."""

from __future__ import annotations

import math
from types import SimpleNamespace

from sim.assembly import policy_of
from sim.core.policies import MaxInFlight, MaxQueuedTokens
from sim.core.policies.caps import MaxRunning
from sim.core.preemption import VICTIMS
from sim.core.waiting import FcfsQueue, priority_queue
from sim.resolve import resolve
from sim.scenario import Scenario
from sim.scenario_tables import TABLE_OF_KEY

RUNG = {"action": "no_reuse", "signal": "kv_usage", "on": 0.9, "off": 0.5}
VALUES = {
    "tensor_parallel_size": (1, 2, 4),
    "pipeline_parallel_size": (1, 2),
    "kv_cache_dtype": ("auto", "fp8"),
    "block_size": (8, 16, 64),
    "num_gpu_blocks_override": (9_000, 20_000),
    "gpu_memory_utilization": (0.5, 0.92),
    "max_model_len": (512, 4096, 65_536),
    "max_num_seqs": (1, 8, 256),
    "max_num_batched_tokens": (512, 8192, 65_536),
    "kv_cache_memory_bytes": (2 << 30,),
    "enforce_eager": (False, True),
    "engine_version": ("0.29", "0.9-v0", "sglang-0.5"),
    "speculative_model": ("llama-3.2-1b",),
    "num_speculative_tokens": (0, 3),
    "draft_tensor_parallel_size": (1,),
    "max_loras": (0, 2),
    "max_lora_rank": (16, 64),
    "encoder_tokens": (0, 1000),
    "plain_attention": (False, True),
    "other_processes_bytes": (0, 1 << 30),
    "enable_prefix_caching": (False, True),
    "enable_chunked_prefill": (False, True),
    "async_scheduling": (False, True),
    "scheduling_policy": ("fcfs", "priority"),
    "watermark": (0.0, 0.01, 0.1),
    "scheduler_reserve_full_isl": (False, True),
    "eviction": ("lru", "lfu", "retention"),
    "retention": ([{"priority": 80, "end": 64}],),
    "num_cpu_prefix_blocks": (0, 500),
    "cpu_prefix_mode": ("write_through", "write_back"),
    "cpu_token_s": (0.1,),
    "cpu_max_num_seqs": (8, 3),
    "num_cpu_blocks": (0, 300),
    "max_num_queued_reqs": (0, 7),
    "max_num_queued_tokens": (900,),
    "displace_queued": (False, True),
    "batching": ("mixed", "prefill_first", "decode_first", "static"),
    "max_prefill_tokens": (256, 70_000),
    "max_prefill_seqs": (1,),
    "max_decode_seqs": (1,),
    "continuous_decode_steps": (3,),
    "admission": ({"policy": "max-running", "limit": 3},),
    "queue": ("fcfs", "priority", "shortest-predicted"),
    "victim": ("last-admitted", "largest-holder"),
    "fork_samples": (False, True),
    "guard_priority": (0, 2),
    "ladder": ([RUNG],),
}
"""Admissible values of every key of `[engine]` and `[policy]`."""
DECIDED = (
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "max_num_batched_tokens",
    "max_model_len",
    "scheduling_policy",
    "watermark",
    "scheduler_reserve_full_isl",
)
"""Those of them that some preset has a say in."""
_QUEUES = {"fcfs": FcfsQueue, "priority": priority_queue}


def typed(preset: str, given: dict[str, object]) -> dict[str, object]:
    """The arguments of a scenario in which these keys were typed."""
    tables: dict[str, dict[str, object]] = {"engine": {}, "policy": {"policy": preset}}
    for key, value in given.items():
        tables[TABLE_OF_KEY[key]][key] = value
    return {"model": "llama-3.1-8b", "gpu": "h100-sxm-80gb", **tables}


def resolved(scenario: Scenario) -> SimpleNamespace:
    """All that an engine is made of."""
    found = resolve(scenario)
    config, policy = policy_of(found)
    doors = policy.admission(config).policies
    return SimpleNamespace(found=found, ledger=found.ledger, config=config, policy=policy, doors=_flat(doors))


def _flat(policies: tuple[object, ...]) -> list[object]:
    return [each for policy in policies for each in _flat(getattr(policy, "policies", ())) or [policy]]


def _limit(engine: SimpleNamespace, kind: type, name: str) -> object:
    return next((getattr(door, name) for door in engine.doors if isinstance(door, kind)), None)


def _pool_bytes(engine: SimpleNamespace) -> int:
    """A pool of whole blocks, in as many bytes as were ordered."""
    return engine.ledger.num_gpu_blocks * engine.ledger.block_bytes


HAD = {
    "kv_cache_dtype": lambda e: "auto" if e.ledger.kv_bytes_per_token == 131_072 // _ranks(e) else "fp8",
    "block_size": lambda e: e.config.block_size,
    "num_gpu_blocks_override": lambda e: e.config.num_gpu_blocks,
    "scheduler_reserve_full_isl": lambda e: e.config.reserve_full_prompt,
    "retention": lambda e: [{"priority": each.priority, "end": each.end} for each in e.policy.retention],
    "eviction": lambda e: e.policy.eviction,
    "cpu_token_s": lambda e: e.policy.cpu_executor.token_s,
    "cpu_max_num_seqs": lambda e: 8 if e.policy.cpu_executor is None else e.policy.cpu_executor.max_num_seqs,
    "max_num_queued_reqs": lambda e: _limit(e, MaxInFlight, "limit"),
    "max_num_queued_tokens": lambda e: _limit(e, MaxQueuedTokens, "limit"),
    "displace_queued": lambda e: _limit(e, MaxInFlight, "_places") is not None,
    "batching": lambda e: e.policy.batching.value,
    "admission": lambda e: {"policy": "max-running", "limit": _limit(e, MaxRunning, "limit")},
    "victim": lambda e: next(name for name, victim in VICTIMS.items() if e.policy.victim is victim),
    "guard_priority": lambda e: e.policy.ladder.guard_priority if e.policy.ladder else e.found["policy"]["guard_priority"],
    "ladder": lambda e: [{key: getattr(rung, key) for key in RUNG} for rung in e.policy.ladder.rungs],
    "tensor_parallel_size": lambda e: e.ledger.tensor_parallel_size,
    "pipeline_parallel_size": lambda e: e.ledger.pipeline_parallel_size,
    "gpu_memory_utilization": lambda e: e.ledger.gpu_memory_utilization,
    "engine_version": lambda e: e.ledger.engine_version,
}  # fmt: skip
"""What an engine has of a key, where it acts under another name than in `EngineConfig`."""
ACCOUNT = (
    "enforce_eager",
    "speculative_model",
    "num_speculative_tokens",
    "draft_tensor_parallel_size",
    "max_loras",
    "max_lora_rank",
    "encoder_tokens",
    "plain_attention",
    "other_processes_bytes",
    "fork_samples",
)
"""Keys that presets have no say in: they act in the memory account and the workload, which read them from the resolved tables."""


def _ranks(engine: SimpleNamespace) -> int:
    return engine.ledger.tensor_parallel_size * engine.ledger.pipeline_parallel_size


def had(engine: SimpleNamespace, key: str) -> object:
    """The value of a key where it acts."""
    if key in ACCOUNT:
        return engine.found[TABLE_OF_KEY[key]][key]
    if key in HAD:
        return HAD[key](engine)
    return getattr(engine.policy.limits if hasattr(engine.policy.limits, key) else engine.config, key)


def contradicted(engine: SimpleNamespace, key: str, value: object) -> str | None:
    """How an engine differs from what was typed, in words."""
    if key == "kv_cache_memory_bytes":
        if any("kv_cache_memory_bytes" in said and "num_gpu_blocks_override" in said for said in engine.found.warnings):
            return None
        left = value - _pool_bytes(engine)
        return None if 0 <= left < engine.ledger.block_bytes else f"a pool of {_pool_bytes(engine)} bytes"
    if key in ("scheduling_policy", "queue") and value in _QUEUES:
        orders = [_QUEUES[value]] if value == "priority" or key == "queue" else None
        if orders is None:  # first come, first served: whatever the place of those who gave way
            return "by priority" if engine.policy.queue is priority_queue else None
        return None if engine.policy.queue in orders else f"another queue: {engine.policy.queue}"
    if key == "queue":
        return None if engine.policy.queue.__name__ == value.replace("-", "_") + "_queue" else "another queue"
    found = had(engine, key)
    equal = math.isclose(found, value) if isinstance(value, float) and isinstance(found, float) else found == value
    return None if equal else f"{key} is {found!r}"
