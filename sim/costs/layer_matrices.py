"""The matrices that a step multiplies in its layers on one rank, and what they take by a table of GEMM times.

Experts of a layer run in one grouped kernel, which no table holds. They are priced as one matrix of all experts that a step
visits, multiplied with the tokens that each of them gets when tokens spread evenly: the same weights read, the same work, one launch.
"""

from __future__ import annotations

from collections.abc import Callable

from sim.catalog.shape import ModelShape

from .work import distinct_experts

Gemm = Callable[[float, int, int], float]
"""Seconds of so many tokens times a matrix of a width and a depth."""


def attention_matrices(model: ModelShape, tp: int) -> list[tuple[int, int]]:
    """(width, depth) of the QKV and the output projection of a layer on one rank, as vLLM merges them."""
    kind = model.attention[0]
    return [
        ((kind.num_heads // tp + 2 * kind.kv_heads_per_rank(tp)) * kind.head_dim, model.hidden_size),
        (model.hidden_size, kind.num_heads // tp * kind.head_dim),
    ]


def feed_forward(model: ModelShape, tp: int, width: int) -> list[tuple[int, int]]:
    """The same of gate and up, and down, of a feed-forward network so wide."""
    share = -(-width // tp)
    return [((2 if model.gated_mlp else 1) * share, model.hidden_size), (model.hidden_size, share)]


def matrices(model: ModelShape, tp: int) -> list[tuple[int, int]]:
    """All four of a dense layer."""
    return [*attention_matrices(model, tp), *feed_forward(model, tp, model.intermediate_size)]


def layers_s(model: ModelShape, tp: int, tokens: int, gemm: Gemm) -> float:
    """What the matrices of all layers take for so many tokens, in seconds."""
    experts = model.moe
    dense_layers = model.num_layers if experts is None else experts.first_dense_layers
    attention_s = sum(gemm(tokens, n, k) for n, k in attention_matrices(model, tp))
    whole_s = model.num_layers * attention_s
    if dense_layers:
        whole_s += dense_layers * sum(gemm(tokens, n, k) for n, k in feed_forward(model, tp, model.intermediate_size))
    return whole_s + (model.num_layers - dense_layers) * _experts_s(model, tp, tokens, gemm)


def _experts_s(model: ModelShape, tp: int, tokens: int, gemm: Gemm) -> float:
    """Router, visited experts and shared ones of one layer."""
    experts = model.moe
    if experts is None:
        return 0.0
    visited = distinct_experts(experts.num_experts, experts.experts_per_token, tokens)
    each = tokens * experts.experts_per_token / visited
    total = gemm(tokens, experts.num_experts, model.hidden_size)
    for n, k in feed_forward(model, tp, experts.intermediate_size):
        total += gemm(each, round(n * visited), k)
    if experts.shared_intermediate_size:
        total += sum(gemm(tokens, n, k) for n, k in feed_forward(model, tp, experts.shared_intermediate_size))
    return total
