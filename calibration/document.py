"""The profile document: its fields, its constants, and how it is written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sim.costs.profile_check import SCHEMA, SCHEMA_VERSION
from sim.costs.profile_file import read_profile

from .numerics.split import departures
from .numerics.tent import Array, mixture, never_falling

PADDED_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""Token counts for which vLLM V1 captures CUDA graphs by default. **Source:** vLLM 0.19 `compilation_config`, as printed by a run."""
HOST_STATED = {
    "step_us": 0.0,
    "seq_us": 0.0,
    "kernel_gap_us": 0.85,
    "kernels_per_layer": 10,
    "kernels_per_step": 10,
    "origin": "stated, not fitted: 0.85 us between two kernels of a captured graph (0.34 ms a step of 397 kernels, Qwen3-4B on an "
    "RTX 5070 Ti: pegainfer blog, part 4, March 2026); kernel tables hold the kernels alone",
}
"""What a step takes beyond its kernels, where no run was measured. A layer is two norms, four matrices, rotary embedding, KV write,
attention and activation, and two collectives where there are several ranks; a step also embeds, normalises, and samples."""
TOLERANCE = 0.004
"""A knot is dropped where the line without it stays so close, relatively."""


def document(**fields: Any) -> dict[str, Any]:
    """A profile with the schema's own fields first."""
    return {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "time_unit": "us", **fields}


def uncertainty(error: dict[str, Any]) -> dict[str, Any]:
    """The fields `samples`, `intervals` and `residuals` of a document, taken out of the errors they were found with.

    Keys are terms: `held_out_decode` gives `decode`.
    """
    parts = {
        key.removeprefix("held_out_"): part
        for key, part in error.items()
        if isinstance(part, dict) and "samples" in part
    }
    samples = {term: part.pop("samples") for term, part in parts.items()}
    return {
        "samples": samples,
        "intervals": {term: departures(np.asarray(drawn)) for term, drawn in samples.items()},
        "residuals": {term: part.pop("residuals") for term, part in parts.items()},
    }


def pooled(residuals: Mapping[str, Mapping[str, Array]]) -> dict[str, Any]:
    """Median and 95th percentile over the held-out points of all terms together."""
    off = np.abs(np.concatenate([part["off"] for part in residuals.values()]))
    return {
        "points": int(off.size),
        "median": round(float(np.median(off)), 5),
        "p95": round(float(np.quantile(off, 0.95)), 5),
    }


def write(profile: dict[str, Any], path: Path) -> None:
    """Write the profile, without its residuals, and read it back: what is written can be used. Raises: ConfigError, OSError."""
    kept = {key: value for key, value in profile.items() if key != "residuals"}
    path.write_text(_text(kept) + "\n", encoding="utf-8")
    read_profile(path)


def thinned(x: Array, y: Array, tolerance: float = TOLERANCE) -> list[float]:
    """Knots from `x`, both ends kept, between which straight lines stay within `tolerance` of `y`, or that lie close together
    around a jump. The knot that misses most is added until none does.
    """
    order = np.argsort(x)
    x, y = x[order], never_falling(y[order])
    kept = [0, x.size - 1]
    while len(kept) < x.size:
        weights = mixture(x[kept].tolist(), x)
        miss = np.abs(weights @ y[kept] / y - 1)
        worst = int(np.argmax(miss))
        if miss[worst] <= tolerance:
            break
        kept = sorted({*kept, worst})
    return [float(value) for value in x[kept]]


def _text(value: Any, depth: int = 0) -> str:
    """JSON with one line a list of plain values, so that a table is a block of rows and a change shows as a changed row."""
    pad, inner = " " * depth, " " * (depth + 1)
    if isinstance(value, dict) and value:
        items = (f"{inner}{json.dumps(key)}: {_text(item, depth + 1)}" for key, item in value.items())
        return "{\n" + ",\n".join(items) + f"\n{pad}}}"
    if isinstance(value, list) and any(isinstance(item, (list, dict)) for item in value):
        return "[\n" + ",\n".join(inner + _text(item, depth + 1) for item in value) + f"\n{pad}]"
    return json.dumps(value, ensure_ascii=False)
