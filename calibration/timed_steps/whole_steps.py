"""A `model` profile from times of whole steps: static batches of prompts, and of decodes, of one model on one GPU.

    prompt step = dense(tokens) + pair * sum of prompt * prompt / 2
    decode step = dense(sequences) + read(sequences) * sum of KV

Both share the table over tokens, so that the two say together what weights, matrices and launches take. Kernels, sampling and
host time cannot be told apart in such times: all of it is in `dense`, and no launch gaps are added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from calibration.document import document, uncertainty
from calibration.errors import CalibrationError
from calibration.numerics.split import error_summary, judged
from calibration.numerics.tent import Array, mixture, never_falling, robust_nonnegative
from sim.catalog.gpus import gpu
from sim.catalog.models import model_shape

LEAST_STEPS = 6
"""Fewer steps of a kind cannot tell its terms apart."""
CONTEXTS = (0, 1024, 4096, 8192, 16384)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeSteps:
    """What was timed, or what a published law says of it. Times in microseconds."""

    gpu: str
    """Name in the catalogue."""
    model: str
    """Name in the catalogue."""
    tensor_parallel_size: int
    prompts: Array
    """`[steps, (prompts, tokens of each)]`"""
    prompt_us: Array
    decodes: Array
    """`[steps, (sequences, KV tokens of each)]`"""
    decode_us: Array
    measured: bool
    """False for values of a law that others fitted."""
    source: str
    licence: str
    engine: str
    device: str


def fit_whole_steps(source: WholeSteps, *, date: str, command: str) -> dict[str, Any]:
    """The profile document. Raises: CalibrationError for too few steps of a kind; ConfigError for an unknown model or GPU."""
    for kind, count in (("prompt", source.prompt_us.size), ("decode", source.decode_us.size)):
        if count < LEAST_STEPS:
            raise CalibrationError(
                f"{source.source}: {count} {kind} steps cannot identify their terms; at least {LEAST_STEPS} are needed"
            )
    model, device = model_shape(source.model), gpu(source.gpu)
    knots = _Knots.of(source)
    design, time = knots.design(source), np.concatenate([source.prompt_us, source.decode_us])
    values = robust_nonnegative(design, time).values
    dense, pair_us, reads = knots.split(values)
    off, kept = _left_out(design, time) if source.measured else (np.zeros(0), np.zeros(0))
    left_out = judged(off + 1, np.ones_like(off)) if off.size else {"median": None, "p95": None}
    kinds = np.arange(time.size) < source.prompt_us.size
    error = {
        "held_out_step": left_out,
        "fit_prompt": error_summary(design[kinds] @ values, time[kinds]),
        "fit_decode": error_summary(design[~kinds] @ values, time[~kinds]),
    }
    known = uncertainty(error)
    known["residuals"] = {"step": {"measured_us": kept, "off": off}} if off.size else {}
    return document(
        name=f"{device.name}.{source.model}.tp{source.tensor_parallel_size}.steps",
        kind="model",
        gpu=device.name,
        model=model.name,
        tensor_parallel_size=source.tensor_parallel_size,
        dtype=model.dtype,
        kv_cache_dtype=model.dtype,
        terms=_terms(knots, dense, pair_us, reads),
        host={"step_us": 0.0, "seq_us": 0.0, "origin": "in the times of whole steps"},
        range={
            "max_tokens": int(knots.tokens[-1]),
            "max_seqs": int(source.decodes[:, 0].max()),
            "max_context_tokens": int(source.decodes[:, 1].max()),
        },
        error={
            "held_out": error["held_out_step"],
            **error,
            "end_to_end": "not judged end to end",
        },
        **known,
        identifiability=_notes(source, pair_us, time.size),
        provenance={
            "source": source.source,
            "licence": source.licence,
            "engine": source.engine,
            "measured_on": source.device,
            "date": date,
            "command": command,
        },
    )


@dataclass(frozen=True, slots=True)
class _Knots:
    tokens: tuple[float, ...]
    seqs: tuple[float, ...]
    """Batches that were timed."""
    read: tuple[float, ...]
    """Batches that were timed with several contexts: only there does a batch tell what its KV takes."""

    @classmethod
    def of(cls, source: WholeSteps) -> _Knots:
        seqs = {float(count) for count in source.decodes[:, 0]}
        prompts = {float(count) for count in source.prompts[:, 0] * source.prompts[:, 1]}
        several = {count for count in seqs if np.unique(source.decodes[source.decodes[:, 0] == count, 1]).size > 1}
        tokens = tuple(sorted(seqs | {one for one in prompts if one > max(seqs)}))
        return cls(tokens, tuple(sorted(seqs)), tuple(sorted(several or seqs)))

    def design(self, source: WholeSteps) -> Array:
        """Columns: dense at each token count, the pair, KV read at each batch size; rows: prompt steps, then decode steps."""
        many, length = source.prompts.T
        batch, kv = source.decodes.T
        prompt = np.hstack(
            [
                mixture(self.tokens, many * length),
                (many * length**2 / 2)[:, None],
                np.zeros((many.size, len(self.read))),
            ]
        )
        decode = np.hstack(
            [mixture(self.tokens, batch), np.zeros((batch.size, 1)), mixture(self.read, batch) * (batch * kv)[:, None]]
        )
        return np.vstack([prompt, decode])

    def split(self, values: Array) -> tuple[Array, float, Array]:
        """Dense by tokens, the pair, and KV read by sequences."""
        count = len(self.tokens)
        return never_falling(values[:count]), float(values[count]), values[count + 1 :]


def _terms(knots: _Knots, dense: Array, pair_us: float, reads: Array) -> dict[str, Any]:
    seqs = [int(count) for count in knots.seqs]
    each = mixture(knots.read, np.asarray(knots.seqs)) @ reads
    chunks = sorted({1, *(int(count) for count in knots.tokens if count >= 128)})
    decode = {
        "seqs": seqs,
        "context": list(CONTEXTS),
        "us": [
            [round(count * read * kv, 2) for kv in CONTEXTS] for count, read in zip(seqs, each.tolist(), strict=True)
        ],
    }
    none = {"seqs": [1], "share": [0.0]}
    return {
        "dense": {"tokens": [int(count) for count in knots.tokens], "us": [round(float(value), 1) for value in dense]},
        "rows": {"rows": [1], "us": [0.0]},
        "prefill": {
            "chunk": chunks,
            "context": list(CONTEXTS),
            "us": [[round(pair_us * chunk * (chunk / 2 + context), 2) for context in CONTEXTS] for chunk in chunks],
        },
        "decode": decode,
        "mixed": decode,
        "mixed_tile_us": 0.0,
        "chunk_launch_us": 0.0,
        "overlap": {"tiles": [1], "exponent": [1.0]},
        "decode_skew": none,
        "mixed_skew": none,
    }


def _left_out(design: Array, time: Array) -> tuple[Array, Array]:
    """Relative error of each step that others surround, predicted without it, and the times of these steps."""
    off, kept_us = [], []
    for place in range(time.size):
        others = np.arange(time.size) != place
        known = np.abs(design[others]).max(axis=0) > 0
        if (np.abs(design[place]) > 0)[~known].any():
            continue  # nothing else tells this knot
        values = robust_nonnegative(design[others], time[others]).values
        off.append(float(design[place] @ values) / time[place] - 1)
        kept_us.append(float(time[place]))
    return np.asarray(off), np.asarray(kept_us)


def _notes(source: WholeSteps, pair_us: float, steps: int) -> list[str]:
    notes = [
        f"{steps} steps of static batches: kernels, sampling and host time cannot be told apart",
        "no step held prompts and decodes at once: such a step is priced as the sum of its parts, weights read once",
        "batches of unequal contexts were not timed: they are priced as if all were as long as their mean",
    ]
    if pair_us == 0:
        notes.append("what a prompt's attention takes could not be told from the rest: it came out as 0")
    if not source.measured:
        notes.append("the source is a law that its authors fitted: how far it is from their measurements is not known")
    return notes
