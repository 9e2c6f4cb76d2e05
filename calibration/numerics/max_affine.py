"""Fitting the larger of several sums: memory, whose phases do not overlap, so that a step needs as much as its widest one.

    y = max over planes k of  Σ weight[k, i] * feature[i],    weights at least 0

Each point belongs to the plane that is widest there; planes are fitted to their points, points go to the planes, and so on.
Several starts are tried, because the first partition decides where this ends.

Source: Magnani and Boyd 2009, convex piecewise-linear fitting.
"""

from __future__ import annotations

import numpy as np

from .tent import Array, robust_nonnegative

STARTS = 8
ROUNDS = 20


def fit_max_affine(design: Array, y: Array, planes: int, seed: int = 0) -> Array:
    """Weights `[planes, features]` whose maximum comes closest to `y` in relative error; unused planes are left out."""
    best, least = robust_nonnegative(design, y).values[None, :], np.inf
    rng = np.random.default_rng(seed)
    for start in range(STARTS if planes > 1 else 1):
        weights = _refined(design, y, _first_partition(design, planes, start, rng))
        error = float(np.mean(np.abs(predict_max_affine(weights, design) / y - 1)))
        if error < least:
            best, least = weights, error
    return best


def predict_max_affine(weights: Array, design: Array) -> Array:
    """The widest plane at each point, `[points]`."""
    return np.asarray((design @ weights.T).max(axis=1))


def _first_partition(design: Array, planes: int, start: int, rng: np.random.Generator) -> Array:
    """Which plane each point belongs to at first: sorted along a random direction of the features, and cut."""
    scaled = design / np.maximum(design.max(axis=0), 1e-300)
    direction = rng.normal(size=design.shape[1])
    place = np.argsort(np.argsort(scaled @ direction))
    return np.asarray(place * planes // design.shape[0])


def _refined(design: Array, y: Array, partition: Array) -> Array:
    weights = np.zeros((0, design.shape[1]))
    for _ in range(ROUNDS):
        used = [k for k in np.unique(partition) if (partition == k).sum() >= 3]
        if not used:
            break
        weights = np.stack([robust_nonnegative(design[partition == k], y[partition == k]).values for k in used])
        again = (design @ weights.T).argmax(axis=1)
        if (again == partition).all():
            break
        partition = again
    return weights if len(weights) else robust_nonnegative(design, y).values[None, :]
