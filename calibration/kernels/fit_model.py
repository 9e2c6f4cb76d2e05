"""A `model` profile from LLMServingSim kernel tables: the terms of a step of the very model that was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from calibration.document import HOST_STATED, PADDED_SIZES, document, thinned, uncertainty
from calibration.numerics.split import held_out_mask, judged
from calibration.numerics.tent import Array, fit_line
from calibration.readers.llmservingsim import LICENCE, ONCE, SOURCE, KernelProfile
from sim.catalog.gpus import gpu
from sim.catalog.models import model_shape

from .attention import AttentionFit, fit_attention, judge_attention
from .attention_mixed import RATIO_KNOTS
from .skew import SkewTable, skew_terms

if TYPE_CHECKING:
    import pandas as pd

PER_LAYER_TWICE = "layernorm"
STATED_LATENCY_US, STATED_BYTES_PER_S = 20.0, 16e9
"""An all-reduce over PCIe: the configuration with which the authors of the tables simulate their host; nobody measured it."""


@dataclass(frozen=True, slots=True)
class _Dense:
    """Operators by tokens `[points]`, in microseconds, summed over all layers."""

    tokens: Array
    time_us: Array


def fit_model_profile(
    source: KernelProfile, *, date: str, command: str, sibling_skew: SkewTable | None = None
) -> dict[str, Any]:
    """The profile document. `sibling_skew` was measured with another model on the same card, and is used where this one has none.

    Raises: CalibrationError when a table cannot identify its term; ConfigError for an unknown model or GPU.
    """
    model, device = model_shape(source.meta["model"]), gpu(catalogue_name(source.meta["gpu"]))
    layers = model.num_layers
    calls = source.attention[["prefill_chunk", "kv_prefill", "n_decode", "kv_decode"]].to_numpy(float)
    call_us = source.attention["time_us"].to_numpy(float)
    wave_tiles = device.sm_count / (model.attention[0].num_heads // source.tensor_parallel_size)
    attention = fit_attention(calls, call_us, wave_tiles)
    dense, rows = _dense(source.dense, layers), _rows(source.per_sequence)
    error = judge_attention(calls, call_us, wave_tiles) | {
        "held_out_dense": _judge_line(dense),
        "held_out_rows": _judge_line(rows),
    }
    own_skew = skew_table(source)
    kv_heads = model.attention[0].kv_heads_per_rank(source.tensor_parallel_size)
    skew, skew_error = skew_terms(own_skew or sibling_skew, kv_heads)
    if skew_error:
        error["skew"] = skew_error
    notes = [
        *(
            f"{without} of {knots} knots of the {term} table have no measurement near them and follow the law and their neighbours"
            for term, (without, knots) in attention.unmeasured.items()
            if without
        ),
        "kernels were measured eager: gaps between them in a captured graph, and host time, are not in these terms",
    ]
    if own_skew is None and sibling_skew is not None:
        notes.append(
            "batches of unequal contexts were measured with another model on this card: its term is used, by blocks of threads"
        )
    elif own_skew is None:
        notes.append(
            "no batches of unequal contexts were measured: they are priced as if all were as long as their mean"
        )
    if source.tensor_parallel_size > 1:
        notes.append(
            "no collective was measured: all_reduce is a stated constant, not a fit (16 GB/s and 20 us over PCIe)"
        )
    terms = _terms(attention, layers, dense, rows, skew)
    if source.tensor_parallel_size > 1:
        terms["all_reduce"] = _stated_all_reduce(model.hidden_size, layers, source.tensor_parallel_size)
    known = uncertainty(error)
    return document(
        name=f"{device.name}.{model.name}.tp{source.tensor_parallel_size}",
        kind="model",
        gpu=device.name,
        model=model.name,
        tensor_parallel_size=source.tensor_parallel_size,
        dtype="bfloat16",
        kv_cache_dtype="bfloat16",
        terms=terms,
        host=HOST_STATED,
        padded_sizes=list(PADDED_SIZES),
        range={
            "max_tokens": int(dense.tokens.max()),
            "max_seqs": int(calls[:, 2].max()),
            "max_context_tokens": int(calls[:, 3].max()),
        },
        error=error | {"end_to_end": "not yet judged end to end"},
        **known,
        identifiability=notes,
        provenance={
            "source": f"{SOURCE}, {source.folder.name}",
            "licence": LICENCE,
            "engine": f"vLLM {source.meta['vllm_version']}",
            "measured_on": source.meta["gpu"],
            "measured_at": source.meta.get("profiled_at", ""),
            "date": date,
            "command": command,
        },
    )


def skew_table(source: KernelProfile) -> SkewTable | None:
    """The source's own measurements of unequal contexts."""
    if source.skew is None:
        return None
    kind = model_shape(source.meta["model"]).attention[0]
    return SkewTable(
        table=source.skew,
        kv_heads=kind.kv_heads_per_rank(source.tensor_parallel_size),
        sm_count=gpu(catalogue_name(source.meta["gpu"])).sm_count,
    )


