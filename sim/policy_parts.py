"""The single objects of a policy that `[policy]` may name: further admission policies, the order of the queue, and the victim."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sim.core.admission import Admission, Every
from sim.core.config import ConfigError, EngineConfig
from sim.core.policies.names import ADMISSIONS, QUEUES
from sim.core.policies.presets import PRESETS, Preset
from sim.core.policy import Policy
from sim.core.preemption import VICTIMS
from sim.core.request import RequestSpec

from .policy_objects import Named, bound, factory, split
from .scenario_errors import ScenarioError

_PARTS_OF_ADMISSION = (
    "steady",
    "steps_of_no",
    "may_defer",
    "arrive",
    "may_start",
    "preempted",
    "withdraw",
    "diagnose",
)
"""What the engine asks of an `Admission`."""
_PARTS_OF_QUEUE = ("steady", "__len__", "add", "put_back", "started", "head", "pop", "discard")
"""And of a `WaitingQueue`."""
_RESERVATIONS = ("full-reservation", "contiguous-reservation")
"""Admission policies under which nobody is preempted."""
_CACHE_RUNGS = ("drop_cache", "no_reuse")
"""Actions of a ladder on what the prefix cache keeps."""


def with_parts(
    policy: Policy, preset: Preset, table: Mapping[str, Any], config: EngineConfig, lora_slots: int | None
) -> Policy:
    """The policy with what `[policy]` names. `lora_slots` are the adapters that the device holds, if the load asks for any.

    Raises ScenarioError for names and arguments that do not fit, ConfigError for parts that contradict each other.
    """
    policy = _with_queue(policy, table)
    entries = _entries(table["admission"])
    names = [name for name, _ in entries]
    policy = _with_victim(policy, preset, table["victim"], names)
    _check_given_once(names, table)
    if lora_slots is not None:
        _settle_adapter_slots(entries, lora_slots)
    if not entries:
        return policy
    makers = [_admission(name, arguments, config) for name, arguments in entries]
    before = policy.admission
    return replace(policy, admission=lambda config: Every([before(config), *(make(config) for make in makers)]))


def idle_parts(
    table: Mapping[str, Any], policy: Policy, config: EngineConfig, requests: Sequence[RequestSpec]
) -> list[str]:
    """What `[policy]` names and can do nothing, with this engine or this load, is probably not what was meant."""
    rungs = [] if policy.ladder is None else [rung.action for rung in policy.ladder.rungs]
    of_the_cache = [action for action in rungs if action in _CACHE_RUNGS]
    by_lora_slots = any(name == "lora-slots" for name, _ in _entries(table["admission"]))
    no_cache = not config.enable_prefix_caching
    never_saved = config.num_cpu_blocks > 0 and not PRESETS[table["policy"]](config).preempts and policy.ladder is None
    sentences = {
        f"num_cpu_blocks is {config.num_cpu_blocks}, but with the preset {table['policy']} nobody gives way, so nothing is saved there": (
            never_saved
        ),
        "admission lora-slots sets nobody aside: no request asks for an adapter; say which do ([workload] loras), or leave it out": (
            by_lora_slots and not any(spec.namespace.lora for spec in requests)
        ),
        f"eviction {table['eviction']} orders nothing: without prefix caching no block is kept": (
            no_cache and table["eviction"] != "lru"
        ),
        f"the ladder's {', '.join(of_the_cache)} can do nothing: without prefix caching no block is kept": (
            no_cache and bool(of_the_cache)
        ),
        f"guard_priority is {table['guard_priority']}, but there is no ladder from which it could spare anybody": (
            table["guard_priority"] != 0 and policy.ladder is None
        ),
        "displace_queued sends nobody away: all requests have one priority; give them several ([workload] priorities)": (
            table["displace_queued"] and len({spec.priority for spec in requests}) < 2
        ),
        "fork_samples forks nobody: every request has one sample; ask for more ([workload] n)": (
            table["fork_samples"] and all(spec.forking is None for spec in requests)
        ),
    }
    return [sentence for sentence, applies in sentences.items() if applies]


def _entries(given: Named | list[Named] | None) -> list[tuple[str, dict[str, Any]]]:
    """Names and arguments of the admission policies."""
    several = [] if given is None else given if isinstance(given, list) else [given]
    return [split(f"[policy] admission {index}", "policy", each) for index, each in enumerate(several)]


def _check_given_once(names: Sequence[str], table: Mapping[str, Any]) -> None:
    """Two limits of one kind contradict each other, or one of them does nothing. Raises ConfigError."""
    for name, key in (("max-in-flight", "max_num_queued_reqs"), ("max-queued-tokens", "max_num_queued_tokens")):
        if name in names and table[key] is not None:
            raise ConfigError(
                f"{key} is {table[key]}, and admission has {name}: two limits of one kind, whose times to come back contradict each other; "
                "leave one of them out"
            )
    for name in names:
        if (
            name in ADMISSIONS and name != "token-bucket" and names.count(name) > 1
        ):  # two rates, over a short and a long time, make sense
            raise ConfigError(f"admission has {name} {names.count(name)} times; one of each kind is enough")


def _settle_adapter_slots(entries: list[tuple[str, dict[str, Any]]], slots: int) -> None:
    """As vLLM: no more adapters run at once than the device holds, whether or not a policy says so."""
    named = [arguments for name, arguments in entries if name == "lora-slots"]
    if not named:
        entries.append(("lora-slots", {"max_loras": slots}))
    for arguments in named:
        wanted = arguments.setdefault("max_loras", slots)
        if isinstance(wanted, int) and wanted > slots:
            raise ConfigError(
                f"admission lora-slots lets {wanted} adapters run at once, but [engine] max_loras is {slots}: the device holds no more; "
                "lower the first or raise the second"
            )


def _admission(name: str, arguments: Mapping[str, Any], config: EngineConfig) -> Callable[[EngineConfig], Admission]:
    """Makes one admission policy; it is made once here, so that what is wrong with it is said now."""
    where = "[policy] admission"
    make = bound(where, name, factory(where, name, ADMISSIONS), arguments)
    made = make(config)
    lacking = [part for part in _PARTS_OF_ADMISSION if not hasattr(made, part)]
    if lacking:
        raise ScenarioError(
            f"{where} {name!r} makes a {type(made).__name__}, which has no {', '.join(lacking)}; derive it from "
            "sim.core.admission.AdmissionBase"
        )
    return make


def _with_queue(policy: Policy, table: Mapping[str, Any]) -> Policy:
    given = table["queue"]
    if given is None:
        return policy
    where = "[policy] queue"
    name, arguments = split(where, "order", given)
    make = factory(where, name, QUEUES)
    if ":" not in name:
        return replace(policy, queue=bound(where, name, make, arguments)(None))  # type: ignore[arg-type]  # none asks for settings
    lacking = [part for part in _PARTS_OF_QUEUE if not hasattr(make, part)] if inspect.isclass(make) else []
    if lacking:
        raise ScenarioError(
            f"{where} {name!r} has no {', '.join(lacking)}; a queue has what sim.core.waiting.WaitingQueue lists"
        )
    _check_head(where, name, make)
    bound(where, name, make, arguments, None)
    return replace(policy, queue=lambda view: make(view, **arguments))


def _check_head(where: str, name: str, make: Callable[..., Any]) -> None:
    """A ladder that keeps the unimportant out asks for the first of the others."""
    if not inspect.isclass(make):
        return
    try:
        inspect.signature(make.head).bind(None, important=True)  # type: ignore[attr-defined]  # it has one
    except TypeError as error:
        raise ScenarioError(
            f"{where} {name!r}: its head must take important = True, for the first of those whom a ladder spares: {error}"
        ) from None


def _with_victim(policy: Policy, preset: Preset, name: str | None, admissions: Sequence[str]) -> Policy:
    if name is None:
        return policy
    reserving = [each for each in admissions if each in _RESERVATIONS]
    if reserving or not preset.preempts:
        who = f"admission {reserving[0]}" if reserving else f"the preset {policy.name}"
        raise ConfigError(
            f"victim is {name!r}, but {who} reserves the worst case of everybody who runs: nobody gives way; leave victim out"
        )
    where = "[policy] victim"
    victim = factory(where, name, VICTIMS)
    try:
        inspect.signature(victim).bind({}, None)
    except (TypeError, ValueError) as error:
        raise ScenarioError(
            f"{where} {name!r} cannot be called with the running requests and their known tokens: {error}"
        ) from None
    return replace(policy, victim=victim)
