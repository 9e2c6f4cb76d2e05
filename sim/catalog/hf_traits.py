"""What architectures have that their configuration files do not say.

**Source:** model classes of Transformers 4.4x to 5.x.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a layer of an architecture has that its configuration file does not say; as the fields of `ModelShape`."""

    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    norms: int = 2
    sinks: bool = False
    expert_bias: bool = False
    router_bias: bool = False
    shared_gate: bool = False
    windowed: bool = True
    """Default of `use_sliding_window` where the file leaves it out."""
    tied: bool = False
    """Default of `tie_word_embeddings` where the file leaves it out."""
    full_layers: int | None = None
    """Default of `max_window_layers`, the number of leading layers that read everything, where the file leaves it out."""
    kv_heads: int | None = None
    """Default of `num_key_value_heads` where the file leaves it out; None is as many as query heads."""
    head_dim: int | None = None
    """Default of `head_dim` where the file leaves it out; None is the hidden size divided over the query heads."""
    window: int | None = None
    """Default of `sliding_window` where the file leaves it out."""
    window_every: int = 0
    """Without `layer_types`: every n-th layer reads everything, the others a window; 0 means all layers have the window."""


LLAMA = Traits()
_DEEPSEEK_V3 = Traits(router_bias=True)
_QWEN_WINDOWS: dict[str, Any] = {"windowed": False, "window": 4096, "full_layers": 28}
ARCHITECTURES = {
    "llama": LLAMA,
    "mistral": Traits(kv_heads=8, window=4096),
    "mixtral": Traits(kv_heads=8),
    "granite": LLAMA,
    "phi3": LLAMA,
    "qwen2": Traits(qkv_bias=True, kv_heads=32, **_QWEN_WINDOWS),
    "qwen2_moe": Traits(qkv_bias=True, shared_gate=True, kv_heads=16, windowed=False, window=4096),
    "qwen3": Traits(qk_norm=True, kv_heads=32, head_dim=128, **_QWEN_WINDOWS),
    "qwen3_moe": Traits(qk_norm=True, kv_heads=4, windowed=False, window=4096),
    "gpt_oss": Traits(
        qkv_bias=True,
        out_bias=True,
        sinks=True,
        expert_bias=True,
        router_bias=True,
        kv_heads=8,
        head_dim=64,
        window=128,
        window_every=2,
    ),
    "deepseek_v2": LLAMA,
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "gemma": Traits(tied=True, kv_heads=16, head_dim=256),
    "gemma2": Traits(norms=4, tied=True, kv_heads=4, head_dim=256, window=4096, window_every=2),
    "gemma3_text": Traits(norms=4, qk_norm=True, tied=True, kv_heads=4, head_dim=256, window=4096, window_every=6),
}
"""By `model_type`."""
