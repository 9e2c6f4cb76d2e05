"""Reading the memory lines of a profile document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sim.core.config import ConfigError

from .measured import LIMIT_TERMS, LIMITS, STEP_TERMS, MeasuredLine, MeasuredMemory, Phases

SCHEMA_VERSION = 1
"""Of the part `memory` of a profile. Parts of fits before it have no version: no range, no uncertainty, and are not used."""


def read_measured(document: Mapping[str, Any], where: str) -> tuple[MeasuredMemory | None, str | None]:
    """The memory lines of a profile document, and why it has none that can be used although something is there.

    Raises:
        ConfigError: its memory lines are of another schema version, or malformed.
    """
    memory = document.get("memory")
    if memory is None:
        return None, None
    if not isinstance(memory, Mapping):
        raise ConfigError(f"{where}: memory is {str(memory)[:40]!r}; it must be a table of named values")
    version = memory.get("schema_version")
    if version is None:
        return None, (
            f"the memory lines of profile {document['name']} have no range and no uncertainty (an earlier kvtwin fitted them) and are "
            "left out of the account; measure and fit again"
        )
    if version != SCHEMA_VERSION:
        raise ConfigError(
            f"{where}: its memory lines have schema version {version!r}, this version of kvtwin reads {SCHEMA_VERSION}; fit it again"
        )
    try:
        return _read(document, memory), None
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: a memory line is missing or malformed: {type(error).__name__} {error}") from error


def _read(document: Mapping[str, Any], memory: Mapping[str, Any]) -> MeasuredMemory:
    low, high = map(float, memory["workspace_interval"])
    if not -1 < low <= 0 <= high:
        raise ValueError(f"workspace_interval is [{low}, {high}]; it must hold 0 and lie above -1")
    return MeasuredMemory(
        profile=str(document["name"]),
        engine=str(memory["engine"]),
        gpu=str(document["gpu"]),
        model=str(document["model"]),
        model_sizes=dict(document["model_sizes"]),
        dtype=str(document["dtype"]),
        kv_cache_dtype=str(document["kv_cache_dtype"]),
        limits={name: _count(memory["limits"][name]) for name in LIMITS},
        lines={
            name: MeasuredLine(
                bytes=_count(line["bytes"]),
                low_bytes=None if line["low_bytes"] is None else _count(line["low_bytes"]),
                high_bytes=None if line["high_bytes"] is None else _count(line["high_bytes"]),
                how=str(line["how"]),
            )
            for name, line in memory["lines"].items()
        },
        workspace=_phases(memory["workspace_phases"], tuple(STEP_TERMS)),
        workspace_interval=(low, high),
        buffers=_phases(memory["buffers_phases"], tuple(LIMIT_TERMS)),
        buffers_error=float(memory["buffers_error"]),
        reserved=_phases(memory["reserved_phases"], tuple(LIMIT_TERMS)),
        reserved_error=float(memory["reserved_error"]),
    )


def _count(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no number of bytes or tokens")
    return value


def _phases(given: Sequence[Mapping[str, Any]], terms: tuple[str, ...]) -> Phases:
    found = tuple({term: float(phase[term]) for term in terms} for phase in given)
    if not found or any(not 0 <= value < float("inf") for phase in found for value in phase.values()):
        raise ValueError("phases are one or more tables of finite numbers, at least 0")
    return found
