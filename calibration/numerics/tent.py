"""Fitting tables: the values at a grid's knots that, interpolated linearly, come closest to scattered measurements.

Each measurement is a mixture of the knots around it, so the fit is a non-negative least-squares problem. Errors are
relative (a microsecond matters at 10 and not at 10,000), and outliers lose weight by Huber's rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
LEAST_WEIGHT = 0.01
"""A knot is identified when some measurement has at least this share of it."""
HUBER = 1.345
"""Residuals up to so many standard deviations keep their full weight (95 % efficiency for normal errors)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFit:
    """A fitted table and what is known of it."""

    values: Array
    """Value at every knot, `[len(knots)]` or `[len(x_knots), len(y_knots)]`."""
    identified: npt.NDArray[np.bool_]
    """False where no measurement is near a knot: its value was filled in from its neighbours."""
    residuals: Array
    """Relative error of the fit at each measurement."""


def mixture(knots: Sequence[float], x: Array) -> Array:
    """Weights `[len(x), len(knots)]` of linear interpolation, continued beyond the last interval, constant before the first knot."""
    grid = np.asarray(knots, dtype=np.float64)
    weights = np.zeros((x.size, grid.size))
    if grid.size == 1:
        weights[:, 0] = 1.0
        return weights
    inside = np.maximum(x, grid[0])
    low = np.clip(np.searchsorted(grid, inside, side="right") - 1, 0, grid.size - 2)
    share = (inside - grid[low]) / (grid[low + 1] - grid[low])
    rows = np.arange(x.size)
    weights[rows, low], weights[rows, low + 1] = 1 - share, share
    return weights


def fit_line(x: Array, time: Array, knots: Sequence[float], *, rising: bool = True) -> TableFit:
    """A table over one variable; `rising` makes it never fall."""
    fit = robust_nonnegative(mixture(knots, x), time, least_weight=LEAST_WEIGHT)
    values, identified = _fill(fit.values, fit.identified, knots)
    return TableFit(values=never_falling(values) if rising else values, identified=identified, residuals=fit.residuals)


def never_falling(values: Array, axis: int = 0) -> Array:
    """Values that never fall along `axis`: midway between the lowest such table above the given one and the highest below it."""
    above = np.maximum.accumulate(values, axis=axis)
    below = np.flip(np.minimum.accumulate(np.flip(values, axis), axis=axis), axis)
    return np.asarray((above + below) / 2)


def robust_nonnegative(design: Array, time: Array, *, rounds: int = 3, least_weight: float = 0.0) -> TableFit:
    """Non-negative coefficients that minimise Huber's loss of relative errors, by re-weighted least squares.

    A coefficient whose column nowhere exceeds `least_weight` is not identified, and 0.

    **Source:** Lawson and Hanson 1974 (NNLS); Huber 1964.
    """
    from scipy.optimize import nnls

    scale = np.maximum(time, np.finfo(np.float64).tiny)
    identified = np.asarray(np.abs(design).max(axis=0) > least_weight)
    relative = design / scale[:, None]
    lengths = np.linalg.norm(relative, axis=0)
    lengths[lengths == 0] = 1.0
    relative = relative / lengths  # columns of one length: units must not decide what the solver sees
    target = np.ones(time.size)
    weights = np.ones(time.size)
    coefficients = np.zeros(design.shape[1])
    residuals = -target
    for _ in range(rounds):
        solved, _ = nnls(relative[:, identified] * weights[:, None], target * weights, maxiter=50 * design.shape[1])
        coefficients[identified] = solved
        residuals = relative @ coefficients - target
        spread = 1.4826 * float(np.median(np.abs(residuals)))
        if spread <= 1e-12:
            break
        weights = np.sqrt(np.minimum(1.0, HUBER * spread / np.maximum(np.abs(residuals), 1e-300)))
    return TableFit(values=coefficients / lengths, identified=identified, residuals=residuals)


def _fill(values: Array, known: npt.NDArray[np.bool_], knots: Sequence[float]) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Values at unknown knots by interpolation between known ones, along the last interval after them, the first before them."""
    if known.all() or not known.any():
        return values, known
    grid = np.asarray(knots, dtype=np.float64)
    filled = mixture(grid[known].tolist(), grid) @ values[known]
    return np.where(known, values, np.maximum(filled, 0.0)), known
