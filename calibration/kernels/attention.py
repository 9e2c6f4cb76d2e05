"""The attention terms of one layer from measured calls: prefill alone, decode alone, and both in one call.

    call(chunk, context; n, kv) = decode(n, kv)                                                                  (chunk = 0)
                                = launch + prefill work(chunk, context)                                          (n = 0)
                                = (launch + (prefill work^q + beside(n, kv)^q)^(1/q) + tile * n * chunk) * ratio (both)

A GPU of S multiprocessors runs one tile (64 queries of one head) on each, so chunks cost one step of the stairs for each S / heads
tiles. In a call with both, decodes run through the kernel made for long queries: each of their heads is a tile of its own, and
empty tiles cost `tile` each token. `q` depends on how many tiles there are: what fits on the GPU together takes the time of the longer
(large q), what does not takes the sum (q = 1). `ratio` is what that leaves unexplained, by all four sizes: caches, and the order in
which tiles start.

**Source:** FlashAttention 2, `run_mha_fwd_splitkv_dispatch` (64 queries a tile for heads of 128); the stairs are in LLMServingSim's tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from calibration.errors import CalibrationError
from calibration.numerics.field import at, fit_field, unmeasured
from calibration.numerics.split import error_summary, held_out_mask, judged
from calibration.numerics.tent import Array, robust_nonnegative
from sim.costs.terms import TILE

from .attention_mixed import MixedFit, fit_mixed

CHUNKS = (16, 64, 128, 256, 512, 1024, 2048)
CONTEXTS = (0, 128, 512, 1024, 2048, 4096, 8192, 16384)
SEQS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
KV = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
STAIRS_UP_TO = 1100
"""Chunks up to which each step of the stairs has its own knots; further up a step is a small share."""
LEAST_POINTS = 60
"""Fewer measured points cannot fill a table."""
LEAST_US = 0.5
"""No call is shorter."""
TOGETHER = 4
"""Shapes whose errors a run averages at the least: it goes through many batch sizes and lengths."""
KINDS = ("prefill", "decode", "mixed")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFit:
    """Fitted terms of one layer, in microseconds."""

    prefill: Array
    """`[chunks, contexts]`"""
    decode: Array
    """`[seqs, kv]`"""
    mixed: MixedFit
    chunk_knots: tuple[float, ...]
    context_knots: tuple[float, ...]
    seqs_knots: tuple[float, ...]
    kv_knots: tuple[float, ...]
    wave_tiles: float
    """Tiles of one head's worth of queries that the GPU runs at once; 0 when that is not known."""
    unmeasured: dict[str, tuple[int, int]]
    """By table: knots without a measurement near them, and all knots."""

    @property
    def launch_us(self) -> float:
        """A call of next to nothing."""
        return float(self.prefill[0, 0])

    def predict(self, points: Array) -> Array:
        """Time of calls `[points, (chunk, context, n, kv)]`."""
        chunk, context, n, kv = points.T
        alone = at(self.decode, (self.seqs_knots, self.kv_knots), (n, kv))
        prefill = at(self.prefill, (self.chunk_knots, self.context_knots), (chunk, context))
        both = self.mixed.predict(points, prefill, self.launch_us, (self.seqs_knots, self.kv_knots))
        result: Array = np.where(chunk == 0, alone, np.where(n == 0, prefill, both))
        return result


