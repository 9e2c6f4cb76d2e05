"""Reads a Hugging Face `config.json` into a `ModelShape`.

The file states sizes; which vectors a layer has beside its matrices (biases, query and key norms) is a matter of the
architecture and comes from a table here. An architecture that is not in it is read as a Llama, and the shape says so.

**Source:** configuration classes of Transformers 4.4x to 5.x.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sim.core.config import ConfigError

from .dtypes import dtype_name, weight_format
from .hf_traits import ARCHITECTURES, LLAMA, Traits
from .layers import AttentionShape, MoeShape
from .shape import ModelShape


class _Reader:
    """Typed access to one configuration, with errors that name the file and the key."""

    def __init__(self, source: str, values: dict[str, Any]) -> None:
        self.source = source
        self.values = values

    def error(self, key: str, problem: str) -> ConfigError:
        return ConfigError(f"{self.source}: {key} {problem}")

    def optional(self, *keys: str) -> int | None:
        """The first of `keys` that is there, as a whole number; None when all are absent or null."""
        for key in keys:
            value = self.values.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise self.error(key, f"is {value!r}; a whole number was expected")
            if value < 0:
                raise self.error(key, f"is {value}; it cannot be negative")
            return value
        return None

    def stated_or(self, key: str, default: int | None) -> int | None:
        """As `optional`, with the architecture's `default` where the file leaves `key` out; null is no such default."""
        return self.optional(key) if key in self.values else default

    def integer(self, *keys: str) -> int:
        """As `optional`, but one of the keys must be there and be at least 1."""
        value = self.optional(*keys)
        if value is None:
            raise self.error(" or ".join(keys), "is missing; it is needed to size the model")
        if value < 1:
            raise self.error(keys[0], f"is {value}; it must be at least 1")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, f"is {value!r}; true or false was expected")
        return value


