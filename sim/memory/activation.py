"""The forward pass: temporary tensors of one engine step, counted operator by operator."""

from __future__ import annotations

from sim.catalog.dtypes import DTYPE_BYTES
from sim.catalog.gpus import Gpu
from sim.catalog.layers import AttentionShape
from sim.catalog.shape import ModelShape

from .ops import Op, Peak
from .settings import Settings
from .workspaces import cublas_workspace, moe_workspace, split_kv_partials


def forward_peaks(
    model: ModelShape, gpu: Gpu, settings: Settings, *, tokens: int, tuned: bool, stages: int | None = None
) -> tuple[Peak, ...]:
    """One peak for each wide operator of a forward pass over `tokens` tokens on one rank; the widest is the pass's own.

    Alive throughout a layer: the residual, the block's input and its output, three tensors `[tokens, hidden_size]`. The
    operator adds its own inputs and outputs. `tuned` is True when kernels are tuned in this very pass: the tuner flushes
    the L2 cache with a buffer of its size while the tensors are alive. `stages` overrides the pipeline's size.
    """
    element, hidden = DTYPE_BYTES[settings.dtype], model.hidden_size
    common = [_tensor("residual, input and output", tokens, 3 * hidden, element), cublas_workspace(gpu)]
    if tuned and settings.release.compiled:
        size = gpu.l2_cache_bytes
        common.append(Op(name="kernel tuner's cache flush", requested_bytes=size, formula=f"L2 cache of {size} B"))
    if (settings.pipeline_parallel_size if stages is None else stages) > 1:
        common.append(_tensor("input from the stage before", tokens, 2 * hidden, element))
    common += encoder_outputs(model, settings, tokens)
    return tuple(
        Peak(phase="prefill", ops=(*ops, *common), profiled=True)
        for ops in _operators(model, gpu, settings, tokens, element)
    )


def encoder_outputs(model: ModelShape, settings: Settings, tokens: int) -> list[Op]:
    """What an encoder leaves for the language model, alive during the whole step."""
    if not settings.encoder_tokens:
        return []
    element = DTYPE_BYTES[settings.dtype]
    return [
        _tensor("encoder outputs", settings.encoder_tokens, model.hidden_size, element),
        _tensor("merged embeddings", tokens, model.hidden_size, element),
    ]


def encoder_peak(model: ModelShape, settings: Settings) -> Peak | None:
    """The encoder's last layer over all its tokens at the language model's width: input, output and a copy; None without one.

    The encoder's own width is not in a language model's shape; what it hands over is.
    """
    if not settings.encoder_tokens:
        return None
    op = _tensor("encoder tensors", settings.encoder_tokens, 3 * model.hidden_size, DTYPE_BYTES[settings.dtype])
    return Peak(phase="encoder", ops=(op,), profiled=True)


def decode_peak(model: ModelShape, gpu: Gpu, settings: Settings) -> Peak:
    """A step of one token for each of `max_num_seqs` sequences: never the profile's peak, but what serving holds."""
    rows, element, tp = settings.max_num_seqs, DTYPE_BYTES[settings.dtype], settings.tensor_parallel_size
    ops = [_tensor("residual, input and output", rows, 3 * model.hidden_size, element)]
    kind = model.attention[0]
    ops.append(_tensor("QKV, rotated query and key, output", rows, _attention_numbers(kind, tp), element))
    partials = split_kv_partials(kind, gpu, rows, tp)
    if partials is not None:
        ops.append(partials)
    return Peak(phase="decode", ops=(*ops, cublas_workspace(gpu)), profiled=False)


def _operators(model: ModelShape, gpu: Gpu, settings: Settings, tokens: int, element: int) -> list[tuple[Op, ...]]:
    """What each wide operator of a layer holds at its peak, inputs and outputs together."""
    tp = settings.tensor_parallel_size
    found: list[tuple[Op, ...]] = []
    for kind in model.attention:
        name = (
            "compressed KV, up-projections, query and output" if kind.is_mla else "QKV, rotated query and key, output"
        )
        ops = [_tensor(name, tokens, _attention_numbers(kind, tp), element)]
        if settings.plain_attention:
            ops += plain_attention_ops(kind, min(tokens, settings.max_model_len), tp, element)
        found.append(tuple(ops))
    if model.moe is None or model.moe.first_dense_layers:
        width = -(-model.intermediate_size // tp)
        matrices = 3 if model.gated_mlp else 2
        name = "MLP gate, up and product" if model.gated_mlp else "MLP up and product"
        found.append((_tensor(name, tokens, matrices * width, element),))
    workspace = moe_workspace(model, tokens, tp, element)
    if workspace is not None:
        found.append((workspace,))
    return found


def plain_attention_ops(
    kind: AttentionShape, length: int, tensor_parallel_size: int, element: int, *, queries: int | None = None
) -> list[Op]:
    """What attention writes out when it falls back to plain matrix products over one sequence of `length` tokens.

    Scores in fp32, `heads * length^2 * 4` bytes, their softmax in the model's format, and a mask that is built beside them; and keys
    and values are copied out for every query head that shares them. With `queries` only so many of the tokens are computed
    now: a chunk of a longer prompt has `heads * queries * length` scores.
    """
    heads = kind.num_heads // tensor_parallel_size
    kv = kind.head_dim * heads
    pairs = length * (length if queries is None else queries)
    square = f"{length}^2" if queries in (None, length) else f"{queries} x {length}"
    return [
        Op(
            name="attention scores",
            requested_bytes=heads * pairs * 4,
            formula=f"{heads} heads x {square} x 4 B",
        ),
        Op(
            name="attention probabilities",
            requested_bytes=heads * pairs * element,
            formula=f"{heads} heads x {square} x {element} B",
        ),
        Op(name="attention mask", requested_bytes=pairs * element, formula=f"{square} x {element} B"),
        _tensor("contiguous copies of key and value", length, 2 * kv, element),
    ]


def _attention_numbers(kind: AttentionShape, tp: int) -> int:
    """Numbers a token that attention holds on one rank."""
    heads = kind.num_heads // tp
    if kind.is_mla:
        # Query, up-projected key and value, the key with its rotary part in place, and the output.
        return heads * (kind.qk_head_dim + kind.head_dim + kind.v_head_dim + kind.qk_head_dim + kind.v_head_dim)
    # Fused QKV, rotated query and key, and the output.
    kv = kind.kv_heads_per_rank(tp) * kind.head_dim
    return (heads * kind.head_dim + 2 * kv) + (heads * kind.head_dim + kv) + heads * kind.head_dim


def _tensor(name: str, tokens: int, numbers: int, element: int) -> Op:
    return Op(
        name=name,
        requested_bytes=tokens * numbers * element,
        formula=f"{tokens} tokens x {numbers} x {element} B",
    )
