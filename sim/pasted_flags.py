"""Pasted flags of `vllm serve`, merged with the keys of a scenario."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .preset_settings import check_order, check_typed, key_of, order_of
from .scenario_errors import ScenarioError
from .scenario_tables import TABLE_OF_KEY, TABLES

if TYPE_CHECKING:
    from .scenario import Scenario


def with_pasted_flags(scenario: Scenario) -> tuple[dict[str, dict[str, Any]], list[str], set[str]]:
    """All keys with their values; what to say of pasted flags; and the keys that those gave.

    Pasted `vllm serve` flags fill in what no key gave, and may not contradict one.
    """
    tables = {name: getattr(scenario, name).model_dump() for name in TABLES}
    pasted = scenario.engine.vllm_args
    if pasted is None:
        return tables, [], set()
    from sim.catalog.vllm_args import parse_vllm_args

    parsed = parse_vllm_args(pasted)
    ignored = list(parsed.ignored)
    settings = {key_of(name): value for name, value in parsed.settings.items()}
    policy = tables["policy"]
    check_typed(policy["policy"], settings.items(), _in_pasted_flags)
    check_order(order_of(policy["queue"]), _asked_order(settings), _in_pasted_flags)
    for key, value in settings.items():
        table = TABLE_OF_KEY.get(key)
        if table is None:
            ignored.append(f"--{key.replace('_', '-')}")
            continue
        given = getattr(scenario, table)
        if key in given.model_fields_set and getattr(given, key) not in (None, value):
            raise ScenarioError(
                f"[{table}] {key} is {getattr(given, key)!r}, but vllm_args says {value!r}; give it once, or the same value twice"
            )
        tables[table][key] = value
    note = "pasted vLLM flags that have no effect here: " + ", ".join(ignored)
    return tables, [note] if ignored else [], set(settings)


def _asked_order(settings: Mapping[str, object]) -> str | None:
    asked = settings.get("scheduling_policy")
    return None if asked is None else str(asked)


def _in_pasted_flags(_table: str, key: str) -> str:
    return f"--{key.replace('_', '-')} of the pasted vLLM flags"
