"""From the table `[policy]` to the policy object."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from sim.core.admission import Admission, Every
from sim.core.batching import Batching, BatchLimits, check_batching
from sim.core.config import ConfigError, EngineConfig
from sim.core.cpu_server import CpuExecutor
from sim.core.policies import PRESETS, MaxInFlight, MaxQueuedTokens
from sim.core.policy import Policy
from sim.core.retention import Retention
from sim.core.rungs import LadderConfig, Rung, check_ladder, standard_ladder

from .policy_parts import with_parts


def choose_policy(
    table: Mapping[str, Any], config: EngineConfig, ttft_limit_s: float | None = None, lora_slots: int | None = None
) -> Policy:
    """The policy that `[policy]` asks for, of an engine whose settings are as its preset has them; the preset `ladder` is tuned to the TTFT
    objective, if any, and no more than `lora_slots` adapters run at once, if the load asks for adapters.

    Raises ScenarioError for a plug-in that cannot be loaded, ConfigError for a combination no engine could run with.
    """
    preset = PRESETS[table["policy"]](config)
    policy = preset.policy
    if table["eviction"] != "lru":
        ranges = tuple(_range(index, each) for index, each in enumerate(table["retention"] or ()))
        policy = replace(policy, eviction=table["eviction"], retention=ranges)
    policy = _with_batching(policy, table)
    check_batching(policy.batching, policy.limits, config)
    if config.num_cpu_blocks:
        policy = replace(policy, swap=True)
    if table["cpu_token_s"] is not None:
        cpu = CpuExecutor(token_s=table["cpu_token_s"], max_num_seqs=table["cpu_max_num_seqs"])
        cpu.check(config)
        policy = replace(policy, cpu_executor=cpu)
    if table["ladder"] is not None:
        rungs = tuple(_rung(index, rung) for index, rung in enumerate(table["ladder"]))
        policy = replace(policy, ladder=LadderConfig(rungs=rungs, guard_priority=table["guard_priority"]))
    elif policy.ladder is not None:
        limit = {} if ttft_limit_s is None else {"ttft_limit_s": ttft_limit_s}
        policy = replace(policy, ladder=standard_ladder(**limit, guard_priority=table["guard_priority"]))
    if policy.ladder is not None:
        check_ladder(
            policy.ladder,
            swap=policy.swap,
            tier=config.num_cpu_prefix_blocks > 0,
            cpu=policy.cpu_executor is not None,
        )
    policy = _with_front_door(policy, table)
    return with_parts(policy, preset, table, config, lora_slots)


def _with_front_door(policy: Policy, table: Mapping[str, Any]) -> Policy:
    """The limits on what may be in the engine, asked after the preset's admission."""
    requests, tokens, displace = (
        table[key] for key in ("max_num_queued_reqs", "max_num_queued_tokens", "displace_queued")
    )
    if displace and requests is None:
        raise ConfigError(
            "displace_queued lets important requests into a full queue, but no queue is full: set max_num_queued_reqs"
        )
    if requests is None and tokens is None:
        return policy
    preset = policy.admission

    def admission(config: EngineConfig) -> Admission:
        doors: list[Admission] = [preset(config)]
        if tokens is not None:
            doors.append(MaxQueuedTokens(tokens))
        if requests is not None:
            doors.append(MaxInFlight(requests, displace=displace))
        return Every(doors)

    return replace(policy, admission=admission)


def _with_batching(policy: Policy, table: Mapping[str, Any]) -> Policy:
    """What the table says of who may share a step; the rest is the preset's."""
    if table["batching"] is not None:
        policy = replace(policy, batching=Batching(table["batching"]))
    given = {field.name: table[field.name] for field in fields(BatchLimits) if table[field.name] is not None}
    return replace(policy, limits=replace(policy.limits, **given)) if given else policy


def _rung(index: int, rung: Mapping[str, Any]) -> Rung:
    known = ("action", "signal", "on", "off", "hold_s", "value")
    for key in rung:
        if key not in known:
            raise ConfigError(f"rung {index} of the ladder has a key {key!r}; known are {', '.join(known)}")
    for key in ("action", "on", "off"):
        if key not in rung:
            raise ConfigError(f"rung {index} of the ladder has no {key!r}; it needs action, on and off")
    for key, value in rung.items():
        if key in ("action", "signal"):
            if not isinstance(value, str):
                raise ConfigError(f"rung {index} of the ladder: {key} is {value!r}; it must be text")
        elif not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"rung {index} of the ladder: {key} is {value!r}; it must be a number")
    signal = rung.get("signal", "kv_usage")
    if signal in ("kv_usage", "shortage") and rung["on"] > 1:
        raise ConfigError(
            f"rung {index} of the ladder goes on at {rung['on']:g}, but {signal} is a share of the pool: it never would"
        )
    return Rung(**rung)


def _range(index: int, given: Mapping[str, Any]) -> Retention:
    known = ("priority", "start", "end", "duration_s", "output")
    for key in given:
        if key not in known:
            raise ConfigError(f"range {index} of the retention has a key {key!r}; known are {', '.join(known)}")
    if "priority" not in given:
        raise ConfigError(f"range {index} of the retention has no 'priority'; it needs one from 0 to 100")
    for key in ("priority", "start", "end"):
        if type(given.get(key, 0)) is not int:
            raise ConfigError(f"range {index} of the retention: {key} is {given[key]!r}; it must be a whole number")
    if type(given.get("output", False)) is not bool:
        raise ConfigError(f"range {index} of the retention: output is {given['output']!r}; it must be true or false")
    return Retention(**given)
