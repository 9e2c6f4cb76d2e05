"""The tables of a scenario file: every key, its type, its range, its unit and its meaning.

Keys are the names of the command-line flags with underscores. None means "not given": the value then comes from the
model, the GPU or the workload when the scenario is resolved. Nothing here looks anything up.
"""

from __future__ import annotations

from pydantic import Field

from .scenario_keys import Table, file_only, has_flag
from .scenario_policy import PolicyTable
from .scenario_workload import WorkloadTable

__all__ = [
    "KEYS_WITHOUT_FLAG",
    "NAME_KEYS",
    "SWITCHES_BOTH_WAYS",
    "TABLES",
    "TABLE_NAMES",
    "TABLE_OF_KEY",
    "EngineTable",
    "GpuTable",
    "ModelTable",
    "PolicyTable",
    "RunTable",
    "Table",
    "WorkloadTable",
]


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
    kv_cache_memory_bytes: int | None = file_only(
        None, ge=1, description="bytes for the KV cache, instead of what the budget leaves"
    )
    enforce_eager: bool = file_only(False, description="no CUDA graphs")
    engine_version: str = Field(
        "0.29", min_length=1, description="release whose memory accounting is followed: 0.19, 0.9-v0, sglang-0.5 …"
    )
    speculative_model: str | None = file_only(None, min_length=1, description="a draft model, by name or config.json")
    num_speculative_tokens: int = file_only(
        0, ge=0, description="draft tokens a sequence and step, for the memory account"
    )
    draft_tensor_parallel_size: int = file_only(1, ge=1, description="GPUs that share the draft model")
    max_loras: int = file_only(0, ge=0, description="LoRA adapters held on the GPU at once")
    max_lora_rank: int = file_only(16, ge=1, description="rank that their slots are made for")
    encoder_tokens: int = file_only(0, ge=0, description="multimodal tokens encoded in one step")
    plain_attention: bool = file_only(False, description="attention falls back to writing out all scores")
    other_processes_bytes: int = file_only(0, ge=0, description="bytes that other processes hold on the GPU")
    enable_prefix_caching: bool = Field(True, description="keep full blocks for reuse")
    enable_chunked_prefill: bool = Field(True, description="let a prompt be computed over several steps")
    async_scheduling: bool = Field(False, description="plan a step while the one before it runs")
    vllm_args: str | None = Field(
        None, description="pasted flags of `vllm serve`; they fill in what no other key gives"
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
    memory_limit: bool | None = file_only(
        None,
        description="let steps fail that need more memory than the account leaves; default: unless the pool alone is more than the GPU",
    )
    workspace_bytes: int | None = file_only(
        None, ge=1, description="workspace of executor torch; default: what the largest step needs"
    )
    micro_batch_tokens: int | None = file_only(
        None, ge=1, description="executor torch: most tokens of one forward pass; a step of more is computed in several"
    )
    device_limit_bytes: int | None = file_only(
        None,
        ge=1,
        description="executor torch on the CPU: it has so many bytes, of which steps get what all else leaves",
    )
    faults: list[dict[str, str | float]] | None = file_only(
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
    key for table in TABLES.values() for key, field in table.model_fields.items() if not has_flag(field)
)
"""Keys that only a scenario file, Python or pasted vLLM flags can set."""
