"""A `gpu` profile of a card whose kernels were timed inside a few models: terms from which other dense models are put together.

Only the matrices of those models were timed, so a GEMM is `start + rate * (width x depth)`, fitted for each token count. That
is coarser than a table over shapes; the error on matrices left out says by how much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sim.catalog.gpus import gpu
from sim.catalog.models import model_shape
from sim.costs.compose import matrices

from .attention import FULLNESS, AttentionFit, fit_attention, judge_attention
from .document import HOST_NOT_FITTED, PADDED_SIZES, document
from .errors import CalibrationError
from .fit_model import catalogue_name, skew_terms
from .gemm import TOKENS, WIDTHS
from .readers.aiconfigurator import HEAD_DIM
from .readers.llmservingsim import LICENCE, SOURCE, KernelProfile
from .split import error_summary
from .tent import Array, robust_nonnegative

MATRICES = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
SHORT = ("layernorm", "rotary_emb", "act_fn")
LEAST_SHAPES = 4


def fit_card_profile(sources: Sequence[KernelProfile], *, date: str, command: str) -> dict[str, Any]:
    """The profile document of the one card that `sources` were measured on.

    Raises: CalibrationError when they are of several cards or hold too few matrices; ConfigError for an unknown GPU or model.
    """
    names = {source.meta["gpu"] for source in sources}
    if len(names) != 1:
        raise CalibrationError(
            f"the tables are of {len(names)} cards ({', '.join(sorted(names))}); a GPU's terms are of one"
        )
    device = gpu(catalogue_name(names.pop()))
    shapes, times = _timed_matrices(sources)
    fitted, error = _gemm(shapes, times)
    calls = [
        (
            source.attention[["prefill_chunk", "kv_prefill", "n_decode", "kv_decode"]].to_numpy(float),
            source.attention["time_us"],
        )
        for source in sources
    ]
    attention = [fit_attention(points, us.to_numpy(float)) for points, us in calls]
    judged = [judge_attention(points, us.to_numpy(float))["held_out"] for points, us in calls]
    skew, _ = skew_terms(next((source.skew for source in sources if source.skew is not None), None))
    one = [_at_one_token(source) for source in sources]
    medians = [error["median"], *(part["median"] for part in judged)]
    return document(
        name=device.name,
        kind="gpu",
        gpu=device.name,
        kernels={
            "gemm": {
                "bfloat16": {"tokens": list(TOKENS_HERE), "n": list(WIDTHS), "k": list(WIDTHS), "us": _table(fitted)}
            },
            "attention": [_entry(source, fit) for source, fit in zip(sources, attention, strict=True)],
            "head_dim": HEAD_DIM,
            "all_reduce": {},
            "short_kernel_us": round(float(np.mean(one)), 3),
            "short_kernels_per_layer": 4,
            "bandwidth_share": 0.8,
            "sampler_us": round(float(np.mean([_sampler_us(source) for source in sources])), 2),
            **skew,
        },
        host=HOST_NOT_FITTED,
        padded_sizes=list(PADDED_SIZES),
        range={"max_tokens": TOKENS_HERE[-1], "max_seqs": 256, "max_context_tokens": 16384},
        error={
            "held_out": {
                "median": round(float(np.median(medians)), 5),
                "p95": round(max(error["p95"], *(part["p95"] for part in judged)), 5),
            },
            "held_out_gemm_shape": error,
            **{f"held_out_attention_{i}": part for i, part in enumerate(judged)},
            "end_to_end": "not yet judged end to end",
        },
        intervals={},
        identifiability=[
            f"matrices of {len(shapes)} shapes were timed: others are priced by their size alone, whatever their proportions",
            "no collective was timed: tensor parallelism is refused",
            "norms, rotary embedding and activation are 4 kernels a layer of their mean time at one token, and their traffic",
        ],
        provenance={
            "source": f"{SOURCE}, {', '.join(sorted({source.folder.name for source in sources}))}",
            "licence": LICENCE,
            "engine": f"vLLM {sources[0].meta['vllm_version']}",
            "measured_on": sources[0].meta["gpu"],
            "date": date,
            "command": command,
        },
    )


TOKENS_HERE = tuple(count for count in TOKENS if count <= 2048 and count % 16 in (0, 1, 2, 4, 8))
"""Token counts that LLMServingSim's tables reach."""


