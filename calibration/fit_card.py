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
from sim.costs.layer_matrices import matrices

from .attention import fit_attention, judge_attention
from .document import HOST_STATED, PADDED_SIZES, document, uncertainty
from .errors import CalibrationError
from .fit_model import attention_json, catalogue_name, skew_table, stated_all_reduce_us
from .gemm import WIDTHS
from .readers.aiconfigurator import HEAD_DIM
from .readers.llmservingsim import LICENCE, SOURCE, KernelProfile
from .skew import skew_terms
from .split import judged as judged_term
from .tent import Array, robust_nonnegative

MATRICES = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
SHORT = ("layernorm", "rotary_emb", "act_fn")
MESSAGES = (1 << 12, 1 << 20, 1 << 26)
"""Sizes at which a stated collective is written down, in bytes."""
LEAST_SHAPES = 4
MATRICES_OF_A_LAYER = len(MATRICES)


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
    fitted, gemm_error = _gemm(shapes, times)
    calls = [
        (
            source.attention[["prefill_chunk", "kv_prefill", "n_decode", "kv_decode"]].to_numpy(float),
            source.attention["time_us"].to_numpy(float),
        )
        for source in sources
    ]
    waves = [device.sm_count / _heads(source)[0] for source in sources]
    judged = [judge_attention(*call, wave) for call, wave in zip(calls, waves, strict=True)]
    unequal = next((table for table in map(skew_table, sources) if table is not None), None)
    skew, _ = skew_terms(unequal)
    several = sorted({source.tensor_parallel_size for source in sources} - {1})
    one = [_at_one_token(source) for source in sources]
    known = uncertainty({"held_out_gemm_bfloat16": gemm_error} | judged[0])
    for other in judged[1:]:
        uncertainty(other)  # taken out of their errors too
    whole = [gemm_error, *(part["held_out"] for part in judged)]
    return document(
        name=device.name,
        kind="gpu",
        gpu=device.name,
        kernels={
            "gemm": {
                "bfloat16": {"tokens": list(TOKENS_HERE), "n": list(WIDTHS), "k": list(WIDTHS), "us": _table(fitted)}
            },
            "attention": [_entry(source, call, wave) for source, call, wave in zip(sources, calls, waves, strict=True)],
            "stairs": True,
            "head_dim": HEAD_DIM,
            "all_reduce": {
                str(ranks): {
                    "bytes": list(MESSAGES),
                    "us": [round(stated_all_reduce_us(ranks, size), 2) for size in MESSAGES],
                }
                for ranks in several
            },
            "short_kernel_us": round(float(np.mean(one)), 3),
            "short_kernels_per_layer": 4,
            "bandwidth_share": 0.8,
            "sampler_us": round(float(np.mean([_sampler_us(source) for source in sources])), 2),
            **skew,
            "skew_kv_heads": unequal.kv_heads if unequal else 0,
        },
        host=HOST_STATED,
        padded_sizes=list(PADDED_SIZES),
        range={"max_tokens": TOKENS_HERE[-1], "max_seqs": 256, "max_context_tokens": 16384},
        error={
            "held_out": {
                "median": round(float(np.median([part["median"] for part in whole])), 5),
                "p95": max(part["p95"] for part in whole),
            },
            "held_out_gemm_shape": gemm_error,
            **{
                f"held_out_attention, {source.folder.name}.tp{source.tensor_parallel_size}": part["held_out"]
                for source, part in zip(sources, judged, strict=True)
            },
            "end_to_end": "not yet judged end to end",
        },
        **known,
        identifiability=[
            f"matrices of {len(shapes)} shapes were timed: others are priced by their size alone, whatever their proportions",
            f"no collective was timed: over {', '.join(map(str, several))} ranks it is a stated constant (16 GB/s and 20 us over PCIe)"
            if several
            else "no collective was timed: tensor parallelism is refused",
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


TOKENS_HERE = (
    *(1, 2, 4, 8, 16, 17, 32, 33, 48, 64, 65, 96, 97, 128, 129, 192, 193, 256, 257, 384, 512, 513, 768, 769),
    *(1024, 1025, 1536, 1537, 2048),
)
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
    return fitted, judged_term(np.asarray(predicted), np.asarray(measured), MATRICES_OF_A_LAYER)


def _table(fitted: Array) -> list[list[list[float]]]:
    widths = np.asarray(WIDTHS, dtype=np.float64)
    levels = fitted[:, 0, None, None] + fitted[:, 1, None, None] * widths[None, :, None] * widths[None, None, :]
    return [[[float(f"{value:.4g}") for value in row] for row in level] for level in levels.tolist()]


def _entry(source: KernelProfile, calls: tuple[Array, Array], wave_tiles: float) -> dict[str, Any]:
    heads, kv_heads = _heads(source)
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "kv_dtype": "bfloat16",
        **attention_json(fit_attention(*calls, wave_tiles)),
    }


def _heads(source: KernelProfile) -> tuple[int, int]:
    """Query and KV heads of a rank."""
    kind, ranks = model_shape(source.meta["model"]).attention[0], source.tensor_parallel_size
    return kind.num_heads // ranks, kind.kv_heads_per_rank(ranks)


def _at_one_token(source: KernelProfile) -> float:
    first = source.dense[(source.dense["tokens"] == 1) & source.dense["layer"].isin(SHORT)]
    return float(first["time_us"].mean())


def _sampler_us(source: KernelProfile) -> float:
    first = source.per_sequence[(source.per_sequence["layer"] == "sampler") & (source.per_sequence["sequences"] == 1)]
    return float(first["time_us"].mean())
