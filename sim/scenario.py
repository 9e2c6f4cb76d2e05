"""A scenario: everything that determines a run, as a value.

It is read from a TOML file, made in Python, or changed by flags, and always checked as a whole, once, in its final form.
What it does not say (the engine's budgets on this GPU, the longest sequence of this model) `resolved()` fills in.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from sim.core.policies import PRESETS

from .scenario_errors import ScenarioError, bad_values, nearest, shown, unknown_name
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

EXECUTORS: tuple[str, ...] = ("model", "torch")
"""What can carry out a step: a cost model, or a real forward pass on a device."""
POLICIES: tuple[str, ...] = tuple(PRESETS)
"""Presets of the engine's decisions."""


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
    def _changed(cls, tables: _Tables, changes: Mapping[str, Any], base: _Label, label: _Label) -> Self:
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
_Label = Callable[[str, str], str]
"""(table, key) -> the place as the user wrote it; an empty key means the table itself, an empty table the top level."""


def _python_label(table: str, key: str) -> str:
    return f"[{table}] {key}".strip() if table else repr(key)


def _flag_label(table: str, key: str) -> str:
    return "--" + (table if table == "slo" or not key else key).replace("_", "-")


def _tables(data: Mapping[str, Any], *, label: _Label, loose: bool = False) -> _Tables:
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


def _keys(table: str, value: object, label: _Label) -> dict[str, Any]:
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


def _objectives(value: object, label: _Label) -> dict[str, Any]:
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


def _validated(tables: _Tables, label: _Label) -> dict[str, Any]:
    """The tables as checked values; the first thing that is wrong raises ScenarioError."""
    checked: dict[str, Any] = {}
    for name, table in TABLES.items():
        try:
            checked[name] = table.model_validate(tables[name])
        except ValidationError as error:
            raise bad_values(name, error, label) from None
    try:
        checked["slo"] = Slo.of(tables["slo"]) if tables["slo"] else None
    except SloError as error:
        raise ScenarioError(f"{label('slo', '')}: {error}") from None
    _check_workload(checked["workload"], label)
    _check_choices(checked["policy"], checked["run"], label)
    _check_cpu_memory(checked["engine"], checked["policy"], checked["run"], label)
    return checked


def _check_workload(workload: WorkloadTable, label: _Label) -> None:
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


def _check_cpu_memory(engine: EngineTable, policy: PolicyTable, run: RunTable, label: _Label) -> None:
    """Keys about what is kept where, of which one is without effect, or impossible, because of another. A default that is spelt out
    is no mistake: the scenario in a summary spells out all of them.
    """
    given = {key for key, field in PolicyTable.model_fields.items() if getattr(policy, key) != field.default}
    blocks, tier = policy.num_cpu_prefix_blocks, label("policy", "num_cpu_prefix_blocks")
    if blocks and not engine.enable_prefix_caching:
        raise ScenarioError(
            f"{tier} is {blocks}, but prefix caching is off ({label('engine', 'enable_prefix_caching')}): nothing saved there would ever "
            "be looked for; enable it, or leave the CPU prefix tier out"
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


def _check_choices(policy: PolicyTable, run: RunTable, label: _Label) -> None:
    for table, key, value, known in (
        ("policy", "policy", policy.policy, POLICIES),
        ("run", "executor", run.executor, EXECUTORS),
    ):
        if value not in known:
            raise ScenarioError(
                f"{label(table, key)} is {value!r}; nearest is {nearest(value, known)} (this version has {', '.join(known)})"
            )
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


def _check_device(device: str | None, label: _Label) -> None:
    kind, _, index = (device or "cpu").partition(":")
    if kind not in ("cpu", "cuda") or (index and not (kind == "cuda" and index.isdigit())):
        raise ScenarioError(f"{label('run', 'device')} is {device!r}; it must be cpu, cuda or cuda:N")
