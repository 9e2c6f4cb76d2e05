"""Looking at a run again: blocks of neighbouring requests (or moments) drawn with replacement.

Requests that follow each other share a queue and its batches, so their times are alike. Drawn one by one they would seem to be more
witnesses than they are; drawn in blocks, what neighbours have in common stays together.

Source: Künsch 1989 (moving blocks); Politis and Romano 1992 (circular); Hall, Horowitz and Jing 1995 (blocks of n^(1/3)).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .split import SEED
from .tent import Array

RESAMPLES = 500
LOW, HIGH = 0.05, 0.95
"""Ends of a 90 % interval."""
Indices = npt.NDArray[np.int_]


def block_resamples(count: int, *, length: int | None = None, resamples: int = RESAMPLES) -> Indices:
    """Places `[resamples, count]`: blocks of `length` neighbours (default: n^(1/3)), the last followed by the first; always the same."""
    size = min(count, length or math.ceil(round(count ** (1 / 3), 9)))
    rng = np.random.default_rng([SEED, count, size])
    starts = rng.integers(0, count, (resamples, -(-count // size)))
    places = (starts[:, :, None] + np.arange(size)) % count
    return np.asarray(places.reshape(resamples, -1)[:, :count])


def central_90(values: Array) -> tuple[float, float]:
    """The 90 % interval of resampled values."""
    low, high = np.nanquantile(values, [LOW, HIGH])
    return float(low), float(high)


class Pooled:
    """Values of many requests together, whose statistics are wanted as if some requests had come more or less often."""

    def __init__(self, groups: Sequence[Array]) -> None:
        """`groups` are the values of each request; at least one value in all."""
        values = np.concatenate(list(groups))
        order = np.argsort(values, kind="stable")
        self._sorted = values[order]
        self._sizes = np.asarray([len(group) for group in groups])
        self._sums = np.asarray([float(np.sum(group)) for group in groups])
        self._group = np.repeat(np.arange(len(groups)), self._sizes)[order]

    def statistics(self, chosen: Indices, ranks: Sequence[float]) -> Array:
        """The mean and the percentiles `ranks` of the values of the requests at `chosen` `[n]`, `[1 + len(ranks)]`."""
        total = int(self._sizes[chosen].sum())
        if not total:
            return np.full(1 + len(ranks), np.nan)
        upto = np.cumsum(np.bincount(chosen, minlength=self._sizes.size)[self._group])
        at = (total - 1) * np.asarray(ranks) / 100.0
        below = np.floor(at)
        low = self._sorted[np.searchsorted(upto, below, side="right")]
        high = self._sorted[np.searchsorted(upto, np.minimum(below + 1, total - 1), side="right")]
        mean = float(self._sums[chosen].sum()) / total
        return np.concatenate([[mean], low + (high - low) * (at - below)])