def _timed_matrices(sources: Sequence[KernelProfile]) -> tuple[Array, dict[int, Array]]:
    """Sizes `[shapes]` (width x depth) and, by token count, their times `[shapes]`, in microseconds, between the timed counts."""
    sizes: list[int] = []
    columns: list[list[float]] = []
    for source in sources:
        shapes = matrices(model_shape(source.meta["model"]), source.tensor_parallel_size)
        by_op = {name: part.sort_values("tokens") for name, part in source.dense.groupby("layer")}
        for op, (width, depth) in zip(MATRICES, shapes, strict=True):
            if op in by_op:
                sizes.append(width * depth)
                columns.append(np.interp(TOKENS_HERE, by_op[op]["tokens"], by_op[op]["time_us"]).tolist())
    if len(sizes) < LEAST_SHAPES:
        raise CalibrationError(
            f"{len(sizes)} timed matrices cannot tell start and rate apart; at least {LEAST_SHAPES} are needed"
        )
    table = np.asarray(columns)
    return np.asarray(sizes, dtype=np.float64), {count: table[:, i] for i, count in enumerate(TOKENS_HERE)}


def _gemm(sizes: Array, times: dict[int, Array]) -> tuple[Array, dict[str, Any]]:
    """Start and rate by token count `[tokens, 2]`, and the error on each matrix when it is left out."""
    design = np.stack([np.ones(sizes.size), sizes], axis=1)
    fitted = np.stack([robust_nonnegative(design, times[count]).values for count in TOKENS_HERE])
    predicted, measured = [], []
    for count in TOKENS_HERE:
        for out in range(sizes.size):
            kept = np.arange(sizes.size) != out
            values = robust_nonnegative(design[kept], times[count][kept]).values
            predicted.append(float(design[out] @ values))
            measured.append(float(times[count][out]))
    return fitted, error_summary(np.asarray(predicted), np.asarray(measured))


def _table(fitted: Array) -> list[list[list[float]]]:
    widths = np.asarray(WIDTHS, dtype=np.float64)
    levels = fitted[:, 0, None, None] + fitted[:, 1, None, None] * widths[None, :, None] * widths[None, None, :]
    return [[[float(f"{value:.4g}") for value in row] for row in level] for level in levels.tolist()]


def _entry(source: KernelProfile, fit: AttentionFit) -> dict[str, Any]:
    kind = model_shape(source.meta["model"]).attention[0]
    ranks = source.tensor_parallel_size

    def table(values: Array) -> list[list[float]]:
        return [[round(float(value), 2) for value in row] for row in values]

    return {
        "heads": kind.num_heads // ranks,
        "kv_heads": kind.kv_heads_per_rank(ranks),
        "kv_dtype": "bfloat16",
        "prefill": {
            "chunk": list(fit.chunk_knots),
            "context": list(fit.context_knots),
            "us": table(fit.prefill.values),
        },
        "decode": {"seqs": list(fit.seqs_knots), "context": list(fit.kv_knots), "us": table(fit.decode.values)},
        "mixed": {"seqs": list(fit.seqs_knots), "context": list(fit.kv_knots), "us": table(fit.mixed.values)},
        "mixed_tile_us": round(fit.mixed_tile_us, 6),
        "overlap": {"tiles": list(FULLNESS), "exponent": list(fit.overlap)},
    }


def _at_one_token(source: KernelProfile) -> float:
    first = source.dense[(source.dense["tokens"] == 1) & source.dense["layer"].isin(SHORT)]
    return float(first["time_us"].mean())


def _sampler_us(source: KernelProfile) -> float:
    first = source.per_sequence[(source.per_sequence["layer"] == "sampler") & (source.per_sequence["sequences"] == 1)]
    return float(first["time_us"].mean())
