"""`[policy]` of a scenario file: how the engine decides. What the names mean is looked up in `sim.policy_objects`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .scenario_keys import Named, Table, file_only


class PolicyTable(Table):
    """`[policy]`: how the engine decides."""

    policy: str = Field("vllm-v1", min_length=1, description="the preset")
    scheduling_policy: Literal["fcfs", "priority"] = Field("fcfs", description="order of service")
    watermark: float = file_only(
        0.0, ge=0, lt=1, description="share of the pool that admission leaves free for running requests to grow"
    )
    scheduler_reserve_full_isl: bool = file_only(True, description="admit a request only if its whole prompt fits")
    eviction: Literal["lru", "lfu", "priority", "retention"] = Field(
        "lru", description="what the prefix cache forgets first"
    )
    retention: list[dict[str, int | float | bool]] | None = file_only(
        None,
        description="what of each request is kept for how long, for eviction retention: priority, start, end, duration_s, output",
    )
    num_cpu_prefix_blocks: int = Field(
        0, ge=0, description="KV blocks in CPU memory for prefixes that leave the device; 0: no CPU prefix tier"
    )
    cpu_prefix_mode: Literal["write_through", "write_back"] = Field(
        "write_through", description="save prefix blocks there when they are full, or when they are about to be evicted"
    )
    cpu_token_s: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="seconds a token of one request takes on the CPU executor; default: there is none",
    )
    cpu_max_num_seqs: int = file_only(8, ge=1, description="most requests that the CPU executor serves at once")
    num_cpu_blocks: int = Field(
        0,
        ge=0,
        description="KV blocks in CPU memory; above 0, preempted requests are saved there instead of recomputed",
    )
    max_num_queued_reqs: int | None = file_only(
        None,
        ge=0,
        description="most requests in the engine, running and waiting; who finds it full is told when to come back",
    )
    max_num_queued_tokens: int | None = file_only(
        None, ge=0, description="prompt tokens in the queue from which on nobody enters; the same"
    )
    displace_queued: bool = file_only(
        False,
        description="an arrival that finds max_num_queued_reqs takes the place of a less important one that waits",
    )
    batching: Literal["mixed", "prefill_first", "decode_first", "static"] | None = file_only(
        None, description="what may share a step; default: as the preset has it"
    )
    max_prefill_tokens: int | None = file_only(None, ge=1, description="most prompt tokens computed in one step")
    max_prefill_seqs: int | None = file_only(None, ge=1, description="most prompts computed in one step")
    max_decode_seqs: int | None = file_only(
        None,
        ge=1,
        description="most decodes in one step (a micro-batch); who has waited longest for a token goes first",
    )
    continuous_decode_steps: int | None = file_only(
        None, ge=1, description="steps that decodes have to themselves after each step of prompts, for decode_first"
    )
    admission: Named | list[Named] | None = file_only(
        None,
        description="admission policies asked besides the preset's: names or module:Class, or tables of policy and its arguments",
    )
    queue: Named | None = file_only(
        None, description="order of the queue: a name or module:Class, or a table of order and its arguments"
    )
    victim: str | None = file_only(
        None, min_length=1, description="who gives way when blocks run out: a name, or your own as module:function"
    )
    fork_samples: bool = file_only(
        False,
        description="samples start as copies of the first, with copy-on-write, instead of as requests that find its prompt in the cache",
    )
    guard_priority: int = file_only(
        0, description="requests at least this important (this number or smaller) are never degraded"
    )
    ladder: list[dict[str, str | float]] | None = file_only(
        None, description="rungs of a degradation ladder, mildest first: action, signal, on, off, hold_s, value"
    )