def fit_attention(points: Array, time_us: Array, wave_tiles: float = 0.0) -> AttentionFit:
    """Terms from calls `[points, (chunk, context, n, kv)]` of a GPU that runs `wave_tiles` tiles of all heads at once.

    Raises: CalibrationError when a kind of call has too few points.
    """
    chunk, context, n, kv = points.T
    kinds = {"prefill": n == 0, "decode": chunk == 0, "mixed": (chunk > 0) & (n > 0)}
    for kind, mask in kinds.items():
        if mask.sum() < LEAST_POINTS:
            raise CalibrationError(
                f"{int(mask.sum())} measured {kind} calls cannot identify the {kind} attention term; at least {LEAST_POINTS} are needed"
            )
    knots = {
        "prefill": (_within((*CHUNKS, *_stairs(wave_tiles)), chunk), _within(CONTEXTS, context)),
        "decode": (_within(SEQS, n), _within(KV, kv)),
    }
    alone, steps, both = kinds["prefill"], kinds["decode"], kinds["mixed"]
    prefill = _lawful(_Prefill(wave_tiles), knots["prefill"], (chunk[alone], context[alone]), time_us[alone])
    decode = _lawful(decode_features, knots["decode"], (n[steps], kv[steps]), time_us[steps])
    beside = at(prefill, knots["prefill"], (chunk[both], context[both]))
    mixed = fit_mixed(points[both], time_us[both], beside, float(prefill[0, 0]), knots["decode"])
    return AttentionFit(
        prefill=prefill,
        decode=decode,
        mixed=mixed,
        chunk_knots=knots["prefill"][0],
        context_knots=knots["prefill"][1],
        seqs_knots=knots["decode"][0],
        kv_knots=knots["decode"][1],
        wave_tiles=wave_tiles,
        unmeasured={
            "prefill": unmeasured(knots["prefill"], (chunk[alone], context[alone])),
            "decode": unmeasured(knots["decode"], (n[steps], kv[steps])),
            "ratio": mixed.unmeasured,
        },
    )


def judge_attention(points: Array, time_us: Array, wave_tiles: float = 0.0) -> dict[str, Any]:
    """Errors on a held-out fifth, with samples of them by kind of call, and on held-out axes."""
    held = held_out_mask(len(time_us))
    predicted = fit_attention(points[~held], time_us[~held], wave_tiles).predict(points)
    found: dict[str, Any] = {"held_out": error_summary(predicted[held], time_us[held])}
    chunk, _, n, kv = points.T
    for kind, mask in zip(KINDS, (n == 0, chunk == 0, (chunk > 0) & (n > 0)), strict=True):
        mine = held & mask
        found[f"held_out_{kind}"] = judged(predicted[mine], time_us[mine], TOGETHER)
    axes = {
        "n_decode > 128, decode only": (n > 128) & (chunk == 0),
        "KV > 8192, decode only": (kv > 8192) & (chunk == 0),
    }
    for name, beyond in axes.items():
        if beyond.any():
            inner = fit_attention(points[~beyond], time_us[~beyond], wave_tiles)
            found[f"held_out_axis: {name}"] = error_summary(inner.predict(points[beyond]), time_us[beyond])
    return found


def decode_features(n: Array, kv: Array) -> Array:
    """What a call of decodes is made of, `[points, 3]`: starting, sequences, tokens read."""
    return np.stack([np.ones(n.size), n, n * kv], axis=1)


@dataclass(frozen=True, slots=True)
class _Prefill:
    """What a chunk is made of: starting, tokens, and keys times steps of the stairs, the first of which may be dearer."""

    wave_tiles: float

    def __call__(self, chunk: Array, context: Array) -> Array:
        tiles = np.ceil(chunk / TILE)
        waves = np.ceil(tiles / self.wave_tiles) if self.wave_tiles else tiles
        keys = context + chunk / 2
        return np.stack([np.ones(chunk.size), chunk, waves, waves * keys, (waves - 1) * keys], axis=1)


def _lawful(
    features: Any, knots: tuple[tuple[float, ...], tuple[float, ...]], points: tuple[Array, Array], time: Array
) -> Array:
    """The table at `knots`: the law that fits best, and where measurements are, they."""
    law = robust_nonnegative(features(*points), time).values
    x, y = np.meshgrid(*knots, indexing="ij")
    values = features(x.ravel(), y.ravel()) @ law
    return fit_field(knots, points, time, np.maximum(values, LEAST_US).reshape(x.shape))


def _stairs(wave_tiles: float) -> tuple[int, ...]:
    """The last chunk of each step of the stairs, and the first of the next."""
    found: list[int] = []
    for step in range(1, int(STAIRS_UP_TO / TILE / wave_tiles) + 1 if wave_tiles else 0):
        edge = TILE * int(step * wave_tiles)
        if TILE <= edge <= STAIRS_UP_TO:
            found += [edge, edge + 1]
    return tuple(found)


def _within(knots: tuple[int, ...], x: npt.NDArray[np.float64]) -> tuple[float, ...]:
    """The knots up to the largest measured value, and that value."""
    most = float(x.max())
    return (*sorted({float(knot) for knot in knots if knot < most}), most)