def read_config(path: Path) -> ModelShape:
    """The shape described by the `config.json` at `path`.

    Raises:
        ConfigError: the file is missing or not a model configuration; the message names the file and the key.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; a model is a catalogue name or the path of a config.json") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{path}: cannot be read ({problem})") from None
    except json.JSONDecodeError as problem:
        raise ConfigError(f"{path}: line {problem.lineno}, column {problem.colno}: not JSON ({problem.msg})") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a JSON object was expected, as in a model's config.json")
    name = values.get("_name_or_path") or (path.parent.name if path.name == "config.json" else path.stem)
    return shape_from_config(values, name=str(name) or path.stem, source=str(path))


def shape_from_config(values: dict[str, Any], *, name: str, source: str = "config.json") -> ModelShape:
    """The shape described by a parsed configuration; `source` is what errors call it.

    Multimodal configurations nest the language model in `text_config`: that part is read, the encoder is not counted.

    Raises:
        ConfigError: a size is missing, of the wrong type, or contradicts another.
    """
    notes: list[str] = []
    values, nested = language_model(values)
    if nested is not None:
        notes.append(f"{name}: only the language model in {nested} is counted; encoders of other media are not")
    config = _Reader(source, values)
    architecture = str(values.get("model_type", "llama"))
    traits = ARCHITECTURES.get(architecture)
    if traits is None:
        notes.append(
            f"{name}: architecture {architecture!r} is not known; it is counted as a Llama with the sizes in the file"
        )
        traits = LLAMA
    layers = config.integer("num_hidden_layers")
    attention, of_layer = _attention(config, layers, traits)
    return ModelShape(
        name=name,
        architecture=architecture,
        num_layers=layers,
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.optional("intermediate_size")
        or config.integer("moe_intermediate_size", "intermediate_size"),
        vocab_size=config.integer("vocab_size"),
        max_position_embeddings=config.integer("max_position_embeddings"),
        attention=attention,
        attention_of_layer=of_layer,
        moe=_moe(config, traits),
        dtype=_dtype(config),
        quantization=_quantization(config),
        tie_word_embeddings=config.flag("tie_word_embeddings", traits.tied),
        qkv_bias=config.flag("attention_bias", traits.qkv_bias),
        out_bias=traits.out_bias or (config.flag("attention_bias", False) and not traits.qkv_bias),
        mlp_bias=config.flag("mlp_bias", False),
        qk_norm=traits.qk_norm,
        attention_sinks=traits.sinks,
        norms_per_layer=traits.norms,
        rotary_dim=config.optional("qk_rope_head_dim") or 0,
        notes=tuple(notes),
    )


def _dtype(config: _Reader) -> str:
    """The format of the weights as published."""
    for key in ("torch_dtype", "dtype"):
        stated = config.values.get(key)
        if stated:
            try:
                return dtype_name(str(stated))
            except ConfigError as problem:
                raise config.error(key, f"is {stated!r}: {problem}") from None
    return "bfloat16"


def language_model(values: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """What a parsed configuration says of its language model, and the key that this stands under; None where it is the whole file."""
    for nested in ("text_config", "llm_config", "language_config"):
        if isinstance(values.get(nested), dict):
            # Keys such as torch_dtype, tie_word_embeddings and quantization_config often stand outside only.
            return {**{key: values[key] for key in _SHARED_KEYS if key in values}, **values[nested]}, nested
    return values, None


_SHARED_KEYS = (
    "torch_dtype",
    "dtype",
    "tie_word_embeddings",
    "quantization_config",
    "max_position_embeddings",
    "vocab_size",
)


def _attention(config: _Reader, layers: int, traits: Traits) -> tuple[tuple[AttentionShape, ...], tuple[int, ...]]:
    """The kinds of attention layer, and which layer has which."""
    heads = config.integer("num_attention_heads")
    rank = config.optional("kv_lora_rank")
    if rank:
        # DeepSeek files carry num_key_value_heads too; it plays no part in what is stored.
        return (
            AttentionShape(
                num_heads=heads,
                num_kv_heads=heads,
                head_dim=config.integer("qk_nope_head_dim"),
                kv_lora_rank=rank,
                q_lora_rank=config.optional("q_lora_rank") or None,
                qk_rope_head_dim=config.integer("qk_rope_head_dim"),
                v_head_dim=config.integer("v_head_dim"),
            ),
        ), ()
    shared = 1 if config.flag("multi_query", False) else heads
    kv_heads = config.stated_or("num_key_value_heads", traits.kv_heads) or shared
    head_dim = config.stated_or("head_dim", traits.head_dim)
    if not head_dim:
        hidden = config.integer("hidden_size")
        if hidden % heads:
            raise config.error(
                "num_attention_heads",
                f"is {heads}, which does not divide hidden_size {hidden}, and head_dim is not given",
            )
        head_dim = hidden // heads
    if heads % kv_heads:
        raise config.error("num_key_value_heads", f"is {kv_heads}, which does not divide num_attention_heads {heads}")
    full = AttentionShape(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
    window = (
        config.stated_or("sliding_window", traits.window)
        if config.flag("use_sliding_window", traits.windowed)
        else None
    )
    pattern = _windowed_layers(config, layers, traits)
    if not window:
        return (full,), ()
    windowed = AttentionShape(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, window=window)
    if all(pattern):
        return (windowed,), ()
    if not any(pattern):
        return (full,), ()
    # Full layers may have heads of their own (gemma-4).
    full = AttentionShape(
        num_heads=heads,
        num_kv_heads=config.optional("num_global_key_value_heads") or kv_heads,
        head_dim=config.optional("global_head_dim") or head_dim,
    )
    return (windowed, full), tuple(0 if inside else 1 for inside in pattern)


def _windowed_layers(config: _Reader, layers: int, traits: Traits) -> list[bool]:
    """For every layer: does it read only a window?"""
    types = config.values.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != layers:
            raise config.error("layer_types", f"must list one type for each of the {layers} layers")
        for kind in types:
            if kind not in ("full_attention", "sliding_attention"):
                raise config.error(
                    "layer_types", f"has {kind!r}; kvtwin sizes full_attention and sliding_attention layers"
                )
        return [kind == "sliding_attention" for kind in types]
    every = config.optional("sliding_window_pattern", "_sliding_window_pattern") or traits.window_every
    if every:
        return [(layer + 1) % every != 0 for layer in range(layers)]
    first = config.optional("max_window_layers")
    if first is None:
        first = traits.full_layers
    if first is not None and "use_sliding_window" in config.values:
        return [layer >= first for layer in range(layers)]
    return [True] * layers


def _moe(config: _Reader, traits: Traits) -> MoeShape | None:
    experts = config.optional("num_experts", "num_local_experts", "n_routed_experts")
    if not experts:
        return None
    width = config.integer("moe_intermediate_size", "intermediate_size")
    shared = config.optional("shared_expert_intermediate_size") or (config.optional("n_shared_experts") or 0) * width
    return MoeShape(
        num_experts=experts,
        experts_per_token=config.integer("num_experts_per_tok", "experts_per_token", "top_k_experts"),
        intermediate_size=width,
        shared_intermediate_size=shared,
        first_dense_layers=config.optional("first_k_dense_replace") or 0,
        expert_bias=traits.expert_bias,
        router_bias=traits.router_bias,
        shared_gate=traits.shared_gate,
    )


def _quantization(config: _Reader) -> str | None:
    """The storage format of `quantization_config`, by our name."""
    stated = config.values.get("quantization_config")
    if stated is None:
        return None
    if not isinstance(stated, dict):
        raise config.error("quantization_config", "must be an object")
    method = str(stated.get("quant_method", "")).replace("-", "_")
    if method == "fp8" and stated.get("weight_block_size"):
        return "fp8_block"
    if method == "compressed_tensors":
        text = json.dumps(stated).lower()
        method = "gptq" if '"num_bits": 4' in text else "fp8" if '"float"' in text else "int8"
    if method == "modelopt":
        method = "nvfp4" if "fp4" in json.dumps(stated).lower() else "fp8"
    if method == "bitsandbytes" and not stated.get("load_in_4bit"):
        method = "int8"
    try:
        form = weight_format(method)
    except ConfigError as problem:
        raise config.error("quantization_config.quant_method", f"is {method!r}: {problem}") from None
    return form.name if form else None
