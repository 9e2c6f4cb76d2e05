"""Held-out points: which, and how wrong a fit is on them. The split is drawn once from a stated seed, before anything is fitted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from .tent import Array

SEED = 20260
"""Root of the split and of the bootstrap. Frozen: changing it after seeing an error would make the error meaningless."""
HELD_OUT = 0.2
"""Share of points that a fit does not see when it is judged."""
RESAMPLES = 40
"""Bootstrap resamples."""
DRAWS = 40
"""Draws of a profile's uncertainty that its file keeps."""


def held_out_mask(count: int, seed: int = SEED) -> npt.NDArray[np.bool_]:
    """True for a fifth of `count` points, always the same ones."""
    chosen = np.random.default_rng(seed).permutation(count)[: round(count * HELD_OUT)]
    mask = np.zeros(count, dtype=bool)
    mask[chosen] = True
    return mask


def error_summary(predicted: Array, measured: Array) -> dict[str, Any]:
    """Median and 95th percentile of the absolute relative error, and the median signed one (bias)."""
    error = predicted / measured - 1
    return {
        "points": int(error.size),
        "median": round(float(np.median(np.abs(error))), 5),
        "p95": round(float(np.quantile(np.abs(error), 0.95)), 5),
        "bias": round(float(np.median(error)), 5),
    }


def judged(predicted: Array, measured: Array, together: int = 1) -> dict[str, Any]:
    """The summary, with what is taken out of it before it is kept: draws of the term's error, and every point's."""
    return error_summary(predicted, measured) | {
        "samples": residual_samples(predicted, measured, together),
        "residuals": {"measured_us": measured, "off": predicted / measured - 1},
    }


def residual_samples(predicted: Array, measured: Array, together: int = 1, count: int = DRAWS) -> list[float]:
    """How far a term may be off as a whole: `count` draws, each the mean held-out error of `together` points drawn at random.

    A step adds so many calls of the term, whose errors cancel in part. Factors, such as 1.02 where the term must grow by 2 % to be
    right.
    """
    rng = np.random.default_rng(SEED + 2)
    factors = measured / predicted
    low, high = np.quantile(factors, [0.01, 0.99])  # one wild point must not make a whole term wild
    drawn = np.clip(factors, low, high)[rng.integers(0, factors.size, (count, together))].mean(axis=1)
    return [round(float(value), 4) for value in drawn]


def bootstrap(count: int, estimate: Callable[[npt.NDArray[np.int_]], Array], resamples: int = RESAMPLES) -> Array:
    """`estimate` of `resamples` samples of `count` points drawn with replacement, `[resamples, ...]`."""
    rng = np.random.default_rng(SEED + 1)
    return np.stack([estimate(rng.integers(0, count, count)) for _ in range(resamples)])


def departures(factors: Array) -> list[float]:
    """The central 95 % of drawn factors as departures from 1: `[low, high]`, such as `[-0.01, 0.02]`."""
    low, high = np.quantile(factors, [0.025, 0.975]) - 1
    return [round(float(low), 5), round(float(high), 5)]
