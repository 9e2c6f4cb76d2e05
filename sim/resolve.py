"""From what a scenario says to what runs: pasted flags merged, the GPU's and the model's defaults filled in, contradictions refused."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._version import __version__
from .budgets import fill_budgets, why_whole
from .pasted_flags import with_pasted_flags
from .preset_settings import fill_in, order_of
from .scenario_errors import ScenarioError, choices
from .scenario_tables import TABLE_OF_KEY, TABLES

if TYPE_CHECKING:
    from sim.catalog.gpus import Gpu
    from sim.catalog.shape import ModelShape
    from sim.memory import Ledger
    from sim.memory.measured import MeasuredMemory

    from .scenario import Scenario
    from .slo import Slo

ROOFLINE = "roofline"
"""The default cost model: a GPU's data sheet with stated factors."""
DEFAULT_NUM_REQUESTS = 1000
"""Requests of a built-in workload when neither a number nor a duration is given."""

_LEDGER_KEYS = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "kv_cache_dtype",
    "block_size",
    "gpu_memory_utilization",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "num_gpu_blocks_override",
    "kv_cache_memory_bytes",
    "enforce_eager",
    "engine_version",
    "speculative_model",
    "num_speculative_tokens",
    "draft_tensor_parallel_size",
    "max_loras",
    "max_lora_rank",
    "encoder_tokens",
    "plain_attention",
    "other_processes_bytes",
)

TYPED, PASTED, PRESET = "given", "pasted", "preset"
"""Where a setting came from: a key or flag, pasted vLLM flags, or the preset of the policy."""

HOW_NOT_WHAT = ("stepping", "check")
"""Keys of `[run]` that change how a run is computed and nothing of what comes of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A scenario with nothing left open."""

    tables: dict[str, dict[str, Any]]
    """Every key of every table with its final value; None only where nothing applies."""
    model: ModelShape
    gpu: Gpu
    ledger: Ledger
    """The memory account, which sizes the pool."""
    slo: Slo | None
    warnings: tuple[str, ...]
    """Sentences for the user: what was pasted and had no effect, what to know about the memory account."""
    origins: Mapping[str, str]
    """Where settings of the engine and its policy came from, by key: TYPED, PASTED, or PRESET where it differs from vLLM V1's. The others
    are defaults.
    """

    def __getitem__(self, table: str) -> dict[str, Any]:
        return self.tables[table]

    def settings(self) -> dict[str, dict[str, Any]]:
        """What is no default, by key: its value, and `from` where it came."""
        return {key: {"value": self[TABLE_OF_KEY[key]][key], "from": place} for key, place in self.origins.items()}

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """The tables in JSON's own types; an infinite rate is the text "inf", as vLLM writes it."""
        slo = self.slo.as_dict() if self.slo else {}
        plain = {name: {key: _json(value) for key, value in keys.items()} for name, keys in self.tables.items()}
        policy = plain["policy"]
        if order_of(self["policy"]["queue"]) not in (None, policy["scheduling_policy"]):
            del policy["scheduling_policy"]  # the queue has an order of its own
        return {**plain, "slo": dict(slo)}

    def what_was_run(self) -> dict[str, dict[str, Any]]:
        """The same without the keys that say how the run is computed: leaping or stepping, a run is the same run (I13)."""
        tables = self.as_dict()
        return {**tables, "run": {key: value for key, value in tables["run"].items() if key not in HOW_NOT_WHAT}}


def resolve(scenario: Scenario) -> Resolved:
    """Fill in every default of `scenario` and draw up the memory account.

    Raises ScenarioError, or ConfigError for an unknown model or GPU and for what does not fit.
    """
    from sim.memory import build_ledger

    draft = _draft(scenario)
    ledger = build_ledger(**draft.ledger_settings)
    engine = draft.tables["engine"]
    engine["max_model_len"] = ledger.max_model_len
    engine["gpu_memory_utilization"] = ledger.gpu_memory_utilization
    return Resolved(
        tables=draft.tables,
        model=draft.ledger_settings["model"],
        gpu=draft.ledger_settings["gpu"],
        ledger=ledger,
        slo=scenario.slo,
        warnings=(*draft.warnings, *ledger.warnings),
        origins=draft.origins,
    )


