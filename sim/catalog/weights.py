"""The weight tensors of a model as an engine stores them: fused QKV and gate-up, split over ranks.

One list serves four readers: parameter counts, weight bytes, the ledger's allocator rounding, and the work of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from .dtypes import WeightFormat

if TYPE_CHECKING:
    from .layers import AttentionShape
    from .shape import ModelShape

VOCAB_PADDING = 64
"""Rows an embedding is padded to. **Source:** vLLM `VocabParallelEmbedding`."""


@dataclass(frozen=True, slots=True)
class WeightTensor:
    """One stored tensor (or, for vectors, one that a layer has `count` of)."""

    name: str
    """`qkv`, `out`, `gate_up`, `down`, `expert_gate_up`, ..., `embedding`, `lm_head`, `norm`, `bias`, `encoder` (all of it)."""
    elements: int
    """Numbers in one tensor, on one rank where it was listed for a rank."""
    layer: int | None = None
    """Layer it belongs to; None outside the layers."""
    quantizable: bool = False
    """A matrix that quantised formats store in their own way."""
    is_expert: bool = False
    """A stack of all routed experts of a layer."""

    def stored_bytes(self, element_bytes: int, form: WeightFormat | None) -> int:
        """Bytes the numbers take, quantised by `form` where that applies."""
        if form is None or not self.quantizable or (form.experts_only and not self.is_expert):
            return self.elements * element_bytes
        size: Fraction = self.elements * form.bytes_per_weight
        return -(-size.numerator // size.denominator)


def weight_tensors(model: ModelShape) -> Iterator[WeightTensor]:
    """Every tensor of the whole, undivided model; tied embeddings once, vocabulary not padded."""
    yield WeightTensor("embedding", model.vocab_size * model.hidden_size)
    for layer in range(model.num_layers):
        yield from _layer(model, layer, 1)
    yield WeightTensor("norm", model.hidden_size)
    if not model.tie_word_embeddings:
        yield WeightTensor("lm_head", model.vocab_size * model.hidden_size)


def rank_weight_tensors(
    model: ModelShape, tensor_parallel_size: int, pipeline_parallel_size: int, pipeline_rank: int
) -> Iterator[WeightTensor]:
    """The tensors of one rank: the first pipeline stage embeds, the last one has the final norm and the LM head."""
    padded = -(-model.vocab_size // VOCAB_PADDING) * VOCAB_PADDING
    vocabulary = -(-padded // tensor_parallel_size) * model.hidden_size
    last = pipeline_rank == pipeline_parallel_size - 1
    if pipeline_rank == 0 or (last and model.tie_word_embeddings):
        yield WeightTensor("embedding", vocabulary)
    if pipeline_rank == 0 and model.encoder_parameters:
        yield WeightTensor("encoder", -(-model.encoder_parameters // tensor_parallel_size))
    for layer in model.layers_of_rank(pipeline_rank, pipeline_parallel_size):
        yield from _layer(model, layer, tensor_parallel_size)
    if last:
        yield WeightTensor("norm", model.hidden_size)
        if not model.tie_word_embeddings:
            yield WeightTensor("lm_head", vocabulary)


def _layer(model: ModelShape, layer: int, tp: int) -> Iterator[WeightTensor]:
    """Tensors of one layer on one of `tp` tensor-parallel ranks."""
    for _ in range(model.norms_per_layer):
        yield WeightTensor("norm", model.hidden_size, layer)
    kind = model.attention_at(layer)
    yield from _mla(model, kind, layer, tp) if kind.is_mla else _attention(model, kind, layer, tp)
    if model.is_moe_layer(layer):
        yield from _experts(model, layer, tp)
    else:
        yield from _dense_mlp(model, model.intermediate_size, layer, tp, "")


def _attention(model: ModelShape, kind: AttentionShape, layer: int, tp: int) -> Iterator[WeightTensor]:
    query = kind.num_heads // tp * kind.head_dim
    rows = query + 2 * kind.kv_heads_per_rank(tp) * kind.head_dim
    yield WeightTensor("qkv", rows * model.hidden_size, layer, quantizable=True)
    yield WeightTensor("out", query * model.hidden_size, layer, quantizable=True)
    if model.qkv_bias:
        yield WeightTensor("bias", rows, layer)
    if model.out_bias:
        yield WeightTensor("bias", model.hidden_size, layer)
    if model.qk_norm:
        yield WeightTensor("norm", kind.head_dim, layer)
        yield WeightTensor("norm", kind.head_dim, layer)
    if model.attention_sinks:
        yield WeightTensor("bias", kind.num_heads // tp, layer)


def _mla(model: ModelShape, kind: AttentionShape, layer: int, tp: int) -> Iterator[WeightTensor]:
    """Multi-head latent attention: the down projections are on every rank, the up projections are split by heads."""
    assert kind.kv_lora_rank is not None
    heads = kind.num_heads // tp
    if kind.q_lora_rank is None:
        yield WeightTensor("qkv", model.hidden_size * heads * kind.qk_head_dim, layer, quantizable=True)
    else:
        yield WeightTensor("q_down", model.hidden_size * kind.q_lora_rank, layer, quantizable=True)
        yield WeightTensor("norm", kind.q_lora_rank, layer)
        yield WeightTensor("q_up", kind.q_lora_rank * heads * kind.qk_head_dim, layer, quantizable=True)
    yield WeightTensor(
        "kv_down", model.hidden_size * (kind.kv_lora_rank + kind.qk_rope_head_dim), layer, quantizable=True
    )
    yield WeightTensor("norm", kind.kv_lora_rank, layer)
    yield WeightTensor("kv_up", kind.kv_lora_rank * heads * (kind.head_dim + kind.v_head_dim), layer, quantizable=True)
    yield WeightTensor("out", heads * kind.v_head_dim * model.hidden_size, layer, quantizable=True)


def _dense_mlp(model: ModelShape, width: int, layer: int, tp: int, prefix: str) -> Iterator[WeightTensor]:
    part = -(-width // tp)
    matrices = 2 if model.gated_mlp else 1
    yield WeightTensor(f"{prefix}gate_up", matrices * part * model.hidden_size, layer, quantizable=True)
    yield WeightTensor(f"{prefix}down", part * model.hidden_size, layer, quantizable=True)
    if model.mlp_bias:
        yield WeightTensor("bias", matrices * part, layer)
        yield WeightTensor("bias", model.hidden_size, layer)


def _experts(model: ModelShape, layer: int, tp: int) -> Iterator[WeightTensor]:
    moe = model.moe
    assert moe is not None
    part = -(-moe.intermediate_size // tp)
    yield WeightTensor("router", moe.num_experts * model.hidden_size, layer)
    if moe.router_bias:
        yield WeightTensor("bias", moe.num_experts, layer)
    yield WeightTensor(
        "expert_gate_up", moe.num_experts * 2 * part * model.hidden_size, layer, quantizable=True, is_expert=True
    )
    yield WeightTensor(
        "expert_down", moe.num_experts * part * model.hidden_size, layer, quantizable=True, is_expert=True
    )
    if moe.expert_bias:
        yield WeightTensor("expert_bias", moe.num_experts * 2 * part, layer, is_expert=True)
        yield WeightTensor("expert_bias", moe.num_experts * model.hidden_size, layer, is_expert=True)
    if moe.shared_intermediate_size:
        yield from _dense_mlp(model, moe.shared_intermediate_size, layer, tp, "shared_")
    if moe.shared_gate:
        yield WeightTensor("router", model.hidden_size, layer)
