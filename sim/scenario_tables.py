"""The tables of a scenario file: every key, its type, its range, its unit and its meaning.

Keys are the names of the command-line flags with underscores. None means "not given": the value then comes from the
model, the GPU or the workload when the scenario is resolved. Nothing here looks anything up.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_Length = Annotated[int, Field(ge=1)] | Annotated[list[int], Field(min_length=2, max_length=2)] | None


def whole_keys(given: object) -> object:
    """TOML knows only text for keys; a priority is a whole number."""
    if not isinstance(given, dict):
        return given
    return {
        int(key) if isinstance(key, str) and key.lstrip("-").isdigit() else key: share for key, share in given.items()
    }


_Named = Annotated[str, Field(min_length=1)] | dict[str, Any]
"""A name, or a table with a name and arguments (`sim.policy_objects`)."""

_Priorities = Annotated[dict[int, float], BeforeValidator(whole_keys)]


class Table(BaseModel):
    """What all tables share: unknown keys are errors, values are not converted behind the user's back, and nothing changes later."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelTable(Table):
    """`[model]`: what is served."""

    model: str | None = Field(
        None, min_length=1, description="a model of the catalog, or the path of a Hugging Face config.json"
    )
    dtype: str = Field("auto", min_length=1, description="type of weights and activations, as for vLLM")
    quantization: str | None = Field(
        "auto", min_length=1, description="weight format: auto is as the model is published, none, fp8, awq …"
    )


class GpuTable(Table):
    """`[gpu]`: what it runs on."""

    gpu: str | None = Field(None, min_length=1, description="a GPU of the catalog, for example h100-sxm-80gb")
    profile: str = Field(
        "roofline",
        min_length=1,
        description="the cost model: roofline, auto (the nearest fitted profile), a profile's name or its file",
    )


class EngineTable(Table):
    """`[engine]`: the settings of the inference engine, named as for `vllm serve`."""

    tensor_parallel_size: int = Field(1, ge=1, description="GPUs that share each layer")
    pipeline_parallel_size: int = Field(1, ge=1, description="groups of GPUs that share the layers")
    kv_cache_dtype: str = Field("auto", min_length=1, description="type of the KV cache; auto is the model's own")
    block_size: int = Field(16, ge=1, le=65_536, description="tokens a KV block")
    num_gpu_blocks_override: int | None = Field(
        None, ge=1, description="KV blocks of the pool, instead of the ledger's number"
    )
    gpu_memory_utilization: float = Field(0.92, gt=0, le=1, description="share of the GPU's memory the engine may use")
    max_model_len: int | None = Field(None, ge=1, description="longest sequence, prompt and output, in tokens")
    max_num_seqs: int | None = Field(None, ge=1, description="most sequences in one step")
    max_num_batched_tokens: int | None = Field(None, ge=1, description="most tokens computed in one step")
    kv_cache_memory_bytes: int | None = Field(
        None, ge=1, description="bytes for the KV cache, instead of what the budget leaves"
    )
    enforce_eager: bool = Field(False, description="no CUDA graphs")
    engine_version: str = Field(
        "0.29", min_length=1, description="release whose memory accounting is followed: 0.19, 0.9-v0, sglang-0.5 …"
    )
    speculative_model: str | None = Field(None, min_length=1, description="a draft model, by name or config.json")
    num_speculative_tokens: int = Field(0, ge=0, description="draft tokens a sequence and step, for the memory account")
    draft_tensor_parallel_size: int = Field(1, ge=1, description="GPUs that share the draft model")
    max_loras: int = Field(0, ge=0, description="LoRA adapters held on the GPU at once")
    max_lora_rank: int = Field(16, ge=1, description="rank that their slots are made for")
    encoder_tokens: int = Field(0, ge=0, description="multimodal tokens encoded in one step")
    plain_attention: bool = Field(False, description="attention falls back to writing out all scores")
    other_processes_bytes: int = Field(0, ge=0, description="bytes that other processes hold on the GPU")
    enable_prefix_caching: bool = Field(True, description="keep full blocks for reuse")
    enable_chunked_prefill: bool = Field(True, description="let a prompt be computed over several steps")
    async_scheduling: bool = Field(False, description="plan a step while the one before it runs")
    vllm_args: str | None = Field(
        None, description="pasted flags of `vllm serve`; they fill in what no other key gives"
    )


