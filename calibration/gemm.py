"""The GEMM term from timed shapes: a table over tokens, width and depth, as a `calibration.field`.

For each token count the plain law is `start + a * width * depth + b * width + c * depth`; the table departs from it where the
measurements do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .errors import CalibrationError
from .field import at, best_tie, fit_field
from .split import held_out_mask, judged
from .tent import Array, robust_nonnegative

if TYPE_CHECKING:
    import pandas as pd

MAX_TOKENS = 8192
"""Largest step that is priced from measurements."""
WIDTHS = (512, 768, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 10240, 12288, 16384, 51200, 65536)
"""Matrix widths and depths that are knots, where matrices that wide or deep were timed."""
LEAST_POINTS = 1000
ELEMENT_BYTES = {"bfloat16": 2}
"""Bytes of a weight; formats that are not named here have one."""


def fit_gemm(table: pd.DataFrame, dtype: str, bandwidth_bytes_per_s: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """The term as a profile holds it, and its error on a held-out fifth, with samples of it.

    Raises: CalibrationError for too few shapes.
    """
    table = table[(table["n"] >= WIDTHS[0]) & (table["k"] >= WIDTHS[0]) & (table["m"] <= MAX_TOKENS)]
    timed_shapes = len(table)
    table, cached_bytes = without_cached(table, ELEMENT_BYTES.get(dtype, 1), bandwidth_bytes_per_s)
    if len(table) < LEAST_POINTS:
        raise CalibrationError(
            f"{len(table)} {dtype} GEMM shapes cannot fill the table; at least {LEAST_POINTS} are needed"
        )
    points = [table[name].to_numpy(float) for name in ("m", "n", "k")]
    us = table["us"].to_numpy(float)
    tokens = [int(count) for count in np.unique(points[0])]
    timed = {*points[1].tolist(), *points[2].tolist()}
    widths = [width for width in WIDTHS if width in timed]
    knots: list[Sequence[float]] = [tokens, widths, widths]

    def seen_law(chosen: npt.NDArray[np.bool_]) -> tuple[list[Array], Array]:
        seen = [axis[chosen] for axis in points]
        return seen, _law(tokens, widths, seen, us[chosen])

    held = held_out_mask(us.size)
    seen, law = seen_law(~held)
    tie = best_tie(knots, seen, us[~held], law)
    predicted = at(fit_field(knots, seen, us[~held], law, tie=tie), knots, [axis[held] for axis in points])
    error = judged(predicted, us[held], MATRICES)
    error["same_tile_noise_p95"] = same_tile_noise(table)
    error["deeper_faster_share"] = deeper_faster(table)
    if cached_bytes:
        error["left_out_up_to_bytes"] = cached_bytes
        error["left_out_points"] = timed_shapes - len(table)
    seen, law = seen_law(np.ones(us.size, dtype=bool))
    levels = fit_field(knots, seen, us, law, tie=tie).tolist()
    term = {
        "tokens": tokens,
        "n": widths,
        "k": widths,
        "us": [[[float(f"{value:.4g}") for value in row] for row in level] for level in levels],
    }
    return term, error


MATRICES = 4
"""Matrices of a dense layer, whose errors partly cancel: the errors of a step are means of so many."""
SAME_TILE = (9, 15)
"""Token counts that every kernel runs as one tile: their times differ by nothing but noise."""


LONG = 512
DEEPER_FASTER = 0.95


def same_tile_noise(table: pd.DataFrame) -> float | None:
    """95th percentile of how far times of one matrix with 9 to 15 tokens are from their median; None where they were not timed."""
    part = table[(table["m"] >= SAME_TILE[0]) & (table["m"] <= SAME_TILE[1])]
    if part["m"].nunique() < 3:
        return None
    by_shape = part.groupby(["n", "k"])["us"]
    off = np.abs(part["us"] / by_shape.transform("median") - 1)
    return round(float(off[by_shape.transform("size") >= 3].quantile(0.95)), 5)


def deeper_faster(table: pd.DataFrame) -> float | None:
    """Share of pairs of neighbouring depths, of matrices as wide and of `LONG` tokens or more, in which the deeper one took at least 5 %
    less time: more of the same work, so scatter (or another kernel). None where no pair was timed.
    """
    part = table[table["m"] >= LONG].sort_values("k")
    before = part.groupby(["m", "n"])["us"].shift()
    ratio = (part["us"] / before).dropna()
    return round(float((ratio < DEEPER_FASTER).mean()), 5) if len(ratio) else None


def without_cached(table: pd.DataFrame, element_bytes: int, bandwidth: float) -> tuple[pd.DataFrame, int]:
    """The rows whose weights came from memory, and the largest matrix that was left out.

    A matrix that was multiplied faster than memory could have delivered it was read from the last cache, as in a benchmark that
    repeats itself. In a model the other layers evict it. All matrices up to the largest such one are left out.
    """
    size = table["n"].to_numpy(float) * table["k"].to_numpy(float) * element_bytes
    too_fast = size / bandwidth * 1e6 > table["us"].to_numpy(float)
    largest = int(size[too_fast].max()) if too_fast.any() else 0
    return table[size > largest], largest


def _law(tokens: Sequence[int], widths: Sequence[int], points: Sequence[Array], us: Array) -> Array:
    """The plain law at the knots `[tokens, widths, widths]`; that of the nearest token count where one has too few shapes."""
    m, n, k = points
    across, deep = (axis.ravel().astype(float) for axis in np.meshgrid(widths, widths, indexing="ij"))
    counts = np.asarray([int((m == count).sum()) for count in tokens])
    enough = np.flatnonzero(counts >= 20)
    levels = []
    for place in range(len(tokens)):
        mine = m == tokens[int(enough[np.abs(enough - place).argmin()])]
        levels.append(_features(across, deep) @ robust_nonnegative(_features(n[mine], k[mine]), us[mine]).values)
    return np.stack(levels).reshape(len(tokens), len(widths), len(widths))


def _features(n: Array, k: Array) -> Array:
    return np.stack([np.ones(n.size), n * k, n, k], axis=1)
