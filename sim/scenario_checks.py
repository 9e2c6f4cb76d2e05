"""What is wrong between the keys of a scenario, each of which is right by itself. Every check raises ScenarioError."""

from __future__ import annotations

from sim.core.policies import PRESETS

from .preset_settings import caches_prefixes, check_order, check_typed, may_cache_prefixes, order_of
from .scenario_errors import Label, ScenarioError, choices
from .scenario_tables import EngineTable, PolicyTable, RunTable, WorkloadTable

EXECUTORS: tuple[str, ...] = ("model", "torch")
"""What can carry out a step: a cost model, or a real forward pass on a device."""
POLICIES: tuple[str, ...] = tuple(PRESETS)
"""Presets of the engine's decisions."""


def check_workload(workload: WorkloadTable, label: Label) -> None:
    """Where requests come from, and how many sequences they have."""
    if workload.trace is not None and workload.workload is not None:
        raise ScenarioError(
            f"{label('workload', 'trace')} ({workload.trace}) and {label('workload', 'workload')} ({workload.workload}) are both "
            "given; requests come from one of them"
        )
    if workload.n > 1 and workload.beam_width > 1:
        raise ScenarioError(
            f"{label('workload', 'n')} ({workload.n}) and {label('workload', 'beam_width')} ({workload.beam_width}) are both above 1; a "
            "request has samples or beams, not both"
        )
    if workload.beam_change is not None and workload.beam_width == 1:
        raise ScenarioError(
            f"{label('workload', 'beam_change')} ({workload.beam_change:g}) is about beams, but there are none; give beam_width too"
        )
    if workload.trace is not None and workload.burstiness is not None and workload.rate is None:
        raise ScenarioError(
            f"{label('workload', 'burstiness')} shapes random arrivals, but a trace without a rate is replayed at its own times; "
            "give a rate too, or leave burstiness out"
        )


def check_cpu_memory(engine: EngineTable, policy: PolicyTable, run: RunTable, label: Label) -> None:
    """Keys about what is kept where, of which one is without effect, or impossible, because of another. A default that is spelt out
    is no mistake: the scenario in a summary spells out all of them.
    """
    given = {key for key, field in PolicyTable.model_fields.items() if getattr(policy, key) != field.default}
    blocks, tier = policy.num_cpu_prefix_blocks, label("policy", "num_cpu_prefix_blocks")
    typed = engine.enable_prefix_caching if "enable_prefix_caching" in engine.model_fields_set else None
    if blocks and engine.vllm_args is None and not caches_prefixes(policy.policy, typed):
        where = label("engine", "enable_prefix_caching") if typed is not None else f"the preset {policy.policy}"
        remedy = "enable it" if may_cache_prefixes(policy.policy) else "use another preset"
        raise ScenarioError(
            f"{tier} is {blocks}, but prefix caching is off ({where}): nothing saved there would ever "
            f"be looked for; {remedy}, or leave the CPU prefix tier out"
        )
    if "cpu_prefix_mode" in given and not blocks:
        raise ScenarioError(
            f"{label('policy', 'cpu_prefix_mode')} is {policy.cpu_prefix_mode!r}, but there is no CPU prefix tier; give {tier}, or leave "
            "the mode out"
        )
    if policy.retention is not None and policy.eviction != "retention":
        raise ScenarioError(
            f"{label('policy', 'retention')} is given, but {label('policy', 'eviction')} is {policy.eviction!r}, which ignores it; set "
            "eviction to 'retention', or leave the ranges out"
        )
    if policy.cpu_token_s is not None and not policy.num_cpu_blocks:
        raise ScenarioError(
            f"{label('policy', 'cpu_token_s')} is {policy.cpu_token_s:g}, but the CPU executor has no room for KV; give "
            f"{label('policy', 'num_cpu_blocks')}, or leave the CPU executor out"
        )
    if "cpu_max_num_seqs" in given and policy.cpu_token_s is None:
        raise ScenarioError(
            f"{label('policy', 'cpu_max_num_seqs')} is given, but there is no CPU executor; give "
            f"{label('policy', 'cpu_token_s')}, or leave it out"
        )
    watches = any(rung.get("signal") == "workspace" for rung in policy.ladder or ())
    if watches and run.executor != "torch" and run.memory_limit is False:
        raise ScenarioError(
            f"{label('policy', 'ladder')} has a rung with the signal 'workspace', which only a device with a memory limit knows; "
            "use another signal, or leave memory_limit = false out"
        )


def check_preset(engine: EngineTable, policy: PolicyTable, label: Label) -> None:
    """What was typed and the preset's engine cannot have, and a queue with two orders."""
    for table in (engine, policy):
        check_typed(policy.policy, table.model_dump(exclude_unset=True).items(), label)
    asked = policy.scheduling_policy if "scheduling_policy" in policy.model_fields_set else None
    check_order(order_of(policy.queue), asked, label)


def check_choices(policy: PolicyTable, run: RunTable, label: Label) -> None:
    """The preset, what carries out the steps, and on which device."""
    for table, key, value, known in (
        ("policy", "policy", policy.policy, POLICIES),
        ("run", "executor", run.executor, EXECUTORS),
    ):
        if value not in known:
            raise ScenarioError(f"{label(table, key)} is {value!r}; {choices(value, known)}")
    if run.executor == "torch":
        _check_device(run.device, label)
        if run.device_limit_bytes is not None and run.device not in (None, "cpu"):
            raise ScenarioError(
                f"{label('run', 'device_limit_bytes')} limits the CPU, but the device is {run.device!r}; a GPU has its own limit"
            )
        return
    for key in ("micro_batch_tokens", "device_limit_bytes", "workspace_bytes"):
        if getattr(run, key) is not None:
            raise ScenarioError(
                f"{label('run', key)} is for executor torch, but executor {run.executor} computes nothing on a device; leave it out"
            )
    if run.device is not None:
        raise ScenarioError(
            f"{label('run', 'device')} is {run.device!r}, but executor {run.executor} computes nothing on a device; leave it out"
        )


def _check_device(device: str | None, label: Label) -> None:
    kind, _, index = (device or "cpu").partition(":")
    if kind not in ("cpu", "cuda") or (index and not (kind == "cuda" and index.isdigit())):
        raise ScenarioError(f"{label('run', 'device')} is {device!r}; it must be cpu, cuda or cuda:N")
