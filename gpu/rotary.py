"""RotaryConfig: rotary position embedding, as a `config.json` states it. Pure Python.

**Source:** `modeling_rope_utils.py`, transformers 5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sim.core.config import ConfigError

KINDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Kinds of scaling that can be computed, and the numbers that each must be given."""

_ROPE_KEYS = ("rope_theta", "rope_type", "type", "partial_rotary_factor", *KINDS["llama3"])
"""Keys with a meaning here. Others belong to kinds that are refused, or give each kind of layer a rotation of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryConfig:
    """Wave lengths of the rotation. The whole head is rotated."""

    theta: float = 10_000.0
    """Base of the wave lengths. A shape from the catalogue does not state it; random weights do not mind."""
    kind: str = "default"
    """`default`, `linear` (positions divided by `factor`) or `llama3` (long waves stretched by `factor`)."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    """`llama3`: the length before stretching, from which "long" is told."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"rope_type {self.kind!r} cannot be computed here; {', '.join(KINDS)} can")

    @classmethod
    def from_values(cls, values: Mapping[str, Any], where: str = "config.json") -> RotaryConfig:
        """From a parsed `config.json`: `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4), which wins.

        Raises:
            ConfigError: a kind of scaling that this decoder does not compute, a key that it would read past, a number that is missing or
                is none; names the file `where`.
        """
        try:
            return cls._from_tables(values)
        except ConfigError as problem:
            raise ConfigError(f"{where}: {problem}") from None

    @classmethod
    def _from_tables(cls, values: Mapping[str, Any]) -> RotaryConfig:
        table = next((name for name in ("rope_scaling", "rope_parameters") if values.get(name)), None)
        stated = {} if table is None else values[table]
        if not isinstance(stated, Mapping):
            raise ConfigError(f"{table} is {stated!r}; an object such as {{'rope_type': 'llama3', …}} was expected")
        kind = str(stated.get("rope_type") or stated.get("type") or "default")
        theta = stated.get("rope_theta", values.get("rope_theta", 10_000.0))
        numbers = {key: stated[key] for key in KINDS.get(kind, ()) if key in stated}
        if kind == "llama3":
            outside = values.get("original_max_position_embeddings")
            inside = numbers.get("original_max_position_embeddings", values.get("max_position_embeddings"))
            numbers["original_max_position_embeddings"] = inside if outside is None else outside
        made = cls(
            kind=kind, theta=_number("rope_theta", theta), **{key: _number(key, n) for key, n in numbers.items()}
        )
        _check_keys(stated, kind, numbers)
        return made

    def inverse_frequencies(self, rotary_dim: int) -> list[float]:
        """Radians a position for each of the `rotary_dim / 2` pairs."""
        plain = [self.theta ** (-index / rotary_dim) for index in range(0, rotary_dim, 2)]
        if self.kind == "linear":
            return [frequency / self.factor for frequency in plain]
        return [self._stretched(frequency) for frequency in plain] if self.kind == "llama3" else plain

    def _stretched(self, frequency: float) -> float:
        """Llama 3.1: waves longer than the original context are stretched, short ones kept, those between blended."""
        length, wave = self.original_max_position_embeddings, 2 * math.pi / frequency
        if wave > length / self.low_freq_factor:
            return frequency / self.factor
        if wave < length / self.high_freq_factor:
            return frequency
        blend = (length / wave - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return (1 - blend) * frequency / self.factor + blend * frequency


def _number(key: str, value: object) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{key} is {value!r}; a number above 0 was expected")
    return value


def _check_keys(stated: Mapping[str, Any], kind: str, numbers: Mapping[str, Any]) -> None:
    for key in stated:
        if key not in _ROPE_KEYS:
            raise ConfigError(
                f"the rotary embedding has a key {key!r}, which is not computed here; {', '.join(_ROPE_KEYS)} are understood"
            )
    if stated.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ConfigError(
            f"partial_rotary_factor is {stated['partial_rotary_factor']!r}, but here the whole head is rotated; leave it out"
        )
    missing = [key for key in KINDS[kind] if key not in numbers]
    if missing:
        raise ConfigError(f"rope_type {kind!r} needs {', '.join(missing)}, which the configuration does not give")
