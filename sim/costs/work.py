"""The work of a model on one rank: matrices to multiply, attention to compute, bytes to move. No rates, no time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from sim.catalog.dtypes import DTYPE_BYTES, WeightFormat
from sim.catalog.layers import AttentionShape
from sim.catalog.shape import ModelShape
from sim.catalog.weights import VOCAB_PADDING, rank_weight_tensors

_VECTORS = {"norm", "bias", "expert_bias", "embedding", "lm_head"}


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight matrix that every token is multiplied with; of a stack of experts, one expert."""

    elements: int
    bytes: int
    compute: str
    """What it is multiplied in: `fp8`, `int8`, or the model's dtype."""
    experts: int = 0
    """Size of the stack it belongs to; 0 when it is not an expert."""


def rank_matrices(model: ModelShape, form: WeightFormat | None, dtype: str, tp: int, pp: int) -> Counter[Matrix]:
    """How often each matrix occurs over all layers, on one of `tp` ranks, all pipeline stages together."""
    element = DTYPE_BYTES[dtype]
    found: Counter[Matrix] = Counter()
    for rank in range(pp):
        for tensor in rank_weight_tensors(model, tp, pp, rank):
            if tensor.name in _VECTORS:
                continue
            quantised = form is not None and tensor.quantizable and (tensor.is_expert or not form.experts_only)
            compute = form.compute if form is not None and quantised and form.compute in ("fp8", "int8") else dtype
            stack = model.moe.num_experts if model.moe is not None and tensor.is_expert else 1
            size = tensor.stored_bytes(element, form) // stack
            found[Matrix(tensor.elements // stack, size, compute, stack if tensor.is_expert else 0)] += 1
    return found


def head_matrix(model: ModelShape, dtype: str, tp: int) -> Matrix:
    """The LM head's share of one rank."""
    padded = -(-model.vocab_size // VOCAB_PADDING) * VOCAB_PADDING
    elements = -(-padded // tp) * model.hidden_size
    return Matrix(elements, elements * DTYPE_BYTES[dtype], dtype)


def distinct_experts(num_experts: int, experts_per_token: int, tokens: int) -> float:
    """Expected number of experts that `tokens` tokens visit, each choosing evenly and independently.

    >>> distinct_experts(8, 2, 1)
    2.0
    """
    return num_experts * (1.0 - (1.0 - experts_per_token / num_experts) ** tokens)


def elementwise_bytes_per_token(model: ModelShape, element_bytes: int, tp: int) -> int:
    """Bytes that the short kernels of all layers read and write for one token: two norms with the residual (read and written), the
    activation (gate and up read, product written) and the rotary embedding.
    """
    total = 0
    for layer in range(model.num_layers):
        kind = model.attention_at(layer)
        if model.moe is not None and model.is_moe_layer(layer):
            width = model.moe.intermediate_size * model.moe.experts_per_token + model.moe.shared_intermediate_size
        else:
            width = model.intermediate_size
        heads = kind.num_heads // tp + kind.kv_heads_per_rank(tp)
        total += 8 * model.hidden_size + 3 * -(-width // tp) + 2 * heads * kind.head_dim
    return total * element_bytes


def attended_pairs(num_tokens: int, context_tokens: int, window: int | None = None) -> int:
    """(query, key) pairs of a causal chunk: token i of [0, num_tokens) reads `context_tokens + i + 1` keys, at most `window`.

    >>> attended_pairs(3, 2)
    12
    >>> attended_pairs(3, 2, window=4)
    11
    """
    if window is None:
        return num_tokens * context_tokens + num_tokens * (num_tokens + 1) // 2
    below = min(num_tokens, max(0, window - context_tokens))
    return below * context_tokens + below * (below + 1) // 2 + (num_tokens - below) * window


def prefill_flops_per_pair(kind: AttentionShape, tp: int) -> int:
    """Floating-point operations of one layer and (query, key) pair: scores and weighted values over all heads of a rank."""
    value_dim = kind.v_head_dim if kind.is_mla else kind.head_dim
    return 2 * (kind.num_heads // tp) * (kind.qk_head_dim + value_dim)


def decode_flops_per_context_token(kind: AttentionShape, tp: int) -> int:
    """The same for a decode; MLA then works in the compressed space (absorbed projections)."""
    if kind.kv_lora_rank is not None:
        return 2 * (kind.num_heads // tp) * (2 * kind.kv_lora_rank + kind.qk_rope_head_dim)
    return prefill_flops_per_pair(kind, tp)
