"""The GEMM term of a card from a few timed matrices: those of the models whose kernels were timed on it.

A table over shapes needs thousands of them. A law with one rate a token count needs few, and the error on each matrix when it is
left out says how far it can be trusted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sim.catalog.models import model_shape
from sim.costs.layer_matrices import matrices

from .errors import CalibrationError
from .gemm import WIDTHS
from .readers.llmservingsim import KernelProfile
from .split import judged
from .tent import Array, robust_nonnegative

MATRICES = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
LEAST_SHAPES = 4
TOKENS_HERE = (
    *(1, 2, 4, 8, 16, 17, 32, 33, 48, 64, 65, 96, 97, 128, 129, 192, 193, 256, 257, 384, 512, 513, 768, 769),
    *(1024, 1025, 1536, 1537, 2048),
)
"""Token counts that LLMServingSim's tables reach."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Matrices and what they took."""

    width: Array
    """`[shapes]`"""
    depth: Array
    """`[shapes]`"""
    us: Array
    """`[tokens, shapes]`, at `TOKENS_HERE`, between the timed counts"""

    def without(self, out: int) -> Timed:
        """The same without one shape."""
        return Timed(*(np.delete(part, out, axis=-1) for part in (self.width, self.depth, self.us)))


@dataclass(frozen=True, slots=True)
class GemmLaw:
    """`start + traffic x tokens x (width + depth) + rate(tokens) x width x depth`, in microseconds.

    What it takes to start, and to read and write an element of an activation, are the same for all token counts, so that neither a
    small nor a large matrix is extrapolated from the few of one count.
    """

    start_us: float
    traffic_us: float
    """An element of the activations."""
    rate_us: Array
    """An element of the matrix, `[tokens]`."""

    def us(self, width: Array, depth: Array) -> Array:
        """Times `[tokens, ...]`."""
        tokens = np.asarray(TOKENS_HERE, dtype=np.float64).reshape(-1, *(1,) * width.ndim)
        rate = self.rate_us.reshape(tokens.shape)
        return np.asarray(self.start_us + self.traffic_us * tokens * (width + depth) + rate * width * depth)


def timed_matrices(sources: Sequence[KernelProfile]) -> Timed:
    """Every matrix of the models that was timed. Raises: CalibrationError for too few of them."""
    shapes: list[tuple[int, int]] = []
    columns: list[Array] = []
    for source in sources:
        of_model = matrices(model_shape(source.meta["model"]), source.tensor_parallel_size)
        by_op = {name: part.sort_values("tokens") for name, part in source.dense.groupby("layer")}
        for op, shape in zip(MATRICES, of_model, strict=True):
            if op in by_op:
                shapes.append(shape)
                columns.append(np.interp(TOKENS_HERE, by_op[op]["tokens"], by_op[op]["time_us"]))
    if len(shapes) < LEAST_SHAPES:
        raise CalibrationError(
            f"{len(shapes)} timed matrices cannot tell start and rate apart; at least {LEAST_SHAPES} are needed"
        )
    width, depth = np.asarray(shapes, dtype=np.float64).T
    return Timed(width, depth, np.stack(columns, axis=1))


def fit_few(timed: Timed) -> GemmLaw:
    """Start, traffic and rates, all token counts together."""
    counts, shapes = timed.us.shape
    tokens = np.repeat(np.asarray(TOKENS_HERE, dtype=np.float64), shapes)
    width, depth = np.tile(timed.width, counts), np.tile(timed.depth, counts)
    rates = np.repeat(np.eye(counts), shapes, axis=0) * (width * depth)[:, None]
    design = np.column_stack([np.ones(tokens.size), tokens * (width + depth), rates])
    found = robust_nonnegative(design, timed.us.ravel()).values
    return GemmLaw(float(found[0]), float(found[1]), found[2:])


def judge_few(timed: Timed) -> dict[str, Any]:
    """The error on each matrix when it is left out."""
    predicted = [
        fit_few(timed.without(out)).us(timed.width[out : out + 1], timed.depth[out : out + 1])
        for out in range(timed.width.size)
    ]
    return judged(np.concatenate(predicted, axis=1).ravel(), timed.us.ravel(), len(MATRICES))


def as_table(law: GemmLaw) -> list[list[list[float]]]:
    """Times at `TOKENS_HERE`, `WIDTHS` and `WIDTHS`, as a profile holds them."""
    across, deep = np.meshgrid(
        np.asarray(WIDTHS, dtype=np.float64), np.asarray(WIDTHS, dtype=np.float64), indexing="ij"
    )
    return [[[float(f"{value:.4g}") for value in row] for row in level] for level in law.us(across, deep).tolist()]
