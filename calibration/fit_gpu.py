"""A `gpu` profile from kernel timing tables: terms from which the step of any dense model is put together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sim.catalog.gpus import gpu

from .attention import TOGETHER, decode_features
from .document import HOST_STATED, PADDED_SIZES, document, pooled, uncertainty
from .errors import CalibrationError
from .field import at, fit_field
from .fit_model import stated_all_reduce_us
from .gemm import MAX_TOKENS, fit_gemm
from .readers.aiconfigurator import HEAD_DIM, LICENCE, SOURCE, KernelTables
from .split import error_summary, held_out_mask, judged
from .tent import Array, robust_nonnegative

if TYPE_CHECKING:
    import pandas as pd

SEQS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
KV = (2, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
CHUNKS = (16, 32, 64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 10240, 12288, 16384)
HEADS = (
    (32, 8),
    (16, 4),
    (8, 2),
    (4, 1),
    (64, 8),
    (32, 4),
    (16, 2),
    (8, 1),
    (40, 8),
    (48, 8),
    (32, 32),
    (16, 16),
    (8, 8),
)
"""Query and KV heads of a rank, for common models and tensor-parallel sizes."""
SMALL_BYTES = 2 << 20
"""Calls that read less are mostly launch, wherever they read from."""
LAUNCH_ONLY = 16
"""So are those of so short contexts."""
CACHE_MARGIN = 1.2
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
    attention, attention_errors = _attention(source, device.l2_cache_bytes)
    error |= attention_errors
    kernel = "FlashAttention 3" if device.architecture == "hopper" else "FlashAttention 2"
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


def _attention(source: KernelTables, l2_bytes: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Prefill and decode tables for each pair of head counts, and their errors over all of them together."""
    entries: list[dict[str, Any]] = []
    held: dict[str, list[tuple[Array, Array]]] = {"decode": [], "prefill": [], "axis": []}
    for kv_dtype in sorted(set(source.decode["kv_cache_dtype"])):
        for heads, kv_heads in HEADS:
            decode = _select(source.decode, heads, kv_heads, kv_dtype)
            prefill = _select(source.prefill, heads, kv_heads, kv_dtype)
            if len(decode) < 60 or len(prefill) < 10:
                continue
            element = 1 if kv_dtype == "fp8" else 2
            entries.append(
                {
                    "heads": heads,
                    "kv_heads": kv_heads,
                    "kv_dtype": kv_dtype,
                    "prefill": _prefill_line(prefill, held["prefill"]),
                    "decode": _decode_grid(decode, 2 * kv_heads * HEAD_DIM * element, l2_bytes, held),
                }
            )
    if not entries:
        raise CalibrationError(f"{source.folder}: no attention rows for any of the head counts {HEADS}")
    errors = {}
    for kind, name in (
        ("decode", "held_out_decode"),
        ("prefill", "held_out_prefill"),
        ("axis", "held_out_axis: sequences > 128"),
    ):
        if held[kind]:
            predicted, measured = (np.concatenate(side) for side in zip(*held[kind], strict=True))
            errors[name] = (
                error_summary(predicted, measured) if kind == "axis" else judged(predicted, measured, TOGETHER)
            )
    return entries, errors


def _prefill_line(table: pd.DataFrame, held_out: list[tuple[Array, Array]]) -> dict[str, Any]:
    """Time of whole prompts by their length."""
    isl, us = table["isl"].to_numpy(float), table["us"].to_numpy(float)
    knots = [chunk for chunk in CHUNKS if isl.min() <= chunk <= isl.max() and chunk in isl]

    def fitted(chosen: npt.NDArray[np.bool_]) -> Array:
        x, y = isl[chosen], us[chosen]
        law = robust_nonnegative(_prompt_features(x), y).values
        return fit_field([knots], [x], y, _prompt_features(np.asarray(knots, dtype=float)) @ law)

    held = held_out_mask(isl.size) & (isl > knots[0]) & (isl < knots[-1])
    inside = isl >= knots[0]
    held_out.append((at(fitted(inside & ~held), [knots], [isl[held]]), us[held]))
    return {"chunk": knots, "us": [_short(value) for value in np.maximum.accumulate(fitted(inside))]}


def _prompt_features(tokens: Array) -> Array:
    return np.stack([np.ones(tokens.size), tokens, tokens**2], axis=1)


def _decode_grid(
    table: pd.DataFrame, bytes_per_token: int, l2_bytes: int, held_out: dict[str, list[tuple[Array, Array]]]
) -> dict[str, Any]:
    """Time by sequences and KV length, without the calls that read their KV from the cache."""
    kv_bytes = table["batch_size"] * table["kv"] * bytes_per_token
    cached = (kv_bytes > SMALL_BYTES) & (kv_bytes < CACHE_MARGIN * l2_bytes) & (table["kv"] > LAUNCH_ONLY)
    table = table[~cached & (table["batch_size"] <= SEQS[-1]) & (table["kv"] <= KV[-1])]
    n, kv, us = (table[name].to_numpy(float) for name in ("batch_size", "kv", "us"))

    def fitted(chosen: npt.NDArray[np.bool_], knots: tuple[list[int], list[int]]) -> Array:
        law = robust_nonnegative(decode_features(n[chosen], kv[chosen]), us[chosen]).values
        x, y = np.meshgrid(*knots, indexing="ij")
        plain = decode_features(x.ravel().astype(float), y.ravel().astype(float)) @ law
        return fit_field(knots, (n[chosen], kv[chosen]), us[chosen], np.maximum(plain, 1.0).reshape(x.shape))

    whole = list(SEQS), list(KV)
    held = held_out_mask(us.size)
    held_out["decode"].append((at(fitted(~held, whole), whole, (n[held], kv[held])), us[held]))
    beyond = n > 128
    if beyond.any():
        inner = [count for count in SEQS if count <= 128], list(KV)
        held_out["axis"].append((at(fitted(~beyond, inner), inner, (n[beyond], kv[beyond])), us[beyond]))
    values = fitted(np.ones(us.size, dtype=bool), whole)
    return {"seqs": whole[0], "context": whole[1], "us": [[_short(value) for value in row] for row in values]}


def _select(table: pd.DataFrame, heads: int, kv_heads: int, kv_dtype: str) -> pd.DataFrame:
    return table[
        (table["num_heads"] == heads)
        & (table["num_key_value_heads"] == kv_heads)
        & (table["kv_cache_dtype"] == kv_dtype)
    ]


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
