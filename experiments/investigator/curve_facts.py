"""What a memory curve shows: its slope over the load, what stays behind, and when memory comes back.

Everything here is measurement; `rules_curve` says what it means.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .curve import Curve, Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Memory = `base` + `per_unit` × load + `per_sequence` × sequences, by least squares."""

    base: float
    per_unit: float
    per_sequence: float
    """0 where only one load was used."""
    r2: float
    """Share of the variance it explains."""
    error: float
    """Standard error of `per_unit`."""
    unit: str
    """`token` or `sequence`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveFacts:
    """Measurements of one curve; bytes and seconds."""

    line: Line | None
    """None when the load was not recorded or does not vary."""
    idle_first: float | None = None
    """Allocated memory in the first idle stretch after work."""
    idle_last: float | None = None
    """In the last one."""
    idle_stretches: int = 0
    """Stretches of idle rows, each after work."""
    idle_noise: float = 0.0
    """Typical spread inside one idle stretch."""
    idle_start: float | None = None
    """Allocated memory before any work."""
    lag_s: float = 0.0
    """How much later than the load memory falls; 0 when it falls with it."""
    lag_gain: float = 0.0
    """Share of the unexplained variance that the lag explains."""
    spike: float = 0.0
    """Highest point above the line (or above the median, without a line)."""
    spike_phase: str = ""
    """Phase recorded there."""
    unallocated_last: float | None = None
    """Reserved less allocated at the end."""
    unallocated_growth: float | None = None
    """Its change from the first to the last tenth of the rows."""
    allocated_growth: float = 0.0
    """Change of allocated memory, likewise."""
    non_torch_growth: float | None = None
    """Change of in-use less reserved, likewise."""
    last_phase: str = ""
    """Phase of the last row."""


def measure(curve: Curve) -> CurveFacts:
    """Measure `curve`."""
    line = _fit(curve)
    first, last, stretches, noise, start = _idle(curve)
    lag_s, gain = _lag(curve, line)
    residual = curve.allocated - _predicted(curve, line)
    peak = int(np.argmax(residual))
    gap = None if curve.reserved is None else curve.reserved - curve.allocated
    outside = None if curve.in_use is None or curve.reserved is None else curve.in_use - curve.reserved
    return CurveFacts(
        line=line,
        idle_first=first,
        idle_last=last,
        idle_stretches=stretches,
        idle_noise=noise,
        idle_start=start,
        lag_s=lag_s,
        lag_gain=gain,
        spike=float(residual[peak]),
        spike_phase=curve.phases[peak] if curve.phases else "",
        unallocated_last=None if gap is None else float(gap[-1]),
        unallocated_growth=None if gap is None else _growth(gap),
        allocated_growth=_growth(curve.allocated),
        non_torch_growth=None if outside is None else _growth(outside),
        last_phase=curve.phases[-1] if curve.phases else "",
    )


def _fit(curve: Curve) -> Line | None:
    load = curve.load
    if load is None or float(np.ptp(load)) == 0:
        return None
    columns = [np.ones_like(load), load]
    both = curve.tokens is not None and curve.sequences is not None and len(load) >= 8
    if both and curve.sequences is not None:
        # Tokens and sequences that rise and fall together cannot be told apart.
        correlation = float(np.corrcoef(load, curve.sequences)[0, 1]) if float(np.ptp(curve.sequences)) else 1.0
        both = abs(correlation) < 0.98
        if both:
            columns.append(curve.sequences)
    matrix = np.column_stack(columns)
    solution, *_ = np.linalg.lstsq(matrix, curve.allocated, rcond=None)
    residual = curve.allocated - matrix @ solution
    spread = float(np.sum((curve.allocated - curve.allocated.mean()) ** 2))
    freedom = max(1, len(load) - matrix.shape[1])
    variance = float(residual @ residual) / freedom
    covariance = np.linalg.pinv(matrix.T @ matrix) * variance
    return Line(
        base=float(solution[0]),
        per_unit=float(solution[1]),
        per_sequence=float(solution[2]) if both else 0.0,
        r2=1.0 - float(residual @ residual) / spread if spread > 0 else 0.0,
        error=float(np.sqrt(max(covariance[1, 1], 0.0))),
        unit="token" if curve.tokens is not None else "sequence",
    )


def _predicted(curve: Curve, line: Line | None) -> Floats:
    load = curve.load
    if line is None or load is None:
        return np.full_like(curve.allocated, float(np.median(curve.allocated)))
    predicted: Floats = line.base + line.per_unit * load
    if line.per_sequence and curve.sequences is not None:
        predicted = predicted + line.per_sequence * curve.sequences
    return predicted


def _idle(curve: Curve) -> tuple[float | None, float | None, int, float, float | None]:
    """Base lines: first and last idle stretch after work (each by its lowest point), how many, their noise, and before work."""
    idle = curve.idle
    if idle is None or not idle.any() or idle.all():
        return None, None, 0, 0.0, None
    edges = np.flatnonzero(np.diff(idle.astype(np.int8))) + 1
    stretches = [part for part in np.split(np.arange(len(idle)), edges) if idle[part[0]]]
    before = float(curve.allocated[stretches[0]].min()) if stretches[0][0] == 0 else None
    after = [part for part in stretches if part[0] > 0]
    if not after:
        return None, None, 0, 0.0, before
    lows = [float(curve.allocated[part].min()) for part in after]
    noise = float(np.median([float(np.ptp(curve.allocated[part][len(part) // 2 :])) for part in after]))
    return lows[0], lows[-1], len(after), noise, before


def _lag(curve: Curve, line: Line | None) -> tuple[float, float]:
    """The shift after a fall of the load at which memory follows best: a running maximum of the load over the last k rows."""
    load = curve.load
    if line is None or load is None or len(load) < 12:
        return 0.0, 0.0
    steps = np.diff(curve.time_s)
    pace = float(np.median(steps[steps > 0])) if (steps > 0).any() else 0.0
    base_error = _unexplained(load, curve.allocated)
    if pace == 0.0 or base_error <= 0.0:
        return 0.0, 0.0
    best, best_error = 0, base_error
    for k in range(1, min(len(load) // 4, 60) + 1):
        held = np.array([load[max(0, row - k) : row + 1].max() for row in range(len(load))])
        error = _unexplained(held, curve.allocated)
        if error < best_error * 0.98:
            best, best_error = k, error
    return best * pace, 1.0 - best_error / base_error


def _unexplained(load: Floats, memory: Floats) -> float:
    if float(np.ptp(load)) == 0:
        return float(np.var(memory))
    slope, base = np.polyfit(load, memory, 1)
    return float(np.var(memory - slope * load - base))


def _growth(values: Floats) -> float:
    part = max(1, len(values) // 10)
    return float(np.median(values[-part:]) - np.median(values[:part]))
