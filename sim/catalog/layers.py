"""What a transformer layer is made of: its attention, and its mixture of experts where it has one."""

from __future__ import annotations

from dataclasses import dataclass

from sim.core.config import ConfigError

from .dtypes import kv_cache_dtype_name, kv_head_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """The attention of one kind of layer. Models with one kind have one; hybrids mix full and windowed layers."""

    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads: equal to `num_heads` for MHA, 1 for MQA, in between for GQA."""
    head_dim: int
    """Size of a head. Never derived from the hidden size where the model states it."""
    window: int | None = None
    """Sliding window in tokens; None reads every token."""
    kv_lora_rank: int | None = None
    """Rank of the compressed KV of multi-head latent attention (MLA); None for ordinary attention."""
    q_lora_rank: int | None = None
    """Rank of MLA's compressed query; None when the query is projected directly."""
    qk_rope_head_dim: int = 0
    """Part of an MLA head that carries the rotary position, stored once for all heads."""
    v_head_dim: int = 0
    """Size of an MLA value head."""

    @property
    def is_mla(self) -> bool:
        """True for multi-head latent attention."""
        return self.kv_lora_rank is not None

    @property
    def qk_head_dim(self) -> int:
        """Size over which scores are taken: `head_dim`, plus the rotary part for MLA."""
        return self.head_dim + self.qk_rope_head_dim

    def kv_heads_per_rank(self, tensor_parallel_size: int) -> int:
        """KV heads a rank holds: heads are replicated when there are more ranks than heads."""
        return max(1, self.num_kv_heads // tensor_parallel_size)

    def kv_bytes_per_token(self, kv_cache_dtype: str, dtype: str, tensor_parallel_size: int = 1) -> int:
        """KV bytes of one token in one layer on one rank.

        MLA stores one compressed vector, without a factor 2 and on every rank. **Source:** vLLM 0.29 KV cache specs.
        """
        if self.kv_lora_rank is not None:
            if kv_cache_dtype_name(kv_cache_dtype) == "fp8_ds_mla":
                # 512 fp8 numbers, one 4-byte scale for every 128 of them, and the rotary part in 16 bits.
                return self.kv_lora_rank + self.kv_lora_rank // 128 * 4 + self.qk_rope_head_dim * 2
            return kv_head_bytes(kv_cache_dtype, self.kv_lora_rank + self.qk_rope_head_dim, dtype)
        if kv_cache_dtype_name(kv_cache_dtype) == "fp8_ds_mla":
            raise ConfigError(
                "kv_cache_dtype fp8_ds_mla is a layout of multi-head latent attention; this model has none, use fp8"
            )
        per_vector = kv_head_bytes(kv_cache_dtype, self.head_dim, dtype)
        return 2 * self.kv_heads_per_rank(tensor_parallel_size) * per_vector


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeShape:
    """A mixture-of-experts feed-forward network."""

    num_experts: int
    """Routed experts a layer."""
    experts_per_token: int
    """Routed experts a token visits."""
    intermediate_size: int
    """Width of one routed expert."""
    shared_intermediate_size: int = 0
    """Width of the shared experts together; 0 when there are none."""
    first_dense_layers: int = 0
    """Leading layers that have an ordinary feed-forward network instead."""
    expert_bias: bool = False
    """Experts carry biases (gpt-oss)."""
    router_bias: bool = False
    """The router carries one number an expert beside its matrix (gpt-oss bias, DeepSeek-V3 score correction)."""
    shared_gate: bool = False
    """The shared expert has a gate of one row (Qwen2-MoE)."""
