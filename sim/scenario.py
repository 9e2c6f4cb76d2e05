"""A scenario: everything that determines a run, as a value.

It is read from a TOML file, made in Python, or changed by flags, and always checked as a whole, once, in its final form.
What it does not say (the engine's budgets on this GPU, the longest sequence of this model) `resolved()` fills in.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from .scenario_checks import check_choices, check_cpu_memory, check_preset, check_workload
from .scenario_errors import Label, ScenarioError, bad_values, shown, unknown_name
from .scenario_tables import (
    NAME_KEYS,
    TABLE_NAMES,
    TABLE_OF_KEY,
    TABLES,
    EngineTable,
    GpuTable,
    ModelTable,
    PolicyTable,
    RunTable,
    Table,
    WorkloadTable,
)
from .slo import Slo, SloError

__all__ = ["Scenario", "ScenarioError"]


class Scenario(BaseModel):
    """Everything that determines a run, with the tables of a scenario file as attributes. Frozen.

    A table is given as a mapping, or as its main value alone: `Scenario(model="llama-3.1-8b", gpu="h100-sxm-80gb",
    workload={"workload": "azure-conv", "rate": 4.0}, slo="ttft_p99=2.0")`. Raises ScenarioError.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: ModelTable
    gpu: GpuTable
    engine: EngineTable
    policy: PolicyTable
    workload: WorkloadTable
    slo: Slo | None
    run: RunTable

    def __init__(
        self,
        *,
        model: str | Mapping[str, Any] | ModelTable | None = None,
        gpu: str | Mapping[str, Any] | GpuTable | None = None,
        engine: Mapping[str, Any] | EngineTable | None = None,
        policy: str | Mapping[str, Any] | PolicyTable | None = None,
        workload: str | Mapping[str, Any] | WorkloadTable | None = None,
        slo: str | Mapping[str, Any] | Slo | None = None,
        run: Mapping[str, Any] | RunTable | None = None,
        **unknown: Any,
    ) -> None:
        given = {
            "model": model,
            "gpu": gpu,
            "engine": engine,
            "policy": policy,
            "workload": workload,
            "slo": slo,
            "run": run,
        }
        tables = _tables({**given, **unknown}, label=_python_label)
        super().__init__(**_validated(tables, _python_label))

    @classmethod
    def load(cls, path: str | Path, *, flags: Mapping[str, Any] | None = None) -> Self:
        """Read a TOML file; `flags`, by name with underscores, replace what the file says. Raises ScenarioError.

        A relative trace or model path is looked for beside the file first, then in the working directory.
        """
        path = Path(path)
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ScenarioError(f"{path}: cannot read the scenario: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ScenarioError(f"{path}: not a scenario file: it is not UTF-8 text") from None
        except tomllib.TOMLDecodeError as error:
            raise ScenarioError(f"{path}: not valid TOML: {error}") from None

        def in_file(table: str, key: str) -> str:
            return f"{path}: " + (f"[{table}] {key}" if key and table else f"[{table}]" if table else key)

        tables = _tables(data, label=in_file)
        for table, key in (("workload", "trace"), ("model", "model")):
            value = tables[table].get(key)
            if isinstance(value, str) and (path.parent / value).is_file():
                tables[table][key] = str(path.parent / value)
        return cls._changed(tables, flags or {}, in_file, _flag_label)

    @classmethod
    def from_flags(cls, flags: Mapping[str, Any]) -> Self:
        """A scenario given by flags alone, by name with underscores. Raises ScenarioError naming the flag."""
        return cls._changed({name: {} for name in TABLE_NAMES}, flags, _flag_label, _flag_label)

    def with_(self, **changes: Any) -> Self:
        """A copy with some keys changed, by name: `scenario.with_(rate=4.0, num_gpu_blocks_override=2000, slo="ttft_p99=1")`.

        A whole table (a mapping) changes the keys it has. A trace replaces a built-in workload and the reverse; None takes
        back what was given.
        Raises ScenarioError.
        """
        return self._changed(self.given(), changes, _python_label, _python_label)

    def resolved(self) -> dict[str, dict[str, Any]]:
        """Every key of every table with its final value, defaults of model and GPU filled in: plain JSON types. Raises ScenarioError."""
        from .resolve import resolve

        return resolve(self).as_dict()

    @classmethod
    def _changed(cls, tables: _Tables, changes: Mapping[str, Any], base: Label, label: Label) -> Self:
        changed: set[tuple[str, str]] = set()
        for table, keys in _tables(changes, label=label, loose=True).items():
            if table == "slo" and "slo" in changes:
                tables["slo"] = {}  # objectives are one statement: a new one replaces the old
            if table == "workload":
                _drop_other_source(tables["workload"], keys)
            tables[table].update(keys)
            changed.update((table, key) for key in keys)

        def where(table: str, key: str) -> str:
            return label(table, key) if (table, key) in changed else base(table, key)

        scenario = cls.__new__(cls)
        BaseModel.__init__(scenario, **_validated(tables, where))
        return scenario

    def given(self) -> _Tables:
        """What was given, without defaults."""
        tables = {name: getattr(self, name).model_dump(exclude_unset=True) for name in TABLES}
        return {**tables, "slo": dict(self.slo.as_dict()) if self.slo else {}}


_Tables = dict[str, dict[str, Any]]


def _python_label(table: str, key: str) -> str:
    return f"[{table}] {key}".strip() if table else repr(key)


def _flag_label(table: str, key: str) -> str:
    return "--" + (table if table == "slo" or not key else key).replace("_", "-")


def _tables(data: Mapping[str, Any], *, label: Label, loose: bool = False) -> _Tables:
    """`data` as one mapping a table: shorthands written out. With `loose`, keys may stand outside their table."""
    tables: _Tables = {name: {} for name in TABLE_NAMES}
    for name, value in data.items():
        if value is None and name in TABLE_NAMES:
            if loose and name in ("model", "gpu", "workload"):
                tables[name][name] = None
            continue
        if loose and name in TABLE_OF_KEY and not isinstance(value, Mapping | Table):
            tables[TABLE_OF_KEY[name]][name] = _plain(value)
        elif name not in TABLE_NAMES:
            raise unknown_name(name, label("", name))
        elif name == "slo":
            tables["slo"].update(_objectives(value, label))
        else:
            tables[name].update(_keys(name, value, label))
    return tables


def _keys(table: str, value: object, label: Label) -> dict[str, Any]:
    if isinstance(value, Table):
        return value.model_dump(exclude_unset=True)
    if not isinstance(value, Mapping):
        if table not in TABLES[table].model_fields:
            raise ScenarioError(f"{label(table, '')} is {shown(value)}; it must be a table of keys")
        return {table: value}
    keys = {str(key): _plain(item) for key, item in value.items()}
    for alias, owners in NAME_KEYS.items():
        if table in owners and alias in keys:
            if table in keys:
                raise ScenarioError(f"{label(table, alias)} and {label(table, table)} mean the same; give one of them")
            keys[table] = keys.pop(alias)
    return keys


def _objectives(value: object, label: Label) -> dict[str, Any]:
    if isinstance(value, Slo):
        return dict(value.as_dict())
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, str):
        try:
            return dict(Slo.parse(value).as_dict())
        except SloError as error:
            raise ScenarioError(f"{label('slo', '')}: {error}") from None
    raise ScenarioError(f"{label('slo', '')} is {shown(value)}; it must be objectives such as ttft_p99=2.0 (seconds)")


