"""DecoderConfig: what a forward pass must know of a model beyond the sizes that memory follows from.

Pure Python. The families Llama, Qwen2, Qwen3 and Mistral are one decoder with switches: biases on the query, key and value
projections (Qwen2), normalised queries and keys (Qwen3), a sliding window (Mistral) or one in some layers (Qwen2, Qwen3), rotary
scaling (`rotary`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sim.catalog.hf_config import language_model
from sim.catalog.models import MODELS
from sim.catalog.shape import ModelShape
from sim.core.config import ConfigError

from .rotary import RotaryConfig

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type` that this decoder computes as Hugging Face `transformers` does."""

MISTRAL_WINDOW = 4096
"""Window of a Mistral whose configuration does not state one; null is none."""

LACKING = {
    "gpt_oss": "attention sinks and experts",
    "gemma2": "capped attention scores and logits, and four norms a layer",
    "gemma3_text": "four norms a layer, and a rotary base for window layers",
}
"""What other families with several attention groups have that this decoder does not compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """One decoder of a supported family."""

    shape: ModelShape
    """Sizes, biases and windows."""
    rotary: RotaryConfig = field(default_factory=RotaryConfig)
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
        """The same, from a parsed `config.json`, which messages call `where`.

        Raises:
            ConfigError: a model that this decoder does not compute, or a key that `shape` follows and the family's model does not.
        """
        stated, _ = language_model(dict(values))
        for problem in _problems(shape, stated):
            raise ConfigError(f"{where}: model {shape.name} cannot be run for real: {problem}")
        return cls(
            shape=shape,
            rotary=RotaryConfig.from_values(stated, where),
            rms_norm_eps=float(stated.get("rms_norm_eps", 1e-6)),
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


_UNREAD: dict[str, object] = {
    "multi_query": False,
    "partial_rotary_factor": 1.0,
    "per_layer_config": None,
    "sliding_window_pattern": None,
    "_sliding_window_pattern": None,
}
"""Keys that no family's model class follows, or that this decoder does not, and the value that changes nothing."""


def _problems(shape: ModelShape, stated: Mapping[str, Any]) -> Iterator[str]:
    """What in a family's configuration this decoder would read past, or otherwise than the family's model class does."""
    if stated.get("model_type") is None:
        yield f"its configuration has no model_type; {', '.join(FAMILIES)} can be"
    activation, eps = stated.get("hidden_act", "silu"), stated.get("rms_norm_eps", 1e-6)
    if activation not in ("silu", "swish"):
        yield f"its activation is {activation}, not silu"
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not eps > 0:
        yield f"its rms_norm_eps is {eps!r}; a number above 0 was expected"
    for key, neutral in _UNREAD.items():
        if stated.get(key) not in (None, neutral):
            yield f"its {key} is {stated[key]!r}, which is not computed; leave it out"
    for what, (ours, theirs) in _layers(shape, stated).items():
        if ours != theirs:
            yield f"its configuration asks for {what} {ours}, and models of the family {shape.architecture} have {theirs}"


def _layers(shape: ModelShape, stated: Mapping[str, Any]) -> dict[str, tuple[object, object]]:
    """What the layers have, by `shape`, which follows the same keys whatever the family, and by the family's model class.

    **Source:** `modeling_llama.py`, `modeling_mistral.py`, `modeling_qwen2.py`, `modeling_qwen3.py`, transformers 5.
    """
    family = shape.architecture
    biased = family in ("llama", "qwen3") and bool(stated.get("attention_bias"))
    compared: dict[str, tuple[object, object]] = {
        "biases of query, key and value": (shape.qkv_bias, biased or family == "qwen2"),
        "a bias of the attention's output": (shape.out_bias, biased),
        "biases of the feed-forward part": (shape.mlp_bias, family == "llama" and bool(stated.get("mlp_bias"))),
    }
    if family in ("llama", "mistral"):  # whose window, if any, is that of every layer, whatever layer_types say
        window = stated.get("sliding_window", MISTRAL_WINDOW) if family == "mistral" else None
        windows = [kind.window for kind in map(shape.attention_at, range(shape.num_layers))]
        compared["windows"] = (windows, [window] * shape.num_layers)
    return compared
