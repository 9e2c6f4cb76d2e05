"""The GEMM term from timed shapes: for each token count, a table over width and depth.

The table is drawn towards a plain law, `start + a * width * depth + b * width + c * depth`, and away from it as far as the
measurements near a knot say so. Knots with few measurements therefore stay sane, and kernels that suit one shape
badly are followed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .errors import CalibrationError
from .split import bootstrap, error_summary, held_out_mask, interval
from .tent import HUBER, Array, mixture, never_falling, robust_nonnegative

if TYPE_CHECKING:
    import pandas as pd

TOKENS = (
    *(1, 2, 4, 8, 16, 17, 32, 33, 48, 64, 65, 96, 97, 128, 129, 192, 193, 256, 257, 384, 512, 513, 768, 769),
    *(1024, 1025, 1536, 1537, 2048, 2049, 3072, 4096, 4097, 8192),
)
"""Token counts whose GEMM times are kept: where tiles are full, and just after."""
WIDTHS = (512, 768, 1024, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192, 10240, 12288, 16384, 65536)
"""Matrix widths and depths that are knots."""
PULL = 0.2
"""Weight of the plain law at a knot, relative to one measurement there."""
LEAST_POINTS = 1000
ROUNDS = 2


def fit_gemm(table: pd.DataFrame, dtype: str) -> tuple[dict[str, Any], dict[str, Any], list[float]]:
    """The term as a profile holds it, its error on a held-out fifth, and the interval of its bias.

    Raises: CalibrationError for too few shapes.
    """
    table = table[(table["n"] >= WIDTHS[0]) & (table["k"] >= WIDTHS[0])]
    if len(table) < LEAST_POINTS:
        raise CalibrationError(
            f"{len(table)} {dtype} GEMM shapes cannot fill the table; at least {LEAST_POINTS} are needed"
        )
    m, n, k, us = (table[name].to_numpy(float) for name in ("m", "n", "k", "us"))
    tokens = tuple(count for count in TOKENS if (m == count).any())

    def fitted(chosen: npt.NDArray[np.bool_]) -> Array:
        levels = [_level(n[mine], k[mine], us[mine]) for count in tokens if (mine := chosen & (m == count)).any()]
        return never_falling(np.stack(levels), axis=0)

    held = held_out_mask(us.size)
    judged = held & (m <= tokens[-1])
    predicted = _at(fitted(~held), tokens, m[judged], n[judged], k[judged])
    off = predicted / us[judged]
    samples = bootstrap(off.size, lambda sample: np.asarray(np.median(off[sample])))
    levels = fitted(np.ones(us.size, dtype=bool)).tolist()
    term = {
        "tokens": list(tokens),
        "n": list(WIDTHS),
        "k": list(WIDTHS),
        "us": [[[float(f"{value:.4g}") for value in row] for row in level] for level in levels],
    }
    return term, error_summary(predicted, us[judged]), interval(samples)


def _level(n: Array, k: Array, us: Array) -> Array:
    """Times at the knots for one token count, `[len(WIDTHS), len(WIDTHS)]`: least squares of relative errors, Huber-weighted."""
    law = robust_nonnegative(_features(n, k), us).values
    across, deep = np.meshgrid(WIDTHS, WIDTHS, indexing="ij")
    plain = _features(across.ravel().astype(float), deep.ravel().astype(float)) @ law
    mixed = (mixture(WIDTHS, n)[:, :, None] * mixture(WIDTHS, k)[:, None, :]).reshape(n.size, -1)
    design = np.vstack([mixed / us[:, None], np.diag(PULL / plain)])
    target = np.concatenate([np.ones(n.size), np.full(plain.size, PULL)])
    weights = np.ones(target.size)
    values = plain
    for _ in range(ROUNDS):
        values = np.maximum(np.linalg.lstsq(design * weights[:, None], target * weights, rcond=None)[0], 0.0)
        residuals = np.abs((design @ values - target)[: n.size])
        spread = 1.4826 * float(np.median(residuals)) + 1e-12
        weights[: n.size] = np.sqrt(np.minimum(1.0, HUBER * spread / np.maximum(residuals, 1e-12)))
    return np.asarray(values.reshape(across.shape))


def _features(n: Array, k: Array) -> Array:
    return np.stack([np.ones(n.size), n * k, n, k], axis=1)


def _at(levels: Array, tokens: tuple[int, ...], m: Array, n: Array, k: Array) -> Array:
    weights = mixture(tokens, m), mixture(WIDTHS, n), mixture(WIDTHS, k)
    result: Array = np.einsum("pm,pn,pk,mnk->p", *weights, levels, optimize=True)
    return result
