"""Weights of a decoder: drawn from a seed, or read from a folder of safetensors, or taken from a Hugging Face state dict.

Projections that read the same input are one matrix here (query, key and value; gate and up), so that a layer is four
matrix products.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sim.core.config import ConfigError

from .decoder_config import DecoderConfig
from .readings import storage_bytes
from .weight_files import open_folder

Progress = Callable[[int, int], None]
"""Hears how many layers are made, and of how many."""

DRAWN_ON_CPU = 1 << 27
"""Models up to this many parameters are drawn on the CPU, so that a seed means the same weights on every device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One transformer layer; matrices are `[outputs, inputs]`."""

    input_norm: Any
    qkv: Any
    """`[query_size + 2 * kv_size, hidden_size]`."""
    qkv_bias: Any
    """`[query_size + 2 * kv_size]`, or None."""
    query_norm: Any
    """`[head_dim]`, or None (Qwen3 has one)."""
    key_norm: Any
    out: Any
    """`[hidden_size, query_size]`."""
    out_bias: Any
    post_norm: Any
    gate_up: Any
    """`[2 * intermediate_size, hidden_size]`: gate rows, then up rows."""
    gate_up_bias: Any
    down: Any
    """`[hidden_size, intermediate_size]`."""
    down_bias: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """All weights of a decoder, on one device."""

    embedding: Any
    """`[vocab_size, hidden_size]`."""
    layers: tuple[LayerWeights, ...]
    final_norm: Any
    head: Any
    """`[vocab_size, hidden_size]`; the embedding itself when they are tied."""

    @property
    def tensors(self) -> list[Any]:
        """All of them; some share a storage."""
        tensors = [self.embedding, self.final_norm, self.head]
        for layer in self.layers:
            tensors += [tensor for name in LayerWeights.__slots__ if (tensor := getattr(layer, name)) is not None]
        return tensors

    @property
    def num_bytes(self) -> int:
        """Bytes of all storages, shared ones once."""
        return storage_bytes(self.tensors)

    def to(self, device: Any) -> DecoderWeights:
        """The same weights on `device`; themselves when they are there. Tied ones stay tied."""
        moved: dict[int, Any] = {}

        def on_device(tensor: Any) -> Any:
            if tensor is None:
                return None
            return moved.setdefault(id(tensor), tensor.to(device))

        return DecoderWeights(
            embedding=on_device(self.embedding),
            layers=tuple(
                LayerWeights(**{name: on_device(getattr(layer, name)) for name in LayerWeights.__slots__})
                for layer in self.layers
            ),
            final_norm=on_device(self.final_norm),
            head=on_device(self.head),
        )

    @classmethod
    def random(
        cls, config: DecoderConfig, *, seed: int, dtype: Any, device: Any, progress: Progress | None = None
    ) -> DecoderWeights:
        """Seeded random weights that keep the variance of what passes through them.

        The usual initialisation (standard deviation 0.02) lets a token's own embedding drown the context, so that a
        wrong KV block would hardly ever change an answer; here it does.
        """
        on_cpu = config.shape.num_parameters <= DRAWN_ON_CPU
        place = torch.device("cpu") if on_cpu else torch.device(device)

        def draw(name: str, shape: tuple[int, ...]) -> Any:
            if name.endswith("norm.weight"):
                return torch.ones(shape, dtype=dtype, device=device)
            digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
            generator = torch.Generator(device=place).manual_seed(int.from_bytes(digest, "big"))
            scale = 0.1 if name.endswith("bias") else 1.0 if "embed" in name else shape[-1] ** -0.5
            tensor = torch.empty(shape, dtype=torch.float32 if on_cpu else dtype, device=place)
            return tensor.normal_(0.0, scale, generator=generator).to(device=device, dtype=dtype)

        return cls._build(config, draw, progress)

    @classmethod
    def from_state(
        cls,
        config: DecoderConfig,
        state: Mapping[str, Any],
        *,
        dtype: Any,
        device: Any,
        progress: Progress | None = None,
    ) -> DecoderWeights:
        """Copies of tensors under their Hugging Face names.

        Raises:
            ConfigError: one is missing or has another shape.
        """

        def take(name: str, shape: tuple[int, ...]) -> Any:
            if name not in state:
                raise ConfigError(
                    f"the weights of {config.shape.name} have no {name}; they hold {len(state)} tensors, of another model perhaps"
                )
            tensor = state[name]
            if tuple(tensor.shape) != shape:
                raise ConfigError(f"{name} is {list(tensor.shape)}; {config.shape.name} needs {list(shape)}")
            return tensor.detach().to(device=device, dtype=dtype, copy=True)

        return cls._build(config, take, progress)

    @classmethod
    def from_folder(
        cls, config: DecoderConfig, folder: Path, *, dtype: Any, device: Any, progress: Progress | None = None
    ) -> DecoderWeights:
        """From the `*.safetensors` files of a folder.

        Raises:
            ConfigError: there are none, one cannot be read, or a tensor is missing, misshapen or of a format that cannot be run.
            MissingExtraError: the package safetensors is not installed.
        """
        with open_folder(folder) as state:
            return cls.from_state(config, state, dtype=dtype, device=device, progress=progress)

    @classmethod
    def _build(
        cls, config: DecoderConfig, get: Callable[[str, tuple[int, ...]], Any], progress: Progress | None
    ) -> DecoderWeights:
        shape = config.shape

        def layers() -> Iterator[LayerWeights]:
            for index in range(shape.num_layers):
                yield _layer(config, f"model.layers.{index}.", get)
                if progress is not None:
                    progress(index + 1, shape.num_layers)

        embedding = get("model.embed_tokens.weight", (shape.vocab_size, shape.hidden_size))
        tied = shape.tie_word_embeddings
        return cls(
            embedding=embedding,
            layers=tuple(layers()),
            final_norm=get("model.norm.weight", (shape.hidden_size,)),
            head=embedding if tied else get("lm_head.weight", (shape.vocab_size, shape.hidden_size)),
        )


def _layer(config: DecoderConfig, prefix: str, get: Callable[[str, tuple[int, ...]], Any]) -> LayerWeights:
    shape, hidden, wide = config.shape, config.shape.hidden_size, config.shape.intermediate_size
    rows = {"q_proj": config.query_size, "k_proj": config.kv_size, "v_proj": config.kv_size}

    def joined(part: str, sizes: dict[str, int], bias: bool) -> Any:
        if bias:
            return torch.cat([get(f"{prefix}{part}.{name}.bias", (size,)) for name, size in sizes.items()])
        return torch.cat([get(f"{prefix}{part}.{name}.weight", (size, hidden)) for name, size in sizes.items()])

    def optional(wanted: bool, name: str, size: int) -> Any:
        return get(prefix + name, (size,)) if wanted else None

    both = {"gate_proj": wide, "up_proj": wide}
    return LayerWeights(
        input_norm=get(f"{prefix}input_layernorm.weight", (hidden,)),
        qkv=joined("self_attn", rows, bias=False),
        qkv_bias=joined("self_attn", rows, bias=True) if shape.qkv_bias else None,
        query_norm=optional(shape.qk_norm, "self_attn.q_norm.weight", shape.head_dim),
        key_norm=optional(shape.qk_norm, "self_attn.k_norm.weight", shape.head_dim),
        out=get(f"{prefix}self_attn.o_proj.weight", (hidden, config.query_size)),
        out_bias=optional(shape.out_bias, "self_attn.o_proj.bias", hidden),
        post_norm=get(f"{prefix}post_attention_layernorm.weight", (hidden,)),
        gate_up=joined("mlp", both, bias=False),
        gate_up_bias=joined("mlp", both, bias=True) if shape.mlp_bias else None,
        down=get(f"{prefix}mlp.down_proj.weight", (hidden, wide)),
        down_bias=optional(shape.mlp_bias, "mlp.down_proj.bias", hidden),
    )