def ledger_settings(scenario: Scenario) -> dict[str, Any]:
    """The arguments of `build_ledger` that `scenario` comes to, whether or not they fit the GPU.

    Raises ScenarioError, or ConfigError for an unknown model or GPU.
    """
    return dict(_draft(scenario).ledger_settings)


def least_budget(scenario: Scenario) -> int:
    """Fewest tokens that a step of `scenario` may be limited to: a whole prompt, where prompts are not computed in chunks.

    Raises as `ledger_settings`.
    """
    draft = _draft(scenario)
    engine = draft.tables["engine"]
    if engine["enable_chunked_prefill"]:
        return 1
    return int(engine["max_model_len"] or draft.ledger_settings["model"].max_position_embeddings)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    """A scenario resolved up to the memory account."""

    tables: dict[str, dict[str, Any]]
    ledger_settings: dict[str, Any]
    warnings: list[str]
    origins: dict[str, str]


def _draft(scenario: Scenario) -> _Draft:
    from sim.catalog.gpus import gpu
    from sim.catalog.models import model_shape
    from sim.memory.defaults import step_defaults
    from sim.memory.releases import engine_release

    tables, warnings, pasted = with_pasted_flags(scenario)
    host = _prepare_device(tables, warnings)
    for table, flag in (("model", "--model llama-3.1-8b"), ("gpu", "--gpu h100-sxm-80gb")):
        if tables[table][table] is None:
            raise ScenarioError(f"no {table} is given; for example {flag}, or {table} = … in [{table}]")
    model, device = model_shape(tables["model"]["model"]), host or gpu(tables["gpu"]["gpu"])
    engine, typed = tables["engine"], {key for table in ("engine", "policy") for key in _typed(scenario, table)}
    given = typed | pasted
    longest = engine["max_model_len"] or model.max_position_embeddings
    release = engine_release(engine["engine_version"], device.compute_capability)
    if "enable_chunked_prefill" not in given:
        engine["enable_chunked_prefill"] = longest > release.whole_prompts_up_to
    decided = fill_in(tables, longest, given)
    limits = step_defaults(device, release, longest, chunked_prefill=engine["enable_chunked_prefill"])
    fill_budgets(
        engine,
        longest,
        limits.max_num_batched_tokens,
        limits.max_num_seqs,
        device.name,
        why_whole(tables, given, release),
    )
    _fill_workload(tables["workload"])
    settings = {key: engine[key] for key in _LEDGER_KEYS}
    if "gpu_memory_utilization" not in given:
        settings["gpu_memory_utilization"] = None  # the release's own default
    settings |= {
        "model": model,
        "gpu": device,
        "dtype": tables["model"]["dtype"],
        "quantization": tables["model"]["quantization"],
        "watermark": tables["policy"]["watermark"],
    }
    settings["measured"] = _measured_memory(tables, model, device, warnings, engine_given="engine_version" in given)
    return _Draft(
        tables=tables, ledger_settings=settings, warnings=warnings, origins=_origins(tables, typed, pasted, decided)
    )


def _origins(
    tables: Mapping[str, dict[str, Any]], typed: Collection[str], pasted: Collection[str], decided: Collection[str]
) -> dict[str, str]:
    """Where settings came from, in the order of the tables."""
    found = {}
    for table in ("engine", "policy"):
        for key, field in TABLES[table].model_fields.items():
            if key in ("vllm_args", "policy"):
                continue
            if key in typed or key in pasted:
                found[key] = TYPED if key in typed else PASTED
            elif key in decided and tables[table][key] != field.default:
                found[key] = PRESET
    return found


