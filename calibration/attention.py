"""The attention terms of one layer from measured calls: prefill alone, decode alone, and what decodes add to a prefill.

    call(chunk, context; n, kv) = (prefill(chunk, context)^q + mixed(n, kv)^q)^(1/q) + tile * n * chunk      (chunk > 0)
                                = decode(n, kv)                                                               (chunk = 0)

In a call that holds prefill chunks, decodes run through the kernel made for long queries: it costs them more than a call of
their own, and its grid of (sequences x longest query) has empty tiles that cost `tile` each token. `q` depends on how full the
GPU is: a few decodes find idle multiprocessors beside a short chunk (large q: the longer of both), others do not (q = 1:
the sum).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import CalibrationError
from .split import bootstrap, error_summary, held_out_mask, interval
from .tent import Array, TableFit, fit_grid, mixture

CHUNKS = (16, 64, 128, 256, 512, 1024, 2048)
CONTEXTS = (0, 128, 512, 1024, 2048, 4096, 8192, 16384)
SEQS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
KV = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
OVERLAPS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 8.0)
"""Values of `q` that are tried."""
FULLNESS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""Knots of the overlap, in tiles of queries."""
FEW = 16
"""Fewer decodes than this may find room beside a short chunk."""
TILE = 128
"""Queries a tile of the kernels has."""
LEAST_POINTS = 60
"""Fewer measured points cannot fill a table."""
REFERENCE = {"prefill": (1024.0, 1024.0), "decode": (32.0, 1024.0), "mixed": (32.0, 1024.0)}
"""Shapes at which intervals are stated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFit:
    """Fitted terms of one layer, in microseconds."""

    prefill: TableFit
    decode: TableFit
    mixed: TableFit
    mixed_tile_us: float
    overlap: tuple[float, ...]
    """`q` at each of `FULLNESS`."""
    chunk_knots: tuple[int, ...]
    context_knots: tuple[int, ...]
    seqs_knots: tuple[int, ...]
    kv_knots: tuple[int, ...]

    def predict(self, points: Array) -> Array:
        """Time of calls `[points, (chunk, context, n, kv)]`."""
        chunk, context, n, kv = points.T
        alone = _at(self.decode.values, self.seqs_knots, self.kv_knots, n, kv)
        prefill = _at(self.prefill.values, self.chunk_knots, self.context_knots, chunk, context)
        beside = np.where(n > 0, _at(self.mixed.values, self.seqs_knots, self.kv_knots, n, kv), 0.0)
        q = mixture(FULLNESS, fullness(n, chunk)) @ np.asarray(self.overlap)
        both = together(prefill, beside, q) + self.mixed_tile_us * n * chunk
        result: Array = np.where(chunk == 0, alone, both)
        return result


def fit_attention(points: Array, time_us: Array) -> AttentionFit:
    """Terms from calls `[points, (chunk, context, n, kv)]`. Raises: CalibrationError when a kind of call has too few points."""
    chunk, context, n, kv = points.T
    kinds = {"prefill": n == 0, "decode": chunk == 0, "mixed": (chunk > 0) & (n > 0)}
    for kind, mask in kinds.items():
        if mask.sum() < LEAST_POINTS:
            raise CalibrationError(
                f"{int(mask.sum())} measured {kind} calls cannot identify the {kind} attention term; at least {LEAST_POINTS} are needed"
            )
    chunk_knots, context_knots = _within(CHUNKS, chunk), _within(CONTEXTS, context)
    seqs_knots, kv_knots = _within(SEQS, n), _within(KV, kv)
    alone, steps = kinds["prefill"], kinds["decode"]
    prefill = fit_grid(chunk[alone], context[alone], time_us[alone], chunk_knots, context_knots)
    decode = fit_grid(n[steps], kv[steps], time_us[steps], seqs_knots, kv_knots)
    mixed_points = kinds["mixed"]
    base = _at(prefill.values, chunk_knots, context_knots, chunk[mixed_points], context[mixed_points])
    call = Calls(
        chunk[mixed_points], context[mixed_points], n[mixed_points], kv[mixed_points], time_us[mixed_points], base
    )
    mixed, tile, overlap = _mixed(call, seqs_knots, kv_knots)
    return AttentionFit(
        prefill=prefill,
        decode=decode,
        mixed=mixed,
        mixed_tile_us=tile,
        overlap=overlap,
        chunk_knots=chunk_knots,
        context_knots=context_knots,
        seqs_knots=seqs_knots,
        kv_knots=kv_knots,
    )


def judge_attention(points: Array, time_us: Array) -> dict[str, Any]:
    """Errors on a held-out fifth and on held-out axes, and bootstrap intervals at the reference shapes."""
    held = held_out_mask(len(time_us))
    fit = fit_attention(points[~held], time_us[~held])
    found: dict[str, Any] = {"held_out": error_summary(fit.predict(points[held]), time_us[held])}
    chunk, _, n, kv = points.T
    for kind, mask in {"prefill": n == 0, "decode": chunk == 0, "mixed": (chunk > 0) & (n > 0)}.items():
        found[f"held_out_{kind}"] = error_summary(fit.predict(points[held & mask]), time_us[held & mask])
    axes = {
        "n_decode > 128, decode only": (n > 128) & (chunk == 0),
        "KV > 8192, decode only": (kv > 8192) & (chunk == 0),
    }
    for name, beyond in axes.items():
        if beyond.any():
            inner = fit_attention(points[~beyond], time_us[~beyond])
            found[f"held_out_axis: {name}"] = error_summary(inner.predict(points[beyond]), time_us[beyond])
    return found


def attention_intervals(points: Array, time_us: Array, resamples: int = 20) -> dict[str, list[float]]:
    """Relative 95 % intervals of each term at its reference shape, by resampling the measured calls."""

    def at_references(chosen: npt.NDArray[np.int_]) -> Array:
        fit = fit_attention(points[chosen], time_us[chosen])
        return np.asarray(
            [
                _at(fit.prefill.values, fit.chunk_knots, fit.context_knots, *_one(REFERENCE["prefill"]))[0],
                _at(fit.decode.values, fit.seqs_knots, fit.kv_knots, *_one(REFERENCE["decode"]))[0],
                _at(fit.mixed.values, fit.seqs_knots, fit.kv_knots, *_one(REFERENCE["mixed"]))[0],
            ]
        )

    samples = bootstrap(len(time_us), at_references, resamples)
    return {name: interval(samples[:, i]) for i, name in enumerate(REFERENCE)}


def fit_skew(n: Array, excess: Array, gain: Array) -> TableFit:
    """Share by which attention grows for each unit of `max / mean - 1`, by sequences: a median slope a batch size, so that one odd
    measurement counts little.
    """
    knots = sorted(set(n.tolist()))
    slopes = [max(0.0, float(np.median(gain[n == knot] / excess[n == knot]))) for knot in knots]
    values = np.asarray(slopes)
    weights = mixture(knots, n)
    return TableFit(
        values=values, identified=np.ones(len(knots), dtype=bool), residuals=(weights @ values) * excess - gain
    )


def fullness(n: Array, chunk: Array) -> Array:
    """Tiles of queries in a call: one a decode, one a `TILE` tokens of the chunk."""
    return np.maximum(n + chunk / TILE, 1.0)


def together(prefill: Array, beside: Array, q: Array) -> Array:
    """Time of both kinds of work in one call: the longer for large `q`, the sum for `q = 1`."""
    top = np.maximum(prefill, beside)
    low = np.minimum(prefill, beside)
    result: Array = top * (1.0 + (low / np.maximum(top, 1e-12)) ** q) ** (1.0 / q)
    return result


@dataclass(frozen=True, slots=True)
class Calls:
    """Measured calls that hold one prefill chunk and decodes, `[calls]` each; times in microseconds."""

    chunk: Array
    context: Array
    n: Array
    kv: Array
    time_us: Array
    prefill_us: Array
    """What the prefill alone would take."""


def _mixed(
    calls: Calls, seqs_knots: tuple[int, ...], kv_knots: tuple[int, ...]
) -> tuple[TableFit, float, tuple[float, ...]]:
    """The table of what decodes take beside a prefill, the tile term, and the overlap by how full the GPU is.

    The tile term is how the time of many decodes grows with the chunk. Many decodes add their time to the prefill's, whatever it
    is; a few beside a prefill of next to nothing take the time of the whole call. The overlap is what then explains calls best.
    """
    tile = _tile_us(calls)
    rest = np.maximum(calls.time_us - tile * calls.n * calls.chunk, 0.5)
    many = calls.n >= FEW
    short = (calls.chunk <= 4 * int(calls.chunk.min())) & (calls.context <= 64)
    usable = np.where(many, calls.prefill_us <= 0.7 * rest, short)
    alone = np.where(many, rest - calls.prefill_us, rest)
    points = [
        (n, kv, float(np.median(alone[mine])))
        for n in sorted(set(calls.n.tolist()))
        for kv in sorted(set(calls.kv.tolist()))
        if (mine := usable & (calls.n == n) & (calls.kv == kv)).any()
    ]
    if len(points) < LEAST_POINTS // 2:
        raise CalibrationError(
            f"{len(points)} kinds of decode batches beside a prefill cannot identify what they cost there; "
            f"at least {LEAST_POINTS // 2} are needed"
        )
    where = np.asarray(points)
    table = fit_grid(where[:, 0], where[:, 1], np.maximum(where[:, 2], 0.5), seqs_knots, kv_knots)
    beside = _at(table.values, seqs_knots, kv_knots, calls.n, calls.kv)
    full = fullness(calls.n, calls.chunk)
    tiles = tile * calls.n * calls.chunk
    overlap: list[float] = []
    nearest = np.abs(np.log2(full)[:, None] - np.log2(np.asarray(FULLNESS))[None, :]).argmin(axis=1)
    for bucket in range(len(FULLNESS)):
        mine = nearest == bucket
        if not mine.any():
            overlap.append(overlap[-1] if overlap else OVERLAPS[-1])
            continue

        def error(q: float, mine: npt.NDArray[np.bool_] = mine) -> float:
            predicted = together(calls.prefill_us[mine], beside[mine], np.full(int(mine.sum()), q)) + tiles[mine]
            return float(np.abs(predicted / calls.time_us[mine] - 1).mean())

        overlap.append(min(OVERLAPS, key=error))
    return table, tile, tuple(overlap)


def _tile_us(calls: Calls) -> float:
    """Slope over `n * chunk` of what many short decodes add to a prefill: their own work does not depend on the chunk."""
    added = calls.time_us - calls.prefill_us
    slopes: list[float] = []
    many = (calls.n >= 64) & (calls.kv <= 1024) & (calls.context == 0)
    for n, kv in {(float(a), float(b)) for a, b in zip(calls.n[many], calls.kv[many], strict=True)}:
        same = many & (calls.n == n) & (calls.kv == kv)
        first, last = int(np.argmin(calls.chunk[same])), int(np.argmax(calls.chunk[same]))
        apart = calls.chunk[same][last] - calls.chunk[same][first]
        if apart >= 512:
            slopes.append((added[same][last] - added[same][first]) / (n * apart))
    return max(0.0, float(np.median(slopes))) if slopes else 0.0


def _within(knots: tuple[int, ...], x: Array) -> tuple[int, ...]:
    """The knots up to the largest measured value, and that value."""
    most = int(x.max())
    kept = [knot for knot in knots if knot < most]
    return (*kept, most)


def _at(values: Array, x_knots: tuple[int, ...], y_knots: tuple[int, ...], x: Array, y: Array) -> Array:
    result: Array = np.einsum("pi,pj,ij->p", mixture(x_knots, x), mixture(y_knots, y), values)
    return result


def _one(point: tuple[float, float]) -> tuple[Array, Array]:
    return np.asarray([point[0]]), np.asarray([point[1]])
