"""Attention of a GPU from kernel timing tables: whole prompts by their length, decodes by sequences and KV length, per pair of head counts.

FlashAttention 3 runs calls of up to 64 rows (queries of a sequence times the query heads that share a KV head) with a tile half as
wide, which starts sooner. Prompts of either side of that edge are launch and little else, so the edge is a step of a tenth to a third
of such a call. What it takes to start is the kernel's, whatever the heads, and is fitted to all head counts together.

**Source:** vLLM's FlashAttention 3, `heuristics.h`, `use_one_mma_wg`: heads of 128 and `seqlen_q * h / h_k <= 64`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .attention import TOGETHER, decode_features
from .errors import CalibrationError
from .field import at, fit_field
from .readers.aiconfigurator import HEAD_DIM, KernelTables
from .split import error_summary, held_out_mask, judged
from .tent import Array, robust_nonnegative

if TYPE_CHECKING:
    import pandas as pd

SEQS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
KV = (2, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
CHUNKS = (1, 16, 32, 64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 10240, 12288, 16384)
HEADS = (
    (32, 8),
    (16, 4),
    (8, 2),
    (4, 1),
    (64, 8),
    (32, 4),
    (16, 2),
    (8, 1),
    (40, 8),
    (48, 8),
    (32, 32),
    (16, 16),
    (8, 8),
)
"""Query and KV heads of a rank, for common models and tensor-parallel sizes."""
SMALL_BYTES = 2 << 20
"""Calls that read less are mostly launch, wherever they read from."""
LAUNCH_ONLY = 16
"""So are those of so short contexts."""
CACHE_MARGIN = 1.2
NARROW_ROWS = 64
"""Rows of a call up to which FlashAttention 3 takes the narrow tile."""
AXES: dict[str, Callable[[Array, Array], npt.NDArray[np.bool_]]] = {
    "sequences > 128": lambda n, kv: n > 128,
    "KV > 8192": lambda n, kv: kv > 8192,
}
"""Axes that are held out whole."""
Heads = tuple[int, int]
Pairs = list[tuple[Array, Array]]
"""Predicted and measured times."""


def fit_attention_tables(
    source: KernelTables, l2_bytes: int, *, narrow_tile: bool
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Prefill and decode tables for each pair of head counts, and their errors over all of them together.

    `narrow_tile`: short calls run with a tile of their own. Raises: CalibrationError without rows of any known head counts.
    """
    entries: list[dict[str, Any]] = []
    left_out = 0
    held: dict[str, Pairs] = {"decode": [], "prefill": [], **{name: [] for name in AXES}}
    for kv_dtype in sorted(set(source.decode["kv_cache_dtype"])):
        element = 1 if kv_dtype == "fp8" else 2
        timed = {heads: _in_range(_select(source.decode, heads, kv_dtype)) for heads in HEADS}
        prompts = {heads: _select(source.prefill, heads, kv_dtype) for heads in HEADS}
        present = [heads for heads in HEADS if len(timed[heads]) >= 60 and len(prompts[heads]) >= 10]
        if not present:
            continue
        decodes = {
            heads: _without_cached(timed[heads], 2 * heads[1] * HEAD_DIM * element, l2_bytes) for heads in present
        }
        left_out += sum(len(timed[heads]) - len(decodes[heads]) for heads in present)
        prefill = _prefill_lines({heads: prompts[heads] for heads in present}, held["prefill"], narrow_tile)
        entries += [
            {
                "heads": heads[0],
                "kv_heads": heads[1],
                "kv_dtype": kv_dtype,
                "prefill": prefill[heads],
                "decode": _decode_grid(decodes[heads], held),
            }
            for heads in present
        ]
    if not entries:
        raise CalibrationError(f"{source.folder}: no attention rows for any of the head counts {HEADS}")
    errors = {}
    for kind, pairs in held.items():
        if pairs:
            predicted, measured = (np.concatenate(side) for side in zip(*pairs, strict=True))
            if kind in AXES:
                errors[f"held_out_axis: {kind}"] = error_summary(predicted, measured)
            else:
                errors[f"held_out_{kind}"] = judged(predicted, measured, TOGETHER)
    errors["held_out_decode"]["left_out_points"] = left_out
    return entries, errors


