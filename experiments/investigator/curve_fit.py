"""Which dimension of a load memory follows: tokens in the cache, sequences, tokens of a step, prompts of a step, beams.

The dimensions rise and fall together, so each is judged twice: alone, and beside those that were taken before it. A dimension is
taken when it explains a good part of what the others leave over.

With b beams a sequence, `tokens` counting a sequence's own, memory is `tokens * (1 + copied * (b - 1))` where `copied` is the share that
each further beam keeps for itself: 0 when beams share what they have in common, 1 when each has a copy of all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .curve import Curve, Floats
from .sizes import show

_LEAST_ROWS = 8
_TAKEN = 0.3
"""A dimension is taken when it explains this share of what the others left over."""
_SURE = 5.0
"""And when its coefficient is so many times its standard error."""
_WORDS = {
    "tokens": "token in the cache",
    "sequences": "running sequence",
    "requests": "request",
    "batch_tokens": "token of the step",
    "prefill_tokens": "prompt token of the step",
    "decode_sequences": "decoding sequence",
    "tokens of further beams": "token of each further beam",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """One dimension of the load and how memory follows it."""

    name: str
    alone: float
    """Share of the variance of memory that a line over it explains."""
    per_unit: float | None = None
    """Bytes a unit beside the others; None when it was not taken."""
    error: float = 0.0
    """Standard error of `per_unit`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DimensionFit:
    """Memory over the dimensions of its load."""

    what: str
    """`allocated memory` or `temporary tensors`."""
    base: float
    """Bytes at no load."""
    dimensions: tuple[Dimension, ...]
    """The ones taken first, in their order."""
    r2: float
    """Share of the variance that those taken explain together."""

    def per_unit(self, name: str) -> float | None:
        """Bytes a unit of a dimension that was taken; None otherwise."""
        return next((found.per_unit for found in self.dimensions if found.name == name), None)

    @property
    def sentence(self) -> str:
        """The fit, and what the other dimensions would explain alone."""
        taken = [found for found in self.dimensions if found.per_unit is not None]
        terms = "".join(f" + {found.per_unit:,.0f} B a {_WORDS[found.name]}" for found in taken)
        other = [f"{_WORDS[found.name]} {found.alone:.2f}" for found in self.dimensions if found.per_unit is None]
        rest = f"; alone, others explain less: {', '.join(other)}" if other else ""
        return f"{self.what} = {show(self.base)}{terms} (R² {self.r2:.3f}){rest}"


def fit_dimensions(curve: Curve) -> tuple[DimensionFit, ...]:
    """The fits that the curve allows: of its allocated memory, and of its temporary tensors where they were recorded."""
    load = {
        name: values
        for name, values in (("tokens", curve.tokens), ("sequences", curve.sequences), *curve.dimensions.items())
        if values is not None and name != "beams"
    }
    if {"prefill_tokens", "decode_sequences"} <= set(load):
        load.pop("batch_tokens", None)  # their sum: it could not be told from them
    beams = beams_of(curve)
    if beams is not None and curve.tokens is not None:
        load["tokens of further beams"] = curve.tokens * np.maximum(beams - 1, 0)
    fits = [_fit("allocated memory", curve.allocated, load, first=("tokens", "sequences"))]
    if curve.workspace is not None:
        busy = curve.workspace > 0
        load = {name: values[busy] for name, values in load.items() if name not in ("tokens of further beams",)}
        fits.append(_fit("temporary tensors", curve.workspace[busy], load, first=()))
    return tuple(fit for fit in fits if fit is not None)


def beams_of(curve: Curve) -> Floats | None:
    """Sequences a request: as recorded, else active sequences over requests; None where it is one, or not known."""
    beams = curve.dimensions.get("beams")
    requests = curve.dimensions.get("requests")
    if beams is None and requests is not None and curve.sequences is not None:
        beams = curve.sequences / np.maximum(requests, 1)
    return beams if beams is not None and float(beams.max()) > 1 else None


def _fit(what: str, memory: Floats, load: dict[str, Floats], first: tuple[str, ...]) -> DimensionFit | None:
    """Forward selection; `first` is where it starts when that is there. None when nothing varies."""
    if len(memory) < _LEAST_ROWS or float(np.ptp(memory)) == 0:
        return None
    load = {name: values for name, values in load.items() if float(np.ptp(values)) > 0}
    if not load:
        return None
    alone = {name: _r2(memory, [values]) for name, values in load.items()}
    start = next((name for name in first if name in load), None)
    taken = [start if start is not None else max(alone, key=lambda name: alone[name])]
    while len(taken) < len(load):
        left = 1.0 - _r2(memory, [load[name] for name in taken])
        if left < 1e-9:
            break
        gains = {
            name: 1.0 - (1.0 - _r2(memory, [load[other] for other in (*taken, name)])) / left
            for name in load
            if name not in taken
        }
        best = max(gains, key=lambda name: gains[name])
        coefficients, error = _solve(memory, [load[name] for name in (*taken, best)])
        if gains[best] < _TAKEN or coefficients[-1] < _SURE * error[-1]:
            break  # more load needs more memory: a negative term only bends the others
        taken.append(best)
    coefficients, error = _solve(memory, [load[name] for name in taken])
    found = [
        Dimension(name=name, alone=alone[name], per_unit=float(coefficients[at + 1]), error=float(error[at + 1]))
        for at, name in enumerate(taken)
    ]
    found += [Dimension(name=name, alone=alone[name]) for name in load if name not in taken]
    r2 = _r2(memory, [load[name] for name in taken])
    return DimensionFit(what=what, base=float(coefficients[0]), dimensions=tuple(found), r2=r2)


def _solve(memory: Floats, columns: list[Floats]) -> tuple[Floats, Floats]:
    """Coefficients and their standard errors, the constant first."""
    matrix = np.column_stack([np.ones_like(memory), *columns])
    solution, *_ = np.linalg.lstsq(matrix, memory, rcond=None)
    residual = memory - matrix @ solution
    variance = float(residual @ residual) / max(1, len(memory) - matrix.shape[1])
    covariance = np.linalg.pinv(matrix.T @ matrix) * variance
    error: Floats = np.sqrt(np.maximum(np.diag(covariance), 0.0))
    return np.asarray(solution, dtype=np.float64), error


def _r2(memory: Floats, columns: list[Floats]) -> float:
    solution, _ = _solve(memory, columns)
    residual = memory - np.column_stack([np.ones_like(memory), *columns]) @ solution
    spread = float(np.sum((memory - memory.mean()) ** 2))
    return 1.0 - float(residual @ residual) / spread
