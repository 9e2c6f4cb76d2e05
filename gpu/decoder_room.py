"""What the largest step of an engine will take from the workspace: asked before the KV pool is sized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sim.core.config import EngineConfig

from .decoder_config import DecoderConfig
from .kernels.splits import choose_splits, resident_programs, split_bytes
from .workspace import ALIGNMENT


def decode_splits(config: DecoderConfig, engine: EngineConfig, device: Any, num_seqs: int) -> int:
    """Programs that share a sequence on this device when `num_seqs` decode together: one sequence alone is spread over the GPU."""
    device = torch.device(device)
    if device.type != "cuda":
        return 1
    properties = torch.cuda.get_device_properties(device)
    return choose_splits(
        num_seqs=num_seqs,
        num_kv_heads=config.shape.num_kv_heads,
        max_tokens=engine.max_model_len,
        num_sms=properties.multi_processor_count,
        programs_per_sm=resident_programs((properties.major, properties.minor)),
    )


def workspace_bytes(
    config: DecoderConfig, engine: EngineConfig, *, element_bytes: int, splits: Sequence[int] = (), twins: bool
) -> int:
    """Bytes that the largest step of `engine` takes from the workspace; with `twins`, what torch twins take besides. `splits` as in
    `Decoder`: of all batches the one with the most partial results counts.

    Asked before the KV pool is sized, so that no step the core may plan overflows it.
    """
    shape = config.shape
    rows, seqs = engine.max_num_batched_tokens, min(engine.max_num_seqs, engine.max_num_batched_tokens)
    head_dim, q_size, kv_size = config.head_dim, config.query_size, config.kv_size
    qkv = (q_size + 2 * kv_size) + (q_size + kv_size if shape.qk_norm else 0)
    heads = shape.num_attention_heads
    partials = (
        split_bytes(num_seqs=index + 1, num_q_heads=heads, head_dim=head_dim, num_splits=each)
        for index, each in enumerate(splits[:seqs])
    )
    attention = rows * (qkv + q_size) * element_bytes + max(partials, default=0)
    feed_forward = rows * 3 * shape.intermediate_size * element_bytes
    kept = rows * 3 * shape.hidden_size * element_bytes
    logits = seqs * (3 * shape.hidden_size + shape.vocab_size) * element_bytes
    scratch = _twin_bytes(config, engine) if twins else 0
    return kept + max(attention, feed_forward) + logits + scratch + 64 * ALIGNMENT


def _twin_bytes(config: DecoderConfig, engine: EngineConfig) -> int:
    """An upper bound of what the most demanding torch twin takes: attention over the longest sequence, or a row-wise one."""
    shape, rows = config.shape, engine.max_num_batched_tokens
    positions = -(-engine.max_model_len // engine.block_size) * engine.block_size
    kv = positions * config.kv_size * 4 * 3
    scores = shape.num_attention_heads * 64 * (positions + 2 * config.head_dim + 4) * 4
    wide = max(shape.hidden_size, shape.intermediate_size, config.query_size)
    return max(kv + scores, 5 * 4 * rows * wide, 32 * shape.vocab_size)