class PolicyTable(Table):
    """`[policy]`: how the engine decides."""

    policy: str = Field("vllm-v1", min_length=1, description="the preset")
    scheduling_policy: Literal["fcfs", "priority"] = Field("fcfs", description="order of service")
    watermark: float = Field(
        0.0, ge=0, lt=1, description="share of the pool that admission leaves free for running requests to grow"
    )
    scheduler_reserve_full_isl: bool = Field(True, description="admit a request only if its whole prompt fits")
    eviction: Literal["lru", "lfu", "priority", "retention"] = Field(
        "lru", description="what the prefix cache forgets first"
    )
    retention: list[dict[str, int | float | bool]] | None = Field(
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
    cpu_max_num_seqs: int = Field(8, ge=1, description="most requests that the CPU executor serves at once")
    num_cpu_blocks: int = Field(
        0,
        ge=0,
        description="KV blocks in CPU memory; above 0, preempted requests are saved there instead of recomputed",
    )
    max_num_queued_reqs: int | None = Field(
        None,
        ge=0,
        description="most requests in the engine, running and waiting; who finds it full is told when to come back",
    )
    max_num_queued_tokens: int | None = Field(
        None, ge=0, description="prompt tokens in the queue from which on nobody enters; the same"
    )
    displace_queued: bool = Field(
        False,
        description="an arrival that finds max_num_queued_reqs takes the place of a less important one that waits",
    )
    batching: Literal["mixed", "prefill_first", "decode_first", "static"] | None = Field(
        None, description="what may share a step; default: as the preset has it"
    )
    max_prefill_tokens: int | None = Field(None, ge=1, description="most prompt tokens computed in one step")
    max_prefill_seqs: int | None = Field(None, ge=1, description="most prompts computed in one step")
    max_decode_seqs: int | None = Field(
        None,
        ge=1,
        description="most decodes in one step (a micro-batch); who has waited longest for a token goes first",
    )
    continuous_decode_steps: int | None = Field(
        None, ge=1, description="steps that decodes have to themselves after each step of prompts, for decode_first"
    )
    admission: _Named | list[_Named] | None = Field(
        None,
        description="admission policies asked besides the preset's: names or module:Class, or tables of policy and its arguments",
    )
    queue: _Named | None = Field(
        None, description="order of the queue: a name or module:Class, or a table of order and its arguments"
    )
    victim: str | None = Field(
        None, min_length=1, description="who gives way when blocks run out: a name, or your own as module:function"
    )
    fork_samples: bool = Field(
        False,
        description="samples start as copies of the first, with copy-on-write, instead of as requests that find its prompt in the cache",
    )
    guard_priority: int = Field(
        0, description="requests at least this important (this number or smaller) are never degraded"
    )
    ladder: list[dict[str, str | float]] | None = Field(
        None, description="rungs of a degradation ladder, mildest first: action, signal, on, off, hold_s, value"
    )


class WorkloadTable(Table):
    """`[workload]`: the requests, and the clients that send them."""

    trace: str | None = Field(None, min_length=1, description="a trace file; its format is recognised")
    workload: str | None = Field(None, min_length=1, description="a built-in workload, for example azure-conv")
    rate: float | None = Field(
        None, gt=0, description="mean arrivals a second; inf sends all at once; default: the workload's own"
    )
    burstiness: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="shape of Gamma gaps: 1 is Poisson, below 1 is burstier, above 1 more even",
    )
    max_concurrency: int | None = Field(None, ge=1, description="most requests in flight (closed loop)")
    num_requests: int | None = Field(None, ge=1, description="how many requests; default: 1000, or the whole trace")
    duration: float | None = Field(None, gt=0, allow_inf_nan=False, description="seconds during which requests arrive")
    cancel_rate: float = Field(0.0, ge=0, le=1, description="share of requests whose client goes away at a random age")
    timeout: float | None = Field(None, gt=0, allow_inf_nan=False, description="seconds after which a client gives up")
    input_tokens: _Length = Field(
        None, description="prompt length in tokens, or [smallest, largest], for the workload uniform"
    )
    output_tokens: _Length = Field(
        None, description="output length in tokens, or [smallest, largest], for the workload uniform"
    )
    ignore_eos: bool = Field(
        True,
        description="each request's cap is its output length, as when a trace is replayed; off: no caps, the model stops by itself",
    )
    n: int = Field(1, ge=1, description="samples of each prompt; all share its blocks and leave together")
    beam_width: int = Field(1, ge=1, description="beams of each request; 1 is no beam search")
    beam_change: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="probability that a beam is replaced by a copy of another one at a token; default 0.1, an assumption",
    )
    arrival: str | None = Field(
        None, min_length=1, description="arrival process: poisson, gamma, on-off, deterministic or batch"
    )
    priorities: _Priorities | None = Field(
        None, description="share of requests by priority (smaller is more important), for example {0 = 0.2, 1 = 0.8}"
    )
    tenants: dict[str, float] | None = Field(
        None, description="share of requests by tenant, for example {acme = 0.9, other = 0.1}"
    )
    loras: dict[str, float] | None = Field(
        None, description="share of requests by LoRA adapter; what is left of 1 asks for the base model"
    )
    cancel_age_mean_s: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="mean age in seconds at which cancelling clients go away"
    )
    spread_ticks: bool = Field(
        True, description="spread requests that a coarse clock stamped with the same time over its tick"
    )


