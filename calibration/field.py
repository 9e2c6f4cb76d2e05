"""Tables over several variables that follow a plain law, and depart from it as far, and as abruptly, as the measurements say.

At every knot the table is `law x ratio`. The ratios are a field in which neighbours are tied together, and each measurement
pulls at the knots around it:

    minimise   sum over measurements  (predicted / measured - 1)^2      (Huber's loss)
             + sum over gaps          stiffness(gap) x (ratio - ratio of the next knot)^2

The stiffness of a gap is one over the mean square by which ratios across it were found to differ: where a kernel changes its
tile from 64 to 65 tokens the tie is loose, from 65 to 96 it is tight. A knot without a measurement takes after the neighbours it
is tied to, so a fifth of a grid can be left out and predicted.

**Source:** Gaussian Markov random fields (Rue and Held 2005); Huber 1964.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .split import SEED, held_out_mask
from .tent import HUBER, LEAST_WEIGHT, Array, mixture

FIRST_STIFFNESS = 0.1
"""Of every gap, before anything is known of it."""
TIE = 1e-4
"""Mean square of a measurement's own scatter, in units of which gaps are stiff."""
TIES = (3e-6, 1e-5, 3e-5, 1e-4, 3e-4)
"""Those that are tried where it is looked for: a table's scatter is from less than 1 % to some 10 %."""
LEAST_STEP = 0.003
"""No two neighbours are tied tighter than if their ratios differed by this much."""
PASSES = 3


def fit_field(
    knots: Sequence[Sequence[float]],
    points: Sequence[Array],
    time: Array,
    law: Array,
    passes: int = PASSES,
    tie: float = TIE,
) -> Array:
    """Values at the knots, `[len(knots[0]), len(knots[1]), ...]`, between which the table is linear in each variable.

    `points` are one array `[measurements]` a variable, `time` their times, and `law` the plain law's values at the knots, all
    above 0. Extreme gaps (no measured pair across them) stay as stiff as at first. The larger `tie`, the more neighbours say.
    """
    from scipy import sparse

    shape = law.shape
    design = _design(knots, points) @ sparse.diags(law.ravel())
    design = sparse.diags(1.0 / time) @ design  # predicted / measured
    gaps = [_gaps(shape, axis) for axis in range(len(shape))]
    near = np.asarray(design.power(2).sum(axis=0)).ravel() > 0
    stiffness = [np.full(shape[axis] - 1, FIRST_STIFFNESS) for axis in range(len(shape))]
    ratio = np.ones(law.size)
    weights = np.ones(time.size)
    for _ in range(passes):
        ratio = _solve(design, weights, gaps, stiffness, ratio)
        misses = np.abs(design @ ratio - 1.0)
        spread = 1.4826 * float(np.median(misses)) + 1e-9
        weights = np.minimum(1.0, HUBER * spread / np.maximum(misses, 1e-12))
        stiffness = [_stiffness(ratio, near, pair, old, tie) for pair, old in zip(gaps, stiffness, strict=True)]
    return np.asarray(np.maximum(ratio, 0.0).reshape(shape) * law)


def best_tie(knots: Sequence[Sequence[float]], points: Sequence[Array], time: Array, law: Array) -> float:
    """The tie under which four fifths of these measurements best predict the other fifth (mean relative error).

    Give it no measurement that the fit will be judged on.
    """
    out = held_out_mask(time.size, SEED + 3)

    def error(tie: float) -> float:
        values = fit_field(knots, [axis[~out] for axis in points], time[~out], law, tie=tie)
        return float(np.abs(at(values, knots, [axis[out] for axis in points]) / time[out] - 1).mean())

    return min(TIES, key=error)


def at(values: Array, knots: Sequence[Sequence[float]], points: Sequence[Array]) -> Array:
    """The table's values at points, one array `[points]` a variable."""
    result: Array = _design(knots, points) @ values.ravel()
    return result


def unmeasured(knots: Sequence[Sequence[float]], points: Sequence[Array]) -> tuple[int, int]:
    """How many knots have no measurement in the cells around them, and how many there are."""
    weights = np.asarray(_design(knots, points).sum(axis=0)).ravel()
    return int((weights <= LEAST_WEIGHT).sum()), int(weights.size)


def _design(knots: Sequence[Sequence[float]], points: Sequence[Array]) -> Any:
    """Sparse weights `[points, knots]` of multilinear interpolation."""
    from scipy import sparse

    count = points[0].size
    columns, weights = np.zeros((count, 1), dtype=np.int64), np.ones((count, 1))
    for grid, x in zip(knots, points, strict=True):
        share = mixture(grid, x)
        top = np.argsort(-np.abs(share), axis=1, kind="stable")[:, : min(2, len(grid))]
        columns = (columns[:, :, None] * len(grid) + top[:, None, :]).reshape(count, -1)
        weights = (weights[:, :, None] * np.take_along_axis(share, top, axis=1)[:, None, :]).reshape(count, -1)
    rows = np.repeat(np.arange(count), columns.shape[1])
    size = int(np.prod([len(grid) for grid in knots]))
    return sparse.csr_matrix((weights.ravel(), (rows, columns.ravel())), shape=(count, size))


def _gaps(shape: tuple[int, ...], axis: int) -> tuple[Any, Any]:
    """Flat indices of the knots before and after each gap along an axis, `[gaps, pairs]`."""
    flat = np.moveaxis(np.arange(int(np.prod(shape))).reshape(shape), axis, 0).reshape(shape[axis], -1)
    return flat[:-1], flat[1:]


def _stiffness(ratio: Array, near: Any, pair: tuple[Any, Any], old: Array, tie: float) -> Array:
    before, after = pair
    known = near[before] & near[after]
    steps = np.where(known, np.abs(ratio[before] - ratio[after]), 0.0)
    counts = known.sum(axis=1)
    mean = steps.sum(axis=1) / np.maximum(counts, 1)
    return np.where(counts >= 3, tie / np.maximum(mean, LEAST_STEP) ** 2, old)


def _solve(design: Any, weights: Array, gaps: list[tuple[Any, Any]], stiffness: list[Array], start: Array) -> Array:
    """Ratios that minimise the weighted squares, by conjugate gradients on the normal equations."""
    from scipy import sparse
    from scipy.sparse.linalg import cg

    weighted = sparse.diags(weights) @ design
    normal = (design.T @ weighted).tocsr()
    for (before, after), stiff in zip(gaps, stiffness, strict=True):
        tie = np.repeat(stiff, before.shape[1])
        i, j = before.ravel(), after.ravel()
        ones = (np.concatenate([tie, tie, -tie, -tie]), (np.concatenate([i, j, i, j]), np.concatenate([i, j, j, i])))
        normal = normal + sparse.csr_matrix(ones, shape=normal.shape)
    right = np.asarray(weighted.sum(axis=0)).ravel()
    diagonal = np.maximum(normal.diagonal(), 1e-12)
    solved, _ = cg(normal, right, x0=start, rtol=1e-6, maxiter=2000, M=sparse.diags(1.0 / diagonal))
    return np.asarray(solved)
