"""A `gpu` profile from kernel timing tables: terms from which the step of any dense model is put together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sim.catalog.gpus import gpu

from .document import HOST_STATED, PADDED_SIZES, document, pooled, uncertainty
from .fit_gpu_attention import KV, SEQS, fit_attention_tables
from .fit_model import stated_all_reduce_us
from .gemm import MAX_TOKENS, fit_gemm
from .readers.aiconfigurator import HEAD_DIM, LICENCE, SOURCE, KernelTables

if TYPE_CHECKING:
    import pandas as pd

CUSTOM_OVER_PCIE = 2
"""GPUs up to which vLLM runs its own all-reduce without NVLink. **Source:** vLLM `custom_all_reduce.py`: "not supported on more than two
PCIe-only GPUs"."""
MIXED_FACTOR = {"FlashAttention 2": 1.6, "FlashAttention 3": 1.3}
"""What a decode's attention costs beside a prefill, as a multiple of a call of its own. Not in these tables. The first is the middle of
what LLMServingSim's tables show for two cards (1.2 to 2.3), the second an assumption."""


def fit_gpu_profile(source: KernelTables, *, date: str, command: str) -> dict[str, Any]:
    """The profile document. Raises: CalibrationError when a table cannot identify its term; ConfigError for an unknown GPU."""
    device = gpu(source.gpu)
    gemm: dict[str, Any] = {}
    error: dict[str, Any] = {}
    for dtype in sorted(set(source.gemm["gemm_dtype"])):
        part = source.gemm[source.gemm["gemm_dtype"] == dtype]
        gemm[dtype], error[f"held_out_gemm_{dtype}"] = fit_gemm(part, dtype, device.memory_bandwidth_bytes_per_s)
    kernel = "FlashAttention 3" if device.architecture == "hopper" else "FlashAttention 2"
    attention, attention_errors = fit_attention_tables(
        source, device.l2_cache_bytes, narrow_tile=kernel == "FlashAttention 3"
    )
    error |= attention_errors
    known = uncertainty(error)
    return document(
        name=device.name,
        kind="gpu",
        gpu=device.name,
        kernels={
            "gemm": gemm,
            "attention": attention,
            "head_dim": HEAD_DIM,
            "all_reduce": _all_reduce(source.all_reduce, over_pcie=device.link == "pcie"),
            "stairs": kernel == "FlashAttention 2",
            "mixed_factor": MIXED_FACTOR[kernel],
            "eager_call_us": round(source.eager_call_us, 1),
            "short_kernel_us": 2.2,
            "short_kernels_per_layer": 5,
            "bandwidth_share": 0.8,
            "sampler_us": 25.0,
        },
        host=HOST_STATED,
        padded_sizes=list(PADDED_SIZES),
        range={"max_tokens": MAX_TOKENS, "max_seqs": SEQS[-1], "max_context_tokens": KV[-1]},
        error={
            "held_out": pooled(known["residuals"]),
            **error,
            "end_to_end": "not yet judged end to end",
        },
        **known,
        identifiability=[
            "attention of a chunk over tokens cached before it was not timed: derived from the rate of long prompts and how many "
            "multiprocessors the chunk fills",
            *(
                f"{dtype} matrices up to {part['left_out_up_to_bytes'] >> 20} MiB were left out: some of them were multiplied faster than "
                "memory could have delivered them, so they were read from the cache; such shapes are priced by the law of larger ones"
                for dtype, part in ((key.removeprefix("held_out_gemm_"), part) for key, part in error.items())
                if "left_out_up_to_bytes" in part
            ),
            *(
                [
                    "collectives over more than two GPUs are another PCIe host's stated constant (16 GB/s and 20 us) where that is less"
                ]
                if device.link == "pcie"
                else []
            ),
            f"decodes beside a prefill were not timed: their attention is taken to cost {MIXED_FACTOR[kernel]} times a call of its own",
            "batches of unequal contexts were not timed: they are priced as if all were as long as their mean",
            f"without a CUDA graph one operation was timed, a short collective: {source.eager_call_us:.0f} us of the host; eager steps are "
            "priced as if every kernel took the host as long",
            f"decode calls whose KV fits the {device.l2_cache_bytes >> 20} MiB cache were left out: repeated, they read it from there; "
            "in a model the layers in between evict it",
            "norms, rotary embedding and activation were not timed: 5 kernels a layer of 2.2 us, the mean of LLMServingSim's tables "
            "of two other cards, and their traffic at 0.8 of the bandwidth; the sampler likewise",
        ],
        provenance={
            "source": f"{SOURCE}, {source.folder.name}",
            "licence": LICENCE,
            "engine": source.engine,
            "measured_on": source.device,
            "date": date,
            "command": command,
        },
    )


def _all_reduce(table: pd.DataFrame, *, over_pcie: bool) -> dict[str, Any]:
    """By ranks. Over PCIe, vLLM uses its timed kernel for two GPUs only, and a library that was not timed for more."""
    found: dict[str, Any] = {}
    for ranks, part in table.sort_values("message_size").groupby("num_gpus"):
        sizes, us = part["message_size"].astype(int).tolist(), np.maximum.accumulate(part["us"].to_numpy(float))
        if over_pcie and ranks > CUSTOM_OVER_PCIE:
            us = np.minimum(us, [stated_all_reduce_us(int(ranks), size) for size in sizes])
        found[str(ranks)] = {"bytes": sizes, "us": [_short(value) for value in us]}
    return found


def _short(value: float) -> float:
    """Four significant digits: the tables are no better than that."""
    return float(f"{value:.4g}")