class RunTable(Table):
    """`[run]`: how the run is carried out."""

    seed: int = Field(0, ge=0, description="root of all random streams")
    executor: str = Field(
        "model",
        min_length=1,
        description="what carries a step out: model (a simulation) or torch (a real forward pass, timed)",
    )
    device: str | None = Field(
        None, min_length=1, description="device of executor torch: cpu, cuda or cuda:N; cpu when not given"
    )
    replicas: int = Field(1, ge=1, description="engines behind the router")
    router: str = Field("round-robin", min_length=1, description="how requests are spread over the replicas")
    stepping: bool = Field(False, description="simulate every step by itself, without leaps")
    check: bool = Field(False, description="verify every invariant after every event")
    memory_limit: bool | None = Field(
        None,
        description="let steps fail that need more memory than the account leaves; default: unless the pool alone is more than the GPU",
    )
    workspace_bytes: int | None = Field(
        None, ge=1, description="workspace of executor torch; default: what the largest step needs"
    )
    micro_batch_tokens: int | None = Field(
        None, ge=1, description="executor torch: most tokens of one forward pass; a step of more is computed in several"
    )
    device_limit_bytes: int | None = Field(
        None,
        ge=1,
        description="executor torch on the CPU: it has so many bytes, of which steps get what all else leaves",
    )
    faults: list[dict[str, str | float]] | None = Field(
        None, description="injected memory faults: kind, at_s, until_s, gib, every_s"
    )


TABLES: dict[str, type[Table]] = {
    "model": ModelTable,
    "gpu": GpuTable,
    "engine": EngineTable,
    "policy": PolicyTable,
    "workload": WorkloadTable,
    "run": RunTable,
}
"""All tables with fixed keys. The seventh, `[slo]`, has objectives for keys (`sim.slo`)."""

TABLE_NAMES = ("model", "gpu", "engine", "policy", "workload", "slo", "run")

TABLE_OF_KEY = {key: name for name, table in TABLES.items() for key in table.model_fields}
"""The table each key belongs to: a key is in one table only."""

NAME_KEYS = {"name": ("model", "gpu", "workload", "policy"), "preset": ("policy",)}
"""Spellings of a table's main key that are also understood: `[model] name` is `[model] model`."""

SWITCHES_BOTH_WAYS = frozenset({"async_scheduling"})
"""Switches that are off by default and have a `--no-…` all the same, as in vLLM."""

KEYS_WITHOUT_FLAG = frozenset(
    {
        "retention",
        "cpu_max_num_seqs",
        "max_num_queued_reqs",
        "max_num_queued_tokens",
        "displace_queued",
        "batching",
        "max_prefill_tokens",
        "max_prefill_seqs",
        "max_decode_seqs",
        "continuous_decode_steps",
        "admission",
        "queue",
        "victim",
        "tenants",
        "loras",
        "guard_priority",
        "ladder",
        "n",
        "ignore_eos",
        "beam_width",
        "beam_change",
        "fork_samples",
        "arrival",
        "priorities",
        "cancel_age_mean_s",
        "kv_cache_memory_bytes",
        "enforce_eager",
        "speculative_model",
        "num_speculative_tokens",
        "draft_tensor_parallel_size",
        "max_loras",
        "max_lora_rank",
        "encoder_tokens",
        "plain_attention",
        "other_processes_bytes",
        "watermark",
        "scheduler_reserve_full_isl",
        "input_tokens",
        "output_tokens",
        "spread_ticks",
        "memory_limit",
        "workspace_bytes",
        "micro_batch_tokens",
        "device_limit_bytes",
        "faults",
    }
)
"""Keys that only a scenario file, Python or pasted vLLM flags can set."""
