"""From a GPU's kernel terms to the step of any model on it: the matrices of a rank looked up by their shapes, and added.

What no kernel table holds is said in `notes`: it is derived or a stated constant, and a reader must know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sim.catalog.dtypes import weight_format
from sim.catalog.gpus import Gpu
from sim.catalog.shape import ModelShape
from sim.core.config import ConfigError

from .compose_attention import layer_attention, skew, times
from .layer_matrices import layers_s
from .piecewise import Line, locate
from .profile_file import ProfileFile, grid, host_samples, samples, spreads
from .terms import StepTerms
from .work import elementwise_bytes_per_token

_US = 1e-6
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
MEDIAN_OF_NORMAL = 0.67449
"""Median absolute value of a standard normal number: a median error over it is a standard deviation."""
LOGIT_BYTES = 10
"""Bytes the sampler moves for one logit, as in the roofline."""


def composed_terms(
    profile: ProfileFile,
    model: ModelShape,
    device: Gpu,
    *,
    tensor_parallel_size: int,
    quantization: str | None,
    kv_cache_dtype: str,
    notes: list[str],
    copy_block_s: float,
    swap_block_s: float,
) -> StepTerms:
    """The terms of `model` on one of `tensor_parallel_size` ranks. `quantization` and `kv_cache_dtype` are final, not `auto`.

    Appends to `notes` what was derived or replaced. Raises: ConfigError when the kernel tables cannot price this model.
    """
    _check(profile, model, tensor_parallel_size)
    kernels, limits = profile.data["kernels"], profile.data["range"]
    tp, layers = tensor_parallel_size, model.num_layers
    dtype = _gemm_dtype(kernels["gemm"], quantization, notes)
    gemm = GemmTable(kernels["gemm"][dtype])
    head = GemmTable(kernels["gemm"]["bfloat16"])
    bandwidth = device.memory_bandwidth_bytes_per_s * float(kernels["bandwidth_share"])
    tokens = tuple(count for count in gemm.tokens if count <= limits["max_tokens"])
    short_s = layers * float(kernels["short_kernels_per_layer"]) * float(kernels["short_kernel_us"]) * _US
    traffic_s = elementwise_bytes_per_token(model, 2, tp) / bandwidth

    def dense_s(count: int) -> float:
        return layers_s(model, tp, count, gemm) + max(short_s, count * traffic_s + short_s / 2)

    vocabulary = -(-model.vocab_size // tp)
    sampler_s = float(kernels["sampler_us"]) * _US
    if model.moe is not None:
        notes.append(
            "expert kernels were not timed: the experts that a step visits are priced as one matrix of all of them, with tokens "
            "spread evenly"
        )
    attention = layer_attention(profile, kernels, model.attention[0], tp, kv_cache_dtype, device, notes)
    return StepTerms(
        dense=Line(tuple(map(float, tokens)), _padded_where_cheaper([dense_s(count) for count in tokens])),
        rows=Line(
            tuple(map(float, ROWS)),
            tuple(
                head(rows, vocabulary, model.hidden_size)
                + sampler_s
                + rows * model.vocab_size * LOGIT_BYTES / bandwidth
                for rows in ROWS
            ),
        ),
        all_reduce=_all_reduce(profile, model, tp),
        prefill=times(attention.prefill, layers),
        decode=times(attention.decode, layers),
        mixed=times(attention.mixed, layers),
        mixed_tile_s=layers * attention.tile_s,
        mixed_ratio=attention.ratio,
        wave_tiles=attention.wave_tiles,
        overlap=attention.overlap,
        decode_skew=skew(kernels, "decode_skew", model.attention[0].kv_heads_per_rank(tp)),
        mixed_skew=skew(kernels, "mixed_skew", model.attention[0].kv_heads_per_rank(tp)),
        chunk_launch_s=layers * attention.launch_s,
        gap_s=profile.gap_s(layers, tp),
        **profile.host_s(),
        samples=samples(profile, f"gemm_{dtype}"),
        spreads=spreads(profile) | composition_spread(profile, notes),
        host_samples=host_samples(profile),
        padded_sizes=tuple(int(size) for size in profile.data.get("padded_sizes", ())),
        max_tokens=int(limits["max_tokens"]),
        max_seqs=int(limits["max_seqs"]),
        max_context_tokens=int(limits["max_context_tokens"]),
        copy_block_s=copy_block_s,
        swap_block_s=swap_block_s,
    )


def composition_spread(profile: ProfileFile, notes: list[str]) -> dict[str, float]:
    """How far a model that is put together may be off as a whole: as far as the worst axis, or shape, that the fit was judged on without
    having seen it. Nothing, and a note, where none was held out; nothing where a run of the model corrected the profile.
    """
    if "corrected_on" in profile.data["provenance"]:
        return {}
    error = profile.data["error"]
    medians = [
        float(value["median"])
        for key, value in error.items()
        if key.startswith(("held_out_axis", "held_out_gemm_shape")) and isinstance(value, dict) and value.get("median")
    ]
    if not medians:
        notes.append(
            f"profile {profile.name} held no axis out: what composing another model's shape adds is not in any interval"
        )
        return {}
    return {"composition": max(medians) / MEDIAN_OF_NORMAL}


def _padded_where_cheaper(times: list[float]) -> tuple[float, ...]:
    """No step costs more than one padded to a larger timed size: fp8 kernels are up to 1.5 times as slow for 257 tokens as for 512."""
    found = list(times)
    for i in range(len(found) - 2, -1, -1):
        found[i] = min(found[i], found[i + 1])
    return tuple(found)


class GemmTable:
    """Time of `tokens x k` times `k x n` in seconds, linear between the shapes that were timed and beyond the largest."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        """From a `gemm` table of a profile: knots `tokens`, `n` and `k`, times `us[tokens][n][k]`."""
        self.tokens: tuple[int, ...] = tuple(table["tokens"])
        self._grids = [grid({"n": table["n"], "k": table["k"], "us": level}, "n", "k") for level in table["us"]]

    def __call__(self, tokens: float, n: int, k: int) -> float:
        """Seconds of one multiplication."""
        if tokens in self.tokens:
            return self._grids[self.tokens.index(int(tokens))](n, k)
        i, share = locate(self.tokens, tokens)
        low, high = self._grids[i](n, k), self._grids[i + 1](n, k)
        return max(0.0, low + share * (high - low))


def _check(profile: ProfileFile, model: ModelShape, tp: int) -> None:
    kinds = set(model.attention)
    reason = ""
    if any(kind.is_mla for kind in kinds):
        reason = "its latent attention is in none of its tables"
    elif any(kind.head_dim != profile.data["kernels"]["head_dim"] for kind in kinds):
        reason = f"its attention heads are not of size {profile.data['kernels']['head_dim']}"
    elif tp > 1 and str(tp) not in profile.data["kernels"].get("all_reduce", {}):
        known = ", ".join(profile.data["kernels"].get("all_reduce", {})) or "none"
        reason = f"collectives over {tp} GPUs were not timed (there are: {known})"
    if reason:
        raise ConfigError(f"profile {profile.name} cannot price {model.name}: {reason}; use --profile roofline")


def _gemm_dtype(tables: Mapping[str, Any], quantization: str | None, notes: list[str]) -> str:
    """The GEMM table for a storage format. Raises: ConfigError."""
    form = weight_format(quantization)
    if form is None:
        return "bfloat16"
    if form.compute == "fp8":
        names = [name for name in ("fp8", "fp8_block") if name in tables]
        if names:
            return names[0]
        raise ConfigError("this GPU's kernel tables hold no fp8 GEMM; use --profile roofline or --quantization none")
    raise ConfigError(f"{quantization} weights are in none of the kernel tables; use --profile roofline")


def _all_reduce(profile: ProfileFile, model: ModelShape, tp: int) -> Line | None:
    """Two collectives a layer over the hidden states of a step's tokens."""
    if tp == 1:
        return None
    table = profile.data["kernels"]["all_reduce"][str(tp)]
    by_bytes = Line(tuple(map(float, table["bytes"])), tuple(float(us) * _US for us in table["us"]))
    tokens = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    times = tuple(2 * model.num_layers * by_bytes(2 * model.hidden_size * count) for count in tokens)
    return Line(tuple(map(float, tokens)), times)