def _typed(scenario: Scenario, table: str) -> set[str]:
    """Keys that have a value because somebody said so; None takes back what was said."""
    values = getattr(scenario, table)
    return {key for key in values.model_fields_set if getattr(values, key) is not None}


def _measured_memory(
    tables: dict[str, dict[str, Any]], model: ModelShape, device: Gpu, warnings: list[str], *, engine_given: bool
) -> MeasuredMemory | None:
    """The memory lines of the scenario's profile, where it has any; None, and why, where another engine was asked for by name."""
    from sim.costs.fitted import AUTO, memory_profile, profile_names
    from sim.memory.measured_file import read_measured

    chosen, known = tables["gpu"]["profile"], (ROOFLINE, AUTO, *profile_names())
    if chosen == ROOFLINE:
        return None
    if chosen not in known and not Path(chosen).is_file():
        raise ScenarioError(f"[gpu] profile is {chosen!r}, which is no file; by name {choices(chosen, known)}")
    profile = memory_profile(chosen, model, device, tables["engine"]["tensor_parallel_size"])
    if profile is None:
        return None
    measured, unusable = read_measured(profile.data, profile.where)
    if unusable is not None:
        warnings.append(unusable)
    if measured is not None and not measured.engine.startswith(f"kvtwin executor {__version__},"):
        warnings.append(
            f"the memory lines of profile {measured.profile} are those of {measured.engine}; this is kvtwin {__version__}"
        )
    if measured is not None and engine_given:
        warnings.append(
            f"the memory lines of profile {measured.profile} are left out of the account: they were measured with {measured.engine}, not "
            f"with engine_version {tables['engine']['engine_version']}; leave engine_version out to use them"
        )
        return None
    return measured


def _prepare_device(tables: dict[str, dict[str, Any]], warnings: list[str]) -> Gpu | None:
    """What executor torch runs on: cpu where nothing is said. Returns the CPU as a device when it is named, or no GPU is and the
    run is on it.
    """
    from sim.catalog.host import HOST

    run, engine, gpu = tables["run"], tables["engine"], tables["gpu"]
    on_host = str(gpu["gpu"]).lower() == HOST.name
    if run["executor"] != "torch":
        if on_host:
            gpu["gpu"] = HOST.name
            _bound_cpu_cache(engine, warnings)
        return HOST if on_host else None
    for key in ("tensor_parallel_size", "pipeline_parallel_size"):
        if engine[key] != 1:
            raise ScenarioError(f"{key} is {engine[key]}, but executor torch runs on one device; leave it at 1")
    run["device"] = run["device"] or "cpu"
    if run["device"] != "cpu":
        return None
    _bound_cpu_cache(engine, warnings)
    if gpu["gpu"] is not None and not on_host:
        warnings.append(
            f"memory is accounted for as on {gpu['gpu']}, but the steps are run and timed on the CPU; leave the GPU out, or give a "
            "CUDA device"
        )
        return None
    gpu["gpu"] = HOST.name
    return HOST


def _bound_cpu_cache(engine: dict[str, Any], warnings: list[str]) -> None:
    """The KV cache of a run on the CPU is not to take the machine's whole memory."""
    from sim.catalog.host import CPU_KV_CACHE_BYTES

    if engine["num_gpu_blocks_override"] is None and engine["kv_cache_memory_bytes"] is None:
        engine["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES
        warnings.append(
            f"the KV cache on the CPU has {CPU_KV_CACHE_BYTES >> 20} MiB; --num-gpu-blocks-override says otherwise"
        )


def _fill_workload(workload: dict[str, Any]) -> None:
    if workload["workload"] is None:
        return
    if workload["num_requests"] is None and workload["duration"] is None:
        workload["num_requests"] = DEFAULT_NUM_REQUESTS
    if workload["rate"] is None and workload["max_concurrency"] is not None:
        # Closed loop: the clients, not a clock, set the pace, as in `vllm bench serve --max-concurrency`.
        workload["rate"] = math.inf


def _json(value: object) -> object:
    return "inf" if value == math.inf else value
