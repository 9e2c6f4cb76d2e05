"""A `gpu` profile of a card whose kernels were timed inside a few models: terms from which other dense models are put together.

Only the matrices of those models were timed, so a GEMM is a start, its activations' traffic, and a rate for each token count. That
is coarser than a table over shapes; the error on matrices left out says by how much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sim.catalog.gpus import gpu
from sim.catalog.models import model_shape

from .attention import fit_attention, judge_attention
from .document import HOST_STATED, PADDED_SIZES, document, uncertainty
from .errors import CalibrationError
from .fit_model import attention_json, catalogue_name, skew_table, stated_all_reduce_us
from .gemm import WIDTHS
from .gemm_few import TOKENS_HERE, as_table, fit_few, judge_few, timed_matrices
from .readers.aiconfigurator import HEAD_DIM
from .readers.llmservingsim import LICENCE, SOURCE, KernelProfile
from .skew import skew_terms
from .tent import Array

SHORT = ("layernorm", "rotary_emb", "act_fn")
MESSAGES = (1 << 12, 1 << 20, 1 << 26)
"""Sizes at which a stated collective is written down, in bytes."""


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
    timed = timed_matrices(sources)
    fitted, gemm_error = fit_few(timed), judge_few(timed)
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
                "bfloat16": {"tokens": list(TOKENS_HERE), "n": list(WIDTHS), "k": list(WIDTHS), "us": as_table(fitted)}
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
            f"matrices of {timed.width.size} shapes were timed: others are priced by their size and their activations, however well their "
            "tiles fill the GPU",
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
