"""Calls of attention that hold prefill chunks and decodes at once: what decodes take there, how far the two overlap, and the rest."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from calibration.errors import CalibrationError
from calibration.numerics.field import at, fit_field, unmeasured
from calibration.numerics.tent import Array, robust_nonnegative
from sim.costs.terms import TILE

Knots = tuple[tuple[float, ...], tuple[float, ...]]
OVERLAPS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 8.0)
"""Values of `q` that are tried."""
MANY_TILES = 40
"""Tiles from which on the overlap is one number."""
FEW = 16
"""Fewer decodes than this may find room beside a short chunk."""
LEAST_BATCHES = 30
RATIO_KNOTS = (
    (16.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0),
    (0.0, 1024.0, 4096.0, 16384.0),
    (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0),
    (16.0, 128.0, 512.0, 2048.0, 8192.0, 16384.0),
)
"""Tokens of the chunk, tokens cached before it, decodes, KV of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedFit:
    """Fitted terms of one layer, in microseconds."""

    beside: Array
    """What decodes add to a prefill `[seqs, kv]`."""
    tile_us: float
    """What each decode adds for every token of the chunk."""
    overlap_tiles: tuple[float, ...]
    overlap: tuple[float, ...]
    """`q` at each of `overlap_tiles`."""
    ratio: Array
    """Measured over what these terms make, at `RATIO_KNOTS`."""
    unmeasured: tuple[int, int]
    """Knots of the ratio without a measurement near them, and all."""

    def predict(self, points: Array, prefill_us: Array, launch_us: float, knots: Knots) -> Array:
        """Time of calls `[points, (chunk, context, n, kv)]` whose chunks alone take `prefill_us`."""
        known = [np.clip(axis, grid[0], grid[-1]) for grid, axis in zip(RATIO_KNOTS, points.T, strict=True)]
        ratio: Array = at(self.ratio, RATIO_KNOTS, known)
        return ratio * self.plain(points, prefill_us, launch_us, knots)

    def plain(self, points: Array, prefill_us: Array, launch_us: float, knots: Knots) -> Array:
        """The same without the ratio."""
        chunk, _, n, kv = points.T
        beside = at(self.beside, knots, (n, kv))
        q = np.interp(tiles(n, chunk), self.overlap_tiles, self.overlap)
        work = np.maximum(prefill_us - launch_us, 0.0)
        both: Array = together(work, beside, q) + self.tile_us * n * chunk
        return launch_us + both


def fit_mixed(points: Array, time_us: Array, prefill_us: Array, launch_us: float, knots: Knots) -> MixedFit:
    """Terms from calls that hold both, `[points, (chunk, context, n, kv)]`. Raises: CalibrationError for too few kinds of batches."""
    chunk, _, n, _ = points.T
    tile_us = _tile_us(points, time_us - prefill_us)
    beside = _beside(points, np.maximum(time_us - tile_us * n * chunk, 0.5), prefill_us, launch_us, knots)
    counts = np.minimum(tiles(n, chunk), MANY_TILES)
    found = MixedFit(
        beside=beside,
        tile_us=tile_us,
        overlap_tiles=tuple(np.unique(counts).tolist()),
        overlap=(),
        ratio=np.ones([len(grid) for grid in RATIO_KNOTS]),
        unmeasured=(0, 0),
    )
    chosen: list[float] = []
    for count in found.overlap_tiles:
        mine = counts == count

        def error(q: float, mine: Array = mine) -> float:
            one = replace(found, overlap=(q,), overlap_tiles=(1.0,))
            return float(np.abs(one.plain(points[mine], prefill_us[mine], launch_us, knots) / time_us[mine] - 1).mean())

        chosen.append(min(OVERLAPS, key=error))
    found = replace(found, overlap=tuple(chosen))
    left = time_us / found.plain(points, prefill_us, launch_us, knots)
    axes = list(points.T)
    return replace(
        found, ratio=fit_field(RATIO_KNOTS, axes, left, found.ratio), unmeasured=unmeasured(RATIO_KNOTS, axes)
    )


def tiles(n: Array, chunk: Array) -> Array:
    """Tiles of queries of one head in a call: one a decode, one a `TILE` tokens of the chunk."""
    result: Array = n + np.ceil(chunk / TILE)
    return result


def together(prefill: Array, beside: Array, q: Array) -> Array:
    """Time of both kinds of work in one call: the longer for large `q`, the sum for `q = 1`."""
    top = np.maximum(prefill, beside)
    low = np.minimum(prefill, beside)
    result: Array = top * (1.0 + (low / np.maximum(top, 1e-12)) ** q) ** (1.0 / q)
    return result


def _beside(points: Array, rest_us: Array, prefill_us: Array, launch_us: float, knots: Knots) -> Array:
    """What decodes add, `[seqs, kv]`. Many add their time to the prefill's; a few beside a prefill of next to nothing take the whole
    call but its start.
    """
    chunk, context, n, kv = points.T
    many = n >= FEW
    short = (chunk <= 4 * chunk.min()) & (context <= TILE)
    usable = np.where(many, prefill_us <= 0.7 * rest_us, short)
    alone = np.where(many, rest_us - prefill_us, rest_us - launch_us)
    batches = [
        (a, b, max(0.5, float(np.median(alone[mine]))))
        for a in sorted(set(n.tolist()))
        for b in sorted(set(kv.tolist()))
        if (mine := usable & (n == a) & (kv == b)).any()
    ]
    if len(batches) < LEAST_BATCHES:
        raise CalibrationError(
            f"{len(batches)} kinds of decode batches beside a prefill cannot identify what they cost there; "
            f"at least {LEAST_BATCHES} are needed"
        )
    seqs, length, time = np.asarray(batches).T
    law = robust_nonnegative(_features(seqs, length), time).values
    x, y = np.meshgrid(*knots, indexing="ij")
    plain = np.maximum(_features(x.ravel(), y.ravel()) @ law, 0.5).reshape(x.shape)
    return fit_field(knots, (seqs, length), time, plain)


def _features(n: Array, kv: Array) -> Array:
    return np.stack([np.ones(n.size), n, n * kv], axis=1)


def _tile_us(points: Array, added_us: Array) -> float:
    """Slope over `n * chunk` of what many short decodes add to a prefill: their own work does not depend on the chunk."""
    chunk, context, n, kv = points.T
    slopes: list[float] = []
    many = (n >= 64) & (kv <= 1024) & (context == 0)
    for a, b in {(float(x), float(y)) for x, y in zip(n[many], kv[many], strict=True)}:
        same = many & (n == a) & (kv == b)
        first, last = int(np.argmin(chunk[same])), int(np.argmax(chunk[same]))
        apart = chunk[same][last] - chunk[same][first]
        if apart >= 512:
            slopes.append(float((added_us[same][last] - added_us[same][first]) / (a * apart)))
    return max(0.0, float(np.median(slopes))) if slopes else 0.0