def _prefill_lines(
    tables: Mapping[Heads, pd.DataFrame], held_out: Pairs, narrow_tile: bool
) -> dict[Heads, dict[str, Any]]:
    """Time of whole prompts by their length, per pair of head counts."""
    edges = {heads: NARROW_ROWS * heads[1] // heads[0] if narrow_tile else 0 for heads in tables}
    lengths = {heads: table["isl"].to_numpy(float) for heads, table in tables.items()}
    times = {heads: table["us"].to_numpy(float) for heads, table in tables.items()}
    whole = {heads: np.ones(isl.size, dtype=bool) for heads, isl in lengths.items()}
    knots = {heads: _prompt_knots(isl, edges[heads]) for heads, isl in lengths.items()}

    def fitted(chosen: Mapping[Heads, npt.NDArray[np.bool_]]) -> dict[Heads, Array]:
        seen = {heads: (lengths[heads][mask], times[heads][mask]) for heads, mask in chosen.items()}
        laws = _prompt_laws(seen, edges)
        return {
            heads: fit_field(
                [knots[heads]],
                [isl],
                us,
                _prompt_features(np.asarray(knots[heads]), edges[heads]) @ laws[heads],
                passes=1,  # one measurement a knot: nothing tells a wild one from a step
            )
            for heads, (isl, us) in seen.items()
        }

    held = {heads: held_out_mask(isl.size) & (isl > isl.min()) & (isl < isl.max()) for heads, isl in lengths.items()}
    judged_on = fitted({heads: ~mask for heads, mask in held.items()})
    for heads, mask in held.items():
        held_out.append((at(judged_on[heads], [knots[heads]], [lengths[heads][mask]]), times[heads][mask]))
    return {
        heads: {
            "chunk": [int(knot) for knot in knots[heads]],
            "us": [_short(value) for value in values],
            **({"narrow_up_to": edges[heads]} if edges[heads] else {}),
        }
        for heads, values in fitted(whole).items()
    }


def _prompt_knots(isl: Array, edge: int) -> list[float]:
    """Timed lengths, and both sides of the edge between two tiles."""
    timed = {float(chunk) for chunk in CHUNKS if chunk in isl}
    return sorted(timed | ({float(edge), float(edge + 1)} if edge > isl.min() else set()))


def _prompt_laws(seen: Mapping[Heads, tuple[Array, Array]], edges: Mapping[Heads, int]) -> dict[Heads, Array]:
    """Weights of `_prompt_features` per pair of head counts: starts are the same for all, work is each pair's own."""
    designs = {heads: _prompt_features(isl, edges[heads]) for heads, (isl, _) in seen.items()}
    shared, own = 2, 2
    rows = []
    for place, design in enumerate(designs.values()):
        row = np.zeros((len(design), shared + own * len(designs)))
        row[:, :shared] = design[:, :shared]
        row[:, shared + own * place : shared + own * (place + 1)] = design[:, shared:]
        rows.append(row)
    found = robust_nonnegative(np.concatenate(rows), np.concatenate([us for _, us in seen.values()])).values
    return {
        heads: np.concatenate([found[:shared], found[shared + own * place : shared + own * (place + 1)]])
        for place, heads in enumerate(designs)
    }


def _prompt_features(tokens: Array, edge: int) -> Array:
    """What a prompt is made of, `[points, 4]`: starting, starting the wide tile, tokens, pairs of them."""
    wide = (tokens > edge).astype(np.float64) if edge else np.zeros(tokens.size)
    return np.stack([np.ones(tokens.size), wide, tokens, tokens**2], axis=1)


def _in_range(table: pd.DataFrame) -> pd.DataFrame:
    return table[(table["batch_size"] <= SEQS[-1]) & (table["kv"] <= KV[-1])]


def _without_cached(table: pd.DataFrame, bytes_per_token: int, l2_bytes: int) -> pd.DataFrame:
    """All calls but those that read their KV from the cache."""
    kv_bytes = table["batch_size"] * table["kv"] * bytes_per_token
    return table[(kv_bytes <= SMALL_BYTES) | (kv_bytes >= CACHE_MARGIN * l2_bytes) | (table["kv"] <= LAUNCH_ONLY)]


def _decode_grid(table: pd.DataFrame, held_out: Mapping[str, Pairs]) -> dict[str, Any]:
    """Time by sequences and KV length."""
    n, kv, us = (table[name].to_numpy(float) for name in ("batch_size", "kv", "us"))

    def fitted(chosen: npt.NDArray[np.bool_], knots: tuple[list[int], list[int]]) -> Array:
        law = robust_nonnegative(decode_features(n[chosen], kv[chosen]), us[chosen]).values
        x, y = np.meshgrid(*knots, indexing="ij")
        plain = decode_features(x.ravel().astype(float), y.ravel().astype(float)) @ law
        return fit_field(knots, (n[chosen], kv[chosen]), us[chosen], np.maximum(plain, 1.0).reshape(x.shape))

    whole = list(SEQS), list(KV)
    held = held_out_mask(us.size)
    held_out["decode"].append((at(fitted(~held, whole), whole, (n[held], kv[held])), us[held]))
    for axis, is_beyond in AXES.items():
        beyond = is_beyond(n, kv)
        if beyond.any():
            inner = [count for count in SEQS if count <= n[~beyond].max()], [k for k in KV if k <= kv[~beyond].max()]
            held_out[axis].append((at(fitted(~beyond, inner), inner, (n[beyond], kv[beyond])), us[beyond]))
    values = fitted(np.ones(us.size, dtype=bool), whole)
    return {"seqs": whole[0], "context": whole[1], "us": [[_short(value) for value in row] for row in values]}


def _select(table: pd.DataFrame, heads: Heads, kv_dtype: str) -> pd.DataFrame:
    return table[
        (table["num_heads"] == heads[0])
        & (table["num_key_value_heads"] == heads[1])
        & (table["kv_cache_dtype"] == kv_dtype)
    ]


def _short(value: float) -> float:
    """Four significant digits: the tables are no better than that."""
    return float(f"{value:.4g}")
