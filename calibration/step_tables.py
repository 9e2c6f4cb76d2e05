"""A fitted step model as the tables of a profile, which `sim.costs` prices steps with."""

from __future__ import annotations

from typing import Any

from sim.core.batch_shape import BatchShape

from .step_model import StepModel

PER_OCTAVE = 4
"""Knots of the chunk axis an octave: a line between them misses the quadratic terms by less than a hundredth."""


def tables(model: StepModel, max_seqs: int, max_model_len: int) -> dict[str, Any]:
    """The part `terms` of a profile, in microseconds. The constant of a step is in `dense`.

    Lines and grids are exact at their knots; between them the model is linear in everything but a chunk's length.
    """
    weight = model.values
    seqs, contexts = sorted({1, max_seqs}), sorted({1, max_model_len})
    chunks = _octaves(2, model.knots[-1])
    cached = sorted({0, max_model_len})
    decode = [[_short(_decode(model, n, context)) for context in contexts] for n in seqs]
    return {
        "dense": {
            "tokens": list(model.knots),
            "us": [_short(weight["step"] + _dense(model, tokens)) for tokens in model.knots],
        },
        "rows": {
            "rows": seqs,
            "us": [_short(weight["sample_launch"] + weight["rows"] * rows) for rows in seqs],
        },
        "prefill": {
            "chunk": chunks,
            "context": cached,
            "us": [[_short(_prefill(model, chunk, context)) for context in cached] for chunk in chunks],
        },
        "decode": {"seqs": seqs, "context": contexts, "us": decode},
        "mixed": {"seqs": seqs, "context": contexts, "us": decode},
        "mixed_tile_us": 0.0,
        "chunk_launch_us": _short(weight["chunk_launch"]),
        "overlap": {"tiles": [1], "exponent": [1.0]},
        "decode_skew": {"seqs": [1], "share": [0.0]},
        "mixed_skew": {"seqs": [1], "share": [0.0]},
        "excess_token_us": _short(weight["decode_excess"]),
        "copy_block_us": _short(weight["copied_block"]),
        "swap_block_us": _short(weight["swapped_block"]),
    }


def _decode(model: StepModel, n: int, context: int) -> float:
    shape = BatchShape(
        decode_seqs=n, decode_context_tokens=n * context, decode_max_context_tokens=context, sampled_seqs=n
    )  # fmt: skip
    parts = model.parts([shape])
    return float(sum(parts[name][0] for name in ("decode_launch", "decode_seq", "decode_context")))


def _prefill(model: StepModel, chunk: int, context: int) -> float:
    parts = model.parts([BatchShape(prefill=((chunk, context),))])
    return float(sum(values[0] for name, values in parts.items() if name.startswith("chunk")))


def _dense(model: StepModel, tokens: int) -> float:
    return float(model.parts([BatchShape(prefill=((tokens, 0),))])["dense"][0])


def _octaves(low: int, high: int) -> list[int]:
    """Whole numbers from `low` to `high`, `PER_OCTAVE` an octave."""
    found = {high}
    value = float(low)
    while value < high:
        found.add(round(value))
        value *= 2 ** (1 / PER_OCTAVE)
    return sorted(found)


def _short(value: float) -> float:
    """Six significant digits."""
    return float(f"{value:.6g}")
