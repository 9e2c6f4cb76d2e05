"""The physical model of a measured step: what its time is a sum of, and the non-negative weights that come closest.

    step = constant + dense(tokens) + [sampled] (launch + a row) + [decodes] (launch + a sequence + Σ context + excess of the longest)
         + [chunks] (launch + a chunk + pairs of query and key, masked ones + KV read) + copies + swaps

Every term is a feature of the step's sizes times a weight that is at least 0; `dense` is a never-falling line through knots.
What a prompt token costs in attention, whatever its keys, is in `dense`: no step could tell it from what it costs elsewhere.
Steps are compared relatively, and steps that the model cannot explain lose weight (Huber).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from sim.core.batch_shape import BatchShape

from .split import DRAWS, bootstrap
from .tent import Array, robust_nonnegative

DENSE_KNOTS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
"""Token counts at which the dense line may bend."""
TERMS: dict[str, str] = {
    "step": "constant of a step: host, launches, and reading the weights",
    "sample_launch": "LM head and sampler, whatever the rows",
    "rows": "LM head and sampler, a sampled row",
    "decode_launch": "attention of the decodes, whatever they are",
    "decode_seq": "attention of a decode, whatever its context; its share of the host's work",
    "decode_context": "attention of a decode, a token of context",
    "decode_excess": "waiting for the longest context, a token by which all others fall short of it",
    "chunk_launch": "attention of the prompt chunks, whatever they are",
    "chunk_seq": "attention of a chunk, whatever its length; its share of the host's work",
    "chunk_pair": "attention of a chunk, a pair of query and key",
    "chunk_masked": "attention of a chunk, a pair of a query and a later key, for kernels that compute those too",
    "chunk_context": "attention of a chunk, a token of KV that it reads",
    "copied_block": "copying a block",
    "swapped_block": "moving a block between device and host",
}
"""Terms beside the dense line, and what they stand for."""
TOLD_APART = 0.02
"""A term of which the others make up all but this share (of its column's length) is not identified."""


def dense_knots(max_tokens: int) -> tuple[int, ...]:
    """The knots of the dense line up to the most tokens that were measured."""
    return (*(knot for knot in DENSE_KNOTS if knot < max_tokens / 1.5), max_tokens)


def names(knots: Sequence[int]) -> tuple[str, ...]:
    """Names of all weights: the terms, and the rise of the dense line from one knot to the next."""
    rises = tuple(f"dense_{low}_{high}" for low, high in pairwise(knots))
    return (*TERMS, *rises)


def features(shapes: Sequence[BatchShape], knots: Sequence[int]) -> Array:
    """What each weight is multiplied with, `[steps, weights]`."""
    grid = np.asarray(knots, dtype=np.float64)
    rows = []
    for shape in shapes:
        n, context = shape.decode_seqs, shape.decode_context_tokens
        chunks = np.asarray(shape.prefill, dtype=np.float64).reshape(-1, 2)
        tokens, cached = chunks[:, 0], chunks[:, 1]
        rises = np.maximum((shape.num_tokens - grid[:-1]) / np.diff(grid), 0.0)
        rises[:-1] = np.minimum(rises[:-1], 1.0)
        rows.append(
            [
                1.0,
                shape.sampled_seqs > 0,
                shape.sampled_seqs,
                n > 0,
                n,
                context,
                n * shape.decode_max_context_tokens - context,
                len(chunks) > 0,
                len(chunks),
                (tokens * cached + tokens * (tokens + 1) / 2).sum(),
                (tokens * (tokens - 1) / 2).sum(),
                (tokens + cached).sum(),
                shape.copied_blocks,
                shape.swapped_blocks,
                *rises.tolist(),
            ]
        )
    return np.asarray(rows, dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """Fitted weights, in microseconds."""

    knots: tuple[int, ...]
    values: dict[str, float]

    def predict(self, shapes: Sequence[BatchShape]) -> Array:
        """Duration of steps, `[steps]`, in microseconds."""
        weights = np.asarray([self.values[name] for name in names(self.knots)])
        return np.asarray(features(shapes, self.knots) @ weights)

    def parts(self, shapes: Sequence[BatchShape]) -> dict[str, Array]:
        """The same by term, the dense line as one; `[steps]` each."""
        products = features(shapes, self.knots) * np.asarray([self.values[name] for name in names(self.knots)])
        found = {name: products[:, i] for i, name in enumerate(TERMS)}
        return {**found, "dense": products[:, len(TERMS) :].sum(axis=1)}


def fit_model(shapes: Sequence[BatchShape], time_us: Array, knots: Sequence[int]) -> StepModel:
    """The weights that explain steps best."""
    fit = robust_nonnegative(features(shapes, knots), time_us)
    return StepModel(knots=tuple(knots), values=dict(zip(names(knots), fit.values.tolist(), strict=True)))


def weight_samples(
    shapes: Sequence[BatchShape], time_us: Array, knots: Sequence[int], resamples: int = DRAWS
) -> list[StepModel]:
    """Models fitted to steps drawn with replacement: together they say how uncertain the weights are."""
    design = features(shapes, knots)

    def estimate(chosen: npt.NDArray[np.int_]) -> Array:
        return robust_nonnegative(design[chosen], time_us[chosen]).values

    samples = bootstrap(len(shapes), estimate, resamples)
    return [StepModel(knots=tuple(knots), values=dict(zip(names(knots), row, strict=True))) for row in samples.tolist()]


def told_apart(shapes: Sequence[BatchShape], time_us: Array, knots: Sequence[int]) -> dict[str, tuple[float, str]]:
    """For each weight, which share of its column the others cannot make up, and which of them is most like it.

    Columns are weighted as in the fit: a step counts relatively. A column of zeros has share 0 and is like nothing.
    """
    design = features(shapes, knots) / time_us[:, None]
    lengths = np.linalg.norm(design, axis=0)
    scaled = design / np.where(lengths > 0, lengths, 1.0)
    found = {}
    for i, name in enumerate(names(knots)):
        if lengths[i] == 0:
            found[name] = (0.0, "")
            continue
        others = np.delete(scaled, i, axis=1)
        rest = scaled[:, i] - others @ np.linalg.lstsq(others, scaled[:, i], rcond=None)[0]
        alike = np.abs(scaled[:, i] @ scaled)
        alike[i] = -1.0
        found[name] = (float(np.linalg.norm(rest)), names(knots)[int(np.argmax(alike))])
    return found
