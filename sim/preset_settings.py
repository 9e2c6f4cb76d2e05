"""What a scenario's preset makes of its settings: defaults where nothing was typed, a refusal where its engine cannot have what was."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from sim.core.policies.engine_settings import Setting, engine_settings, refusal

from .scenario_errors import Label, ScenarioError
from .scenario_tables import TABLE_OF_KEY

_KEYS = {"reserve_full_prompt": "scheduler_reserve_full_isl"}
"""Settings of `EngineConfig` that a scenario calls otherwise."""
_NAMES = {key: name for name, key in _KEYS.items()}


def key_of(name: str) -> str:
    """The key of a scenario that gives the setting `name` of `EngineConfig`."""
    return _KEYS.get(name, name)


def settings_of(preset: str, max_model_len: int = 1) -> dict[str, Setting]:
    """What a preset decides, by the keys of a scenario; only defaults of the engine depend on the longest sequence."""
    return {key_of(name): setting for name, setting in engine_settings(preset, max_model_len).items()}


def check_typed(preset: str, typed: Iterable[tuple[str, Any]], label: Label) -> None:
    """Refuse what the preset's engine cannot have. Raises ScenarioError, naming where it was typed, the reason and who can."""
    for key, value in typed:
        said = refusal(preset, _NAMES.get(key, key), value)
        if said is not None:
            shown = str(value).lower() if isinstance(value, bool) else repr(value)
            raise ScenarioError(f"{label(TABLE_OF_KEY[key], key)} is {shown}{said}")


def check_order(order: str | None, asked: str | None, label: Label) -> None:
    """Refuse two orders of one queue: the queue's own, and the one that a typed `scheduling_policy` asks for. Raises ScenarioError."""
    if order is not None and asked is not None and order != asked:
        raise ScenarioError(
            f"{label('policy', 'scheduling_policy')} is {asked!r}, but {label('policy', 'queue')} gives the order {order!r}; leave one of "
            "them out"
        )


def order_of(queue: str | Mapping[str, Any] | None) -> str | None:
    """The name of the order that `[policy] queue` gives."""
    return str(queue.get("order")) if isinstance(queue, Mapping) else queue


def fill_in(tables: Mapping[str, dict[str, Any]], max_model_len: int, typed: Collection[str]) -> set[str]:
    """Set what the preset decides and nobody typed, in the tables. Returns the keys."""
    decided = {
        key: setting.value
        for key, setting in settings_of(tables["policy"]["policy"], max_model_len).items()
        if key not in typed
    }
    for key, value in decided.items():
        tables[TABLE_OF_KEY[key]][key] = value
    return set(decided)


def caches_prefixes(preset: str, typed: bool | None) -> bool:
    """Whether an engine keeps blocks for reuse, when so much was typed."""
    if typed is not None:
        return typed
    setting = settings_of(preset).get("enable_prefix_caching")
    return True if setting is None else bool(setting.value)


def may_cache_prefixes(preset: str) -> bool:
    """Whether an engine has a prefix cache at all, on or off."""
    return refusal(preset, "enable_prefix_caching", True) is None