def _plain(value: Any) -> Any:
    """Numbers of array libraries as Python's own; "inf" as vLLM writes an infinite rate."""
    if value == "inf":
        return math.inf
    return value.item() if hasattr(value, "item") and not isinstance(value, Mapping) else value


def _drop_other_source(keys: dict[str, Any], changes: dict[str, Any]) -> None:
    for source, other in (("trace", "workload"), ("workload", "trace")):
        if changes.get(source) is not None and changes.get(other) is None:
            keys.pop(other, None)


def _validated(tables: _Tables, label: Label) -> dict[str, Any]:
    """The tables as checked values; the first thing that is wrong raises ScenarioError."""
    checked: dict[str, Any] = {}
    for name, table in TABLES.items():
        try:
            checked[name] = table.model_validate(tables[name])
        except ValidationError as error:
            raise bad_values(name, tables[name], error, label) from None
    try:
        checked["slo"] = Slo.of(tables["slo"]) if tables["slo"] else None
    except SloError as error:
        raise ScenarioError(f"{label('slo', '')}: {error}") from None
    check_workload(checked["workload"], label)
    check_choices(checked["policy"], checked["run"], label)
    check_preset(checked["engine"], checked["policy"], label)
    check_cpu_memory(checked["engine"], checked["policy"], checked["run"], label)
    return checked
