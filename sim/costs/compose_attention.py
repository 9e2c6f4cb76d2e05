"""The attention of a layer of any model from a GPU's kernel terms: what was timed for the nearest head counts, in proportion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from sim.catalog.gpus import Gpu
from sim.catalog.layers import AttentionShape
from sim.core.config import ConfigError

from .piecewise import Field, Grid, Line
from .profile_file import ProfileFile, grid, line, ratio
from .terms import NO_OVERLAP, NO_SKEW, TILE

_US = 1e-6
CONTEXTS = (0, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768)
OVERLAP_BEYOND = 1.2
"""Waves of tiles from which prefill and decodes of one call hardly overlap. **Source:** the overlaps fitted to LLMServingSim's tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAttention:
    """Attention of one layer on one rank, in seconds; terms as in `StepTerms`."""

    prefill: Grid
    launch_s: float
    """Part of a chunk that several chunks in one call pay once."""
    decode: Grid
    mixed: Grid
    tile_s: float
    overlap: Line
    ratio: Field | None
    wave_tiles: float


def layer_attention(
    profile: ProfileFile,
    kernels: Mapping[str, Any],
    kind: AttentionShape,
    tp: int,
    kv_dtype: str,
    device: Gpu,
    notes: list[str],
) -> LayerAttention:
    """From the entry whose head counts are nearest, in proportion where they are not the same."""
    heads, kv_heads = kind.num_heads // tp, kind.kv_heads_per_rank(tp)
    of_dtype = [
        entry for entry in kernels["attention"] if entry["kv_dtype"] == ("fp8" if "fp8" in kv_dtype else "bfloat16")
    ]
    if not of_dtype:
        raise ConfigError(f"profile {profile.name} has no attention over {kv_dtype} KV; use --profile roofline")
    entry = min(of_dtype, key=lambda one: (abs(one["kv_heads"] - kv_heads), abs(one["heads"] - heads)))
    decode = grid(entry["decode"], "seqs", "context")
    mixed = (
        grid(entry["mixed"], "seqs", "context") if "mixed" in entry else times(decode, float(kernels["mixed_factor"]))
    )
    if (entry["heads"], entry["kv_heads"]) != (heads, kv_heads):
        notes.append(
            f"attention with {heads} query and {kv_heads} KV heads a rank was not timed: taken from {entry['heads']} and "
            f"{entry['kv_heads']}, in proportion"
        )
        decode, mixed = (times(table, kv_heads / entry["kv_heads"]) for table in (decode, mixed))
    wave_tiles = device.sm_count / heads if kernels.get("stairs") else 0.0
    if kind.window is not None:
        notes.append("sliding-window layers are priced as if they read every token, too dear for long contexts")
    prefill = _prefill(entry, heads, device, stairs=wave_tiles > 0)
    return LayerAttention(
        prefill=prefill,
        launch_s=_launch_s(prefill, entry["prefill"].get("narrow_up_to", 0)),
        decode=decode,
        mixed=mixed,
        tile_s=float(entry.get("mixed_tile_us", 0.0)) * _US * heads / entry["heads"],
        overlap=_overlap(entry, heads, wave_tiles),
        ratio=ratio(entry.get("mixed_ratio")),
        wave_tiles=wave_tiles,
    )


def _overlap(entry: Mapping[str, Any], heads: int, wave_tiles: float) -> Line:
    """As timed, counted in tiles of so many heads; or else what was timed on two other cards: what fits on the GPU overlaps."""
    if "overlap" in entry:
        timed = line(entry["overlap"], "tiles", "exponent")
        return Line(tuple(tiles * entry["heads"] / heads for tiles in timed.x), timed.y)
    if not wave_tiles:
        return NO_OVERLAP
    return Line((wave_tiles, wave_tiles * OVERLAP_BEYOND, wave_tiles * 4), (8.0, 1.25, 1.0))


def skew(kernels: Mapping[str, Any], name: str, kv_heads: int) -> Line:
    """As timed, with batches in proportion to the KV heads: it is blocks of threads, one a sequence and head, that fill the GPU."""
    if not kernels.get("skew_kv_heads"):
        return NO_SKEW
    timed = line(kernels[name], "seqs", "share")
    return Line(tuple(count * kernels["skew_kv_heads"] / kv_heads for count in timed.x), timed.y)


def _prefill(entry: Mapping[str, Any], heads: int, device: Gpu, *, stairs: bool) -> Grid:
    """Chunks over a context: as timed, or else from whole prompts. Then added (query, key) pairs cost what they do in the longest
    prompt, and more where the chunk's tiles leave multiprocessors idle.
    """
    table = entry["prefill"]
    if "context" in table:
        return times(grid(table, "chunk", "context"), heads / entry["heads"])
    chunks, alone = list(table["chunk"]), [float(us) * _US * heads / entry["heads"] for us in table["us"]]
    pair_s = (alone[-1] - alone[0]) / (chunks[-1] * (chunks[-1] + 1) / 2)
    rows = []
    for chunk, whole_s in zip(chunks, alone, strict=True):
        waves = -(-chunk // TILE) * heads / device.sm_count
        busy = waves / ceil(waves) if stairs else min(1.0, waves)
        rows.append(tuple(whole_s + chunk * context * pair_s / busy for context in CONTEXTS))
    return Grid(tuple(map(float, chunks)), tuple(map(float, CONTEXTS)), tuple(rows))


def _launch_s(prefill: Grid, narrow_up_to: int) -> float:
    """The shortest call. Where calls of a few tokens run with a narrower tile: the shortest of the wide tile, for chunks that share a
    call with others run with that.
    """
    return min(row[0] for chunk, row in zip(prefill.x, prefill.z, strict=True) if chunk > narrow_up_to)


def times(table: Grid, factor: float) -> Grid:
    """The table with every value so many times as large."""
    return Grid(table.x, table.y, tuple(tuple(value * factor for value in row) for row in table.z))
