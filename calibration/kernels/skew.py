"""What batches of unequal contexts cost beyond their mean, from measured pairs of such calls.

The decode kernel splits long sequences over the GPU as long as a batch is small: then unequal lengths cost next to nothing. From a
certain batch on it gives each sequence to one block of threads, and the longest is finished last. On what goes before and after that
edge one measurement on each side says enough; between them a line would be wrong.

**Source:** FlashAttention 2, `num_splits_heuristic`: no split from 0.8 x (2 x multiprocessors) blocks on, one a sequence and KV head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from calibration.numerics.split import error_summary
from calibration.numerics.tent import Array

if TYPE_CHECKING:
    import pandas as pd

LEAST_US = 40.0
"""Attention calls shorter than this are mostly launch, and say nothing about skew."""
NONE = {"seqs": [1], "share": [0.0]}


@dataclass(frozen=True, slots=True, kw_only=True)
class SkewTable:
    """A `skew.csv`, and what decides where its kernel stops splitting."""

    table: pd.DataFrame
    kv_heads: int
    """KV heads of a rank."""
    sm_count: int

    @property
    def split_up_to(self) -> int:
        """Largest batch whose sequences the kernel splits."""
        return int(0.8 * 2 * self.sm_count / self.kv_heads - 1e-9)


def skew_terms(skew: SkewTable | None, kv_heads: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The terms `decode_skew` and `mixed_skew` (0 without a table), and their errors with and without the term.

    For another number of `kv_heads` than the table's, batches count in proportion: it is blocks that fill the GPU.
    """
    if skew is None:
        return {"decode_skew": NONE, "mixed_skew": NONE}, {}
    found: dict[str, Any] = {}
    errors: dict[str, Any] = {}
    for key, regime in (("decode_skew", "pure"), ("mixed_skew", "mixed")):
        part = skew.table[(skew.table["regime"] == regime) & (skew.table["t_mean_us"] >= LEAST_US)]
        n = part["n"].to_numpy(float)
        excess = (part["kv_big"] / part["kv_mean"] - 1).to_numpy(float)
        ratio = (part["t_skew_us"] / part["t_mean_us"]).to_numpy(float)
        seqs, share = _shares(n, excess, ratio - 1)
        predicted = 1 + np.interp(n, seqs, share) * excess
        errors[regime] = error_summary(predicted, ratio) | {
            "without_the_term": error_summary(np.ones_like(ratio), ratio)
        }
        if regime == "pure":
            seqs, share = _with_edge(seqs, share, skew.split_up_to)
        scale = skew.kv_heads / (kv_heads or skew.kv_heads)
        found[key] = {"seqs": [round(count * scale) for count in seqs], "share": [round(one, 5) for one in share]}
    return found, errors


def _shares(n: Array, excess: Array, gain: Array) -> tuple[list[float], list[float]]:
    """Share by which attention grows for each unit of `max / mean - 1`, by sequences: a median slope a batch size, so that one odd
    measurement counts little.
    """
    knots = sorted(set(n.tolist()))
    return knots, [max(0.0, float(np.median(gain[n == knot] / excess[n == knot]))) for knot in knots]


def _with_edge(seqs: list[float], share: list[float], edge: int) -> tuple[list[float], list[float]]:
    """Knots on both sides of the edge. Beyond it the longest sequence adds the same time to any batch, so its share falls as 1 / n."""
    below = [i for i, count in enumerate(seqs) if count <= edge]
    above = [i for i, count in enumerate(seqs) if count > edge + 1]
    if not below or not above or seqs[below[-1]] == edge:
        return seqs, share
    last, first = below[-1], above[0]
    inserted = [float(edge), float(edge + 1)], [share[last], share[first] * seqs[first] / (edge + 1)]
    return (
        [*seqs[: last + 1], *inserted[0], *seqs[first:]],
        [*share[: last + 1], *inserted[1], *share[first:]],
    )
