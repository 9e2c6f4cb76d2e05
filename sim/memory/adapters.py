"""Slots for LoRA adapters: two thin matrices beside every matrix of a layer, for every adapter held at once.

**Source:** vLLM `lora/layers` (`create_lora_weights`): column-parallel layers keep A whole and split B, row-parallel layers split A and
keep B whole; a fused projection has one A for each of its parts.
"""

from __future__ import annotations

from sim.catalog.dtypes import DTYPE_BYTES
from sim.catalog.shape import ModelShape
from sim.core.config import ConfigError

from .ops import Op
from .settings import Settings


def lora_ops(model: ModelShape, settings: Settings, layers: range) -> tuple[Op, ...]:
    """Adapter slots on one rank; none when adapters are off.

    Raises:
        ConfigError: the model has parts whose adapters kvtwin does not size.
    """
    slots, rank = settings.max_loras, settings.max_lora_rank
    if not slots:
        return ()
    if model.moe is not None or any(kind.is_mla for kind in model.attention):
        raise ConfigError(
            f"max_loras is {slots}, but {model.name} has experts or latent attention, whose adapters kvtwin does not size; use 0"
        )
    element, tp = DTYPE_BYTES[settings.dtype], settings.tensor_parallel_size
    numbers = 0
    for layer in layers:
        kind, hidden, wide = model.attention_at(layer), model.hidden_size, -(-model.intermediate_size // tp)
        query = kind.num_heads // tp * kind.head_dim
        kv = kind.kv_heads_per_rank(tp) * kind.head_dim
        parts = 2 if model.gated_mlp else 1
        numbers += 3 * hidden + query + 2 * kv  # A three times, B of query, key and value
        numbers += query + hidden  # output projection
        numbers += parts * (hidden + wide) + wide + hidden  # gate and up, down
    return (
        Op(
            name="adapter slots",
            requested_bytes=slots * rank * numbers * element,
            formula=f"{slots} adapters x rank {rank} x {numbers} x {element} B",
        ),
    )
