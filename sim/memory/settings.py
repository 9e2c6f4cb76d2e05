"""The engine settings that memory depends on, resolved: no defaults left to fill in."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sim.catalog.dtypes import WeightFormat
from sim.catalog.shape import ModelShape

from .releases import EngineRelease


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One engine's settings, by vLLM's names where it has one."""

    tensor_parallel_size: int
    """Ranks a layer is split over."""
    pipeline_parallel_size: int
    """Stages the layers are split over."""
    dtype: str
    """Format of activations and of weights that are not quantised."""
    weight_format: WeightFormat | None
    """Storage of quantised weights, or None."""
    kv_cache_dtype: str
    """Format of the KV cache; `auto` is `dtype`."""
    block_size: int
    """Tokens a block."""
    gpu_memory_utilization: float
    """Share of the physical total that is budgeted; SGLang's mem_fraction_static, of what is free before loading."""
    max_model_len: int
    """Longest sequence, in tokens."""
    max_num_seqs: int
    """Most sequences in one step."""
    max_num_batched_tokens: int
    """Most tokens in one step: what start-up profiling runs."""
    kv_cache_memory_bytes: int | None
    """Size of the pool as ordered; overrides what the budget leaves."""
    enforce_eager: bool
    """No compilation and no CUDA graphs."""
    release: EngineRelease
    """The engine release whose behaviour is followed."""
    draft: ModelShape | None = None
    """A draft model for speculation, on the first rank."""
    draft_tensor_parallel_size: int = 1
    """Ranks the draft model is split over."""
    num_speculative_tokens: int = 0
    """Draft tokens a sequence and step, K."""
    max_loras: int = 0
    """Adapters held on the device at once."""
    max_lora_rank: int = 16
    """Rank their slots are made for."""
    encoder_tokens: int = 0
    """Multimodal tokens encoded in one step."""
    plain_attention: bool = False
    """Attention falls back to a plain implementation, which writes out the scores of every pair of tokens."""
    other_processes_bytes: int = 0
    """What other processes hold on the device."""
    watermark: float = 0.0
    """Share of the pool that admission keeps free."""

    def with_tensor_parallel(self, tensor_parallel_size: int) -> Settings:
        """The same settings on more GPUs."""
        return replace(self, tensor_parallel_size=tensor_parallel_size)
