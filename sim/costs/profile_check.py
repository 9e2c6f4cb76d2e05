"""What a profile file must say before any of its numbers is used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sim.core.config import ConfigError

SCHEMA = "kvtwin-profile"
SCHEMA_VERSION = 1
KINDS = ("model", "gpu")
PROVENANCE_KEYS = ("source", "licence", "engine", "date", "command")
"""What a profile must say of its origin."""
WORDS: dict[type, str] = {dict: "a table of lists of factors, by term", list: "a list of tables"}
_BODY = {"model": "terms", "gpu": "kernels"}


def check_profile(data: Any, where: str) -> None:
    """Check a document read from `where`.

    Raises: ConfigError when it is no profile, of another schema version, has another time unit, lacks provenance, error or
    range, or has a number that no measurement can give (not finite; a negative time, size or rate).
    """
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ConfigError(
            f'{where}: not a profile: its "schema" must be {SCHEMA!r}; `kvtwin calibrate fit` writes such files'
        )
    if data.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(
            f"{where}: schema version {data.get('schema_version')!r}, this version of kvtwin reads {SCHEMA_VERSION}; fit it again"
        )
    if data.get("time_unit") != "us":
        raise ConfigError(f"{where}: time_unit is {data.get('time_unit')!r}; times in a profile are in 'us'")
    if data.get("kind") not in KINDS:
        raise ConfigError(f"{where}: kind is {data.get('kind')!r}; it is one of {', '.join(KINDS)}")
    sections = ("provenance", "error", "range", "host", _BODY[data["kind"]])
    for key in ("name", "gpu", *sections):
        if key not in data:
            raise ConfigError(
                f"{where}: it does not say {key!r}; a profile without it cannot be judged and is not used"
            )
    for key in sections:
        if not isinstance(data[key], dict):
            raise ConfigError(f"{where}: {key} is {str(data[key])[:40]!r}; it must be a table of named values")
    for key in PROVENANCE_KEYS:
        if not data["provenance"].get(key):
            raise ConfigError(f"{where}: its provenance does not say {key!r}; a profile of unknown origin is not used")
    held_out = data["error"].get("held_out")
    if not isinstance(held_out, dict) or "median" not in held_out:
        raise ConfigError(f"{where}: its error does not say 'held_out' with a 'median'; it cannot be judged")
    if not data["error"].get("end_to_end"):
        raise ConfigError(
            f"{where}: its error does not say 'end_to_end', how it did on whole runs; it cannot be judged"
        )
    if data["kind"] == "model" and not data.get("model"):
        raise ConfigError(f"{where}: a model profile must say which model it was fitted to")
    ranks = data.get("tensor_parallel_size", 1)
    if not isinstance(ranks, int) or ranks < 1:
        raise ConfigError(f"{where}: tensor_parallel_size is {ranks!r}; it is a whole number of GPUs, 1 or more")
    for key, kind in (("samples", dict), ("drawn_terms", list)):
        if not isinstance(data.get(key, kind()), kind):
            raise ConfigError(
                f"{where}: {key} is {str(data[key])[:40]!r}; `kvtwin calibrate fit` writes it as {WORDS[kind]}"
            )
    _check_numbers(data.get("drawn_terms", []), where, "drawn_terms")
    for key in ("range", "host", _BODY[data["kind"]]):
        _check_numbers(data[key], where, key)


def _check_numbers(value: Any, where: str, path: str) -> None:
    """Every number below `value` is finite and at least 0."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _check_numbers(inner, where, f"{path}.{name}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _check_numbers(inner, where, f"{path}[{index}]")
    elif isinstance(value, (int, float)) and not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{where}: {path} is {value}; times, sizes and rates are finite and at least 0")