def _terms(attention: AttentionFit, layers: int, dense: _Dense, rows: _Dense, skew: dict[str, Any]) -> dict[str, Any]:
    return {
        "dense": _line_json(dense, "tokens"),
        "rows": _line_json(rows, "rows"),
        **attention_json(attention, layers),
        "chunk_launch_us": round(attention.launch_us * layers, 3),
        "wave_tiles": round(attention.wave_tiles, 4),
        **skew,
    }


def attention_json(fit: AttentionFit, layers: int = 1) -> dict[str, Any]:
    """The attention terms as a profile holds them, for so many layers."""

    def table(values: Array) -> list[list[float]]:
        return [[float(f"{value * layers:.5g}") for value in row] for row in values]

    chunks, contexts = _whole(fit.chunk_knots), _whole(fit.context_knots)
    seqs, kv = _whole(fit.seqs_knots), _whole(fit.kv_knots)
    ratio = fit.mixed.ratio.reshape(-1, fit.mixed.ratio.shape[-1])
    return {
        "prefill": {"chunk": chunks, "context": contexts, "us": table(fit.prefill)},
        "decode": {"seqs": seqs, "context": kv, "us": table(fit.decode)},
        "mixed": {"seqs": seqs, "context": kv, "us": table(fit.mixed.beside)},
        "mixed_tile_us": round(fit.mixed.tile_us * layers, 6),
        "overlap": {"tiles": _whole(fit.mixed.overlap_tiles), "exponent": list(fit.mixed.overlap)},
        "mixed_ratio": {
            **dict(zip(("tokens", "context", "seqs", "kv"), map(_whole, RATIO_KNOTS), strict=True)),
            "ratio": [[round(float(value), 4) for value in row] for row in ratio],
        },
    }


def _whole(knots: tuple[float, ...]) -> list[int]:
    return [int(knot) for knot in knots]


def _dense(table: pd.DataFrame, layers: int) -> _Dense:
    """All dense operators of a step: once a layer, norms twice a layer, embedding and final norm once."""
    by_layer = table.pivot_table(index="tokens", columns="layer", values="time_us")
    weight = {name: 1 if name in ONCE else layers * (2 if name == PER_LAYER_TWICE else 1) for name in by_layer.columns}
    total = sum(by_layer[name] * times for name, times in weight.items())
    return _Dense(by_layer.index.to_numpy(float), np.asarray(total, dtype=np.float64))


def _rows(table: pd.DataFrame) -> _Dense:
    total = table.pivot_table(index="sequences", columns="layer", values="time_us").sum(axis=1)
    return _Dense(total.index.to_numpy(float), total.to_numpy(float))


def _line_json(curve: _Dense, name: str) -> dict[str, Any]:
    knots = thinned(curve.tokens, curve.time_us)
    values = fit_line(curve.tokens, curve.time_us, knots).values
    return {name: [int(knot) for knot in knots], "us": [round(float(value), 2) for value in values]}


def _judge_line(curve: _Dense) -> dict[str, Any]:
    held = held_out_mask(curve.tokens.size)
    held[[0, -1]] = False  # the ends are the range; beyond them is extrapolation, judged as an axis
    knots = thinned(curve.tokens[~held], curve.time_us[~held])
    values = fit_line(curve.tokens[~held], curve.time_us[~held], knots).values
    return judged(np.interp(curve.tokens[held], knots, values), curve.time_us[held])


def stated_all_reduce_us(ranks: int, size_bytes: int) -> float:
    """One all-reduce: a latency, and `2 (ranks - 1) / ranks` times the message."""
    return STATED_LATENCY_US + 2 * (ranks - 1) / ranks * size_bytes / STATED_BYTES_PER_S * 1e6


def _stated_all_reduce(hidden_size: int, layers: int, ranks: int) -> dict[str, Any]:
    """Two all-reduces a layer over the hidden states."""
    tokens = [1, 64, 512, 2048]
    times = [2 * layers * stated_all_reduce_us(ranks, hidden_size * 2 * count) for count in tokens]
    return {"tokens": tokens, "us": [round(time, 2) for time in times]}


def catalogue_name(product: str) -> str:
    """The catalogue's name of a product, as the driver prints it."""
    lowered = product.lower()
    for words, name in (("4090", "rtx-4090-24gb"), ("rtx pro 6000", "rtx-pro-6000-96gb")):
        if words in lowered:
            return name
    return product
