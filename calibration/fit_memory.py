"""Memory lines from a run of timed steps: what is always there, and what a step needs besides, by its sizes.

    workspace = widest of a few phases, each: constant + tokens + sampled rows + decodes + positions of the longest sequence
                + scores of one tile of queries

The last two are what attention without a fused kernel writes out, as the torch twins do; a GPU's kernels have neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sim.core.plan import BatchShape

from .max_affine import fit_max_affine, predict_max_affine
from .split import error_summary, held_out_mask
from .step_log import Step
from .tent import Array

LINES: dict[str, str] = {
    "constant_bytes": "whatever the step",
    "per_token_bytes": "hidden states, QKV, gate and up of a token",
    "per_row_bytes": "logits of a sampled row",
    "per_decode_bytes": "partial results of a decode that several programs share",
    "per_position_bytes": "gathered KV of the longest sequence, a token",
    "per_score_bytes": "a score of one tile of queries",
}
TILE = 64
"""Query tokens whose scores exist at once where they are written out."""
PHASES = 3
"""Attention, feed-forward, and LM head."""


def memory_features(shapes: Sequence[BatchShape]) -> Array:
    """What each line is multiplied with, `[steps, lines]`."""
    rows = []
    for shape in shapes:
        lengths = [(1, shape.decode_max_context_tokens)] if shape.decode_seqs else []
        lengths += [(min(tokens, TILE), tokens + context) for tokens, context in shape.prefill]
        positions = max(length for _, length in lengths)
        scores = max(queries * length for queries, length in lengths)
        rows.append([1, shape.num_tokens, shape.sampled_seqs, shape.decode_seqs, positions, scores])
    return np.asarray(rows, dtype=np.float64)


def fit_memory(
    shapes: Sequence[BatchShape], workspace_bytes: Array, steps: Sequence[Step], always: Mapping[str, Any]
) -> dict[str, Any]:
    """The part `memory` of a profile: bytes that are always there, the workspace by a step's sizes, its error, what grew.

    `always` are the memory lines of the run's `run.json`.
    """
    design = memory_features(shapes)
    held = held_out_mask(len(shapes))
    judged = fit_max_affine(design[~held], workspace_bytes[~held], PHASES)
    phases = fit_max_affine(design, workspace_bytes, PHASES)
    grown = [step.process_bytes for step in steps if step.process_bytes is not None]
    return {
        "always": {
            name: value for name, value in always.items() if value is not None and not name.startswith("process")
        },
        "workspace_phases": [
            {name: round(value, 3) for name, value in zip(LINES, phase, strict=True)} for phase in phases.tolist()
        ],
        "workspace_error": error_summary(predict_max_affine(judged, design[held]), workspace_bytes[held]),
        "process_growth_bytes": max(grown) - grown[0] if grown else None,
    }


def predict_workspace(memory: Mapping[str, Any], shapes: Sequence[BatchShape]) -> Array:
    """Bytes of workspace that steps need, by the part `memory` of a profile; `[steps]`."""
    weights = np.asarray([[phase[name] for name in LINES] for phase in memory["workspace_phases"]])
    return predict_max_affine(weights, memory_features(shapes))
