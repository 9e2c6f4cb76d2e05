"""DecoderConfig: what a forward pass must know of a model beyond the sizes that memory follows from.

Pure Python. The families Llama, Qwen2, Qwen3 and Mistral are one decoder with switches: biases on the query, key and value
projections (Qwen2), normalised queries and keys (Qwen3), a sliding window (Mistral) or one in some layers (Qwen2, Qwen3), rotary
scaling (Llama 3.1).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.catalog.models import MODELS
from sim.catalog.shape import ModelShape
from sim.core.config import ConfigError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type` that this decoder computes as Hugging Face `transformers` does."""

LACKING = {
    "gpt_oss": "attention sinks and experts",
    "gemma2": "capped attention scores and logits, and four norms a layer",
    "gemma3_text": "four norms a layer, and a rotary base for window layers",
}
"""What other families with several attention groups have that this decoder does not compute."""


KINDS = ("default", "linear", "llama3")
"""Values of `rope_type` that can be computed."""


def _number(values: Mapping[str, Any], key: str, otherwise: float, where: str) -> float:
    """A number above 0 of a configuration; `otherwise` where it is left out or null. Raises ConfigError."""
    value = values.get(key)
    if value is None:
        return otherwise
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{where}: {key} is {value!r}; a number above 0 was expected")
    return float(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryConfig:
    """Rotary position embedding. **Source:** `modeling_rope_utils.py`, transformers."""

    theta: float = 10_000.0
    """Base of the wave lengths. A shape from the catalogue does not state it; random weights do not mind."""
    kind: str = "default"
    """`default`, `linear` (positions divided by `factor`) or `llama3` (long waves stretched by `factor`)."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: float = 8192
    """`llama3`: the length before stretching, from which "long" is told."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"rope_type {self.kind!r} cannot be computed here; {', '.join(KINDS)} can")

    @classmethod
    def from_values(cls, values: Mapping[str, Any], where: str = "config.json") -> RotaryConfig:
        """From a parsed `config.json`: `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4).

        Raises:
            ConfigError: a kind of scaling that this decoder does not compute, or a value that is no number; names the file `where`.
        """
        stated: dict[str, Any] = {}
        for table in ("rope_scaling", "rope_parameters"):
            given = values.get(table) or {}
            if not isinstance(given, Mapping):
                raise ConfigError(
                    f"{where}: {table} is {given!r}; an object such as {{'rope_type': 'llama3', …}} was expected"
                )
            stated |= {key: value for key, value in given.items() if value is not None}
        kind = str(stated.get("rope_type") or stated.get("type") or "default")
        if kind not in KINDS:
            raise ConfigError(f"{where}: rope_type {kind!r} cannot be computed here; {', '.join(KINDS)} can")
        theta = _number({**values, **stated}, "rope_theta", 10_000.0, where)
        keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        return cls(theta=theta, kind=kind, **{key: _number(stated, key, 1.0, where) for key in keys if key in stated})

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


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """One decoder of a supported family."""

    shape: ModelShape
    """Sizes, biases and windows."""
    rotary: RotaryConfig = RotaryConfig()
    rms_norm_eps: float = 1e-6
    """Added to the mean square before the root."""

    def __post_init__(self) -> None:
        shape = self.shape
        lacking = f", with {LACKING[shape.architecture]}" if shape.architecture in LACKING else ""
        problems = {
            f"its architecture is {shape.architecture}{lacking}; {', '.join(FAMILIES)} can be": shape.architecture
            not in FAMILIES,
            "it is a mixture of experts": shape.moe is not None,
            "its attention is latent": any(kind.is_mla for kind in shape.attention),
            "its layers differ in heads": len({(k.num_heads, k.num_kv_heads, k.head_dim) for k in shape.attention}) > 1,
            f"its weights are quantised ({shape.quantization}); plain ones can be": shape.quantization is not None,
        }
        for problem, found in problems.items():
            if found:
                raise ConfigError(f"model {shape.name} cannot be run for real: {problem}")

    @classmethod
    def of(cls, shape: ModelShape, source: str | Path | None = None) -> DecoderConfig:
        """The decoder of `shape`; rotary base and epsilon are read from `source`, when that is a `config.json` or its folder.

        Raises:
            ConfigError: a model that this decoder does not compute.
        """
        file = None if source is None or str(source) in MODELS else Path(source)
        if file is not None and file.is_dir():
            file = file / "config.json"
        if file is None or not file.is_file():
            return cls(shape=shape)
        return cls.from_values(shape, json.loads(file.read_text(encoding="utf-8")), str(file))

    @classmethod
    def from_values(cls, shape: ModelShape, values: Mapping[str, Any], where: str = "config.json") -> DecoderConfig:
        """The same, from a parsed `config.json`, which messages call `where`."""
        activation = values.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise ConfigError(f"model {shape.name} cannot be run for real: its activation is {activation}, not silu")
        return cls(
            shape=shape,
            rotary=RotaryConfig.from_values(values, where),
            rms_norm_eps=_number(values, "rms_norm_eps", 1e-6, where),
        )

    @property
    def head_dim(self) -> int:
        """Numbers in a head."""
        return self.shape.head_dim

    @property
    def query_size(self) -> int:
        """Columns of all query heads."""
        return self.shape.num_attention_heads * self.shape.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of all key heads (equally: value heads)."""
        return self.shape.num_kv_heads * self.shape.head_dim

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer, in tokens."""
        return self.shape.attention_at(layer).window
