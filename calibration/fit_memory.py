"""Memory lines from a run of timed steps: what is always there, and what a step needs besides, by its sizes.

    workspace = widest of a few phases, each: constant + tokens + sampled rows + decodes + positions of the longest sequence
                + scores of one tile of queries

The last two are what attention without a fused kernel writes out, as the torch twins do; a GPU's kernels have neither. What is taken
once, for the largest step that the engine's limits allow, is fitted to those limits in the same way. `sim.memory.measured` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sim.core.batch_shape import BatchShape
from sim.memory.measured import LIMIT_TERMS, STEP_TERMS, limit_features, step_features
from sim.memory.measured_file import SCHEMA_VERSION

from .errors import CalibrationError
from .max_affine import fit_max_affine, predict_max_affine
from .split import error_summary, held_out_mask
from .step_log import Step, StepRun
from .tent import Array
from .text_files import check_keys, numbers

LEAST_ROWS = len(LIMIT_TERMS)
"""Fewer limits cannot tell their terms apart."""
PHASES = 3
"""Attention, feed-forward, and LM head."""
NEEDED = ("weights_bytes", "buffers_bytes", "non_torch_bytes", "cuda_graphs_bytes", "context_bytes", "by_limits")
"""What `run.json` must say of memory; runs of an earlier kvtwin do not, and give no lines."""


def memory_features(shapes: Sequence[BatchShape]) -> Array:
    """What each term of a step's workspace is multiplied with, `[steps, terms]`."""
    return np.asarray([step_features(shape) for shape in shapes], dtype=np.float64)


def fit_memory(shapes: Sequence[BatchShape], workspace_bytes: Array, run: StepRun, *, engine: str) -> dict[str, Any]:
    """The part `memory` of a profile: lines that are always there, the workspace by a step's sizes, its error and interval.

    `engine` says what was measured, with its release.
    """
    always, limits = run.document["memory"], run.document["limits"]
    design = memory_features(shapes)
    held = held_out_mask(len(shapes))
    judged = fit_max_affine(design[~held], workspace_bytes[~held], PHASES)
    phases = fit_max_affine(design, workspace_bytes, PHASES)
    predicted = predict_max_affine(judged, design[held])
    found: dict[str, Any] = {
        "always": {
            name: value for name, value in always.items() if isinstance(value, int) and not name.startswith("process")
        },
        "workspace_phases": _named(phases, STEP_TERMS),
        "workspace_error": error_summary(predicted, workspace_bytes[held]),
        "workspace_interval": _interval(workspace_bytes[held] / predicted - 1),
        "process_growth_bytes": _growth(run.steps),
    }
    if not _has_lines(always, run.name):
        return found
    return {
        "schema_version": SCHEMA_VERSION,
        "engine": engine,
        "limits": {name: limits[name] for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len")},
        "lines": _lines(always, cuda=run.document["provenance"]["device"] == "cuda"),
        **_by_limits(always["by_limits"], "buffers", limits["block_size"], 1),
        **_by_limits(always["by_limits"], "workspace", limits["block_size"], PHASES),
        **found,
    }


def predict_workspace(memory: Mapping[str, Any], shapes: Sequence[BatchShape]) -> Array:
    """Bytes of workspace that steps need, by the part `memory` of a profile; `[steps]`."""
    weights = np.asarray([[phase[name] for name in STEP_TERMS] for phase in memory["workspace_phases"]])
    return predict_max_affine(weights, memory_features(shapes))


def _has_lines(always: Mapping[str, Any], name: str) -> bool:
    """Whether a run says what lines are made of; one of an earlier kvtwin says nothing of limits.

    Raises: CalibrationError for one that says some of it.
    """
    if "by_limits" not in always:
        return False
    check_keys(always, NEEDED, f"{name}: memory")
    rows = always["by_limits"]
    sizes = ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "workspace_bytes", "buffers_bytes")
    if not isinstance(rows, list) or len(rows) < LEAST_ROWS:
        raise CalibrationError(f"{name}: memory by_limits has too few rows to fit; at least {LEAST_ROWS} are needed")
    for row in rows:
        check_keys(row, sizes, f"{name}: memory by_limits")
        numbers([row[size] for size in sizes], f"{name}: memory by_limits", least=1.0)
    for line in NEEDED[:-1]:
        if always[line] is not None or line == "weights_bytes":
            numbers([always[line]], f"{name}: memory {line}", least=0.0)
    return True


def _lines(always: Mapping[str, Any], *, cuda: bool) -> dict[str, Any]:
    """Lines of the account that do not follow from limits; those that the device does not tell are left out."""
    weights = always["weights_bytes"]
    found: dict[str, Any] = {"weights": _line(weights, weights, weights, "storages of the tensors as loaded")}
    rest = always["non_torch_bytes"]
    if cuda:
        if always["context_bytes"] is not None:
            found["context"] = _line(
                always["context_bytes"], None, None, "in use by this process before the model was loaded"
            )
        if rest is not None:
            end = max(rest, always.get("non_torch_bytes_at_end") or rest)
            how = f"in use beside context, tensors and graphs: {rest:,} B after the first steps, {end:,} B at the end"
            found["non_torch"] = _line(end, None, None, how)
        if always["cuda_graphs_bytes"] is not None:
            found["cuda_graphs"] = _line(always["cuda_graphs_bytes"], None, None, "free memory that capturing took")
        return found
    found["context"] = _line(0, 0, 0, "a CPU has none")
    found["cuda_graphs"] = _line(0, 0, 0, "nothing is captured on a CPU")
    if rest is not None:
        found["non_torch"] = _line(
            rest, None, None, "resident memory of the process beside its tensors, after the first steps"
        )
    return found


def _line(size: int, low: int | None, high: int | None, how: str) -> dict[str, Any]:
    return {"bytes": size, "low_bytes": low, "high_bytes": high, "how": how}


def _by_limits(rows: Sequence[Mapping[str, int]], name: str, block_size: int, phases: int) -> dict[str, Any]:
    """What is taken once, fitted to the limits that it was taken for. The error is twice the largest of the fit's own: other limits
    are rounded otherwise.
    """
    design = np.asarray(
        [
            limit_features(row["max_num_batched_tokens"], row["max_num_seqs"], row["max_model_len"], block_size)
            for row in rows
        ],
        dtype=np.float64,
    )
    size = np.asarray([row[f"{name}_bytes"] for row in rows], dtype=np.float64)
    weights = fit_max_affine(design, size, phases)
    off = np.abs(predict_max_affine(weights, design) / size - 1)
    key = "reserved" if name == "workspace" else name
    return {f"{key}_phases": _named(weights, LIMIT_TERMS), f"{key}_error": round(2 * float(off.max()), 5)}


def _named(weights: Array, terms: Mapping[str, str]) -> list[dict[str, float]]:
    return [{name: round(value, 3) for name, value in zip(terms, phase, strict=True)} for phase in weights.tolist()]


def _interval(off: Array) -> list[float]:
    """Between which shares 95 % of the true values lay from the predicted ones; holds 0."""
    low, high = np.quantile(off, [0.025, 0.975])
    return [min(0.0, round(float(low), 5)), max(0.0, round(float(high), 5))]


def _growth(steps: Sequence[Step]) -> int | None:
    """By how much the process grew while steps were timed."""
    sizes = [step.process_bytes for step in steps if step.process_bytes is not None]
    return max(sizes) - sizes[0] if sizes else None
