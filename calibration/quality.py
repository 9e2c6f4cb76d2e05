"""How far measured steps can be trusted: noise floor, outliers, and a device whose speed changes while it is measured.

The reference step is timed again and again through a run. What it takes says how fast the device is at that time: a GPU that
gets hot lowers its clocks, and a shared CPU is given to others.

Source: Iglewicz and Hoaglin 1993 (robust z); Theil 1950, Sen 1968 (slope by medians); Croux and Rousseeuw 1992
(small samples).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import CalibrationError
from .step_log import Step
from .tent import Array

OUTLIER_Z = 6.0
"""Robust z beyond which a repeat is left out."""
LEAST_REPEATS = 3
"""Fewer repeats cannot tell which of them is the odd one."""
WINDOW = 5
"""Reference steps whose median is the speed at a time."""
SLOW = 1.15
"""Steps are left out where the reference takes so many times its median."""
MOST_SLOW = 0.4
"""If more than this share of a run would be left out, it has no usual speed: it is kept whole, and flagged."""
NOISY = 0.10
"""A noise floor above this is flagged."""
CLOCK_FALL = 0.10
"""A clock that falls by more than this share of its median is flagged."""
LEAST_REFERENCE = 3
FEW = {3: 1.495, 4: 1.363, 5: 1.206, 6: 1.2, 7: 1.14, 8: 1.129, 9: 1.107}
"""By how much the median of absolute deviations of so many values is too small, on average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """What was found. Shares, unless a name says otherwise."""

    steps: int
    """Timed steps, the reference among them."""
    kept: int
    """Those that a fit may use."""
    noise_floor: float
    """Robust relative standard deviation of repeats of a step, median over steps."""
    outliers: int
    slow: int
    """Steps left out because the device was slow at the time."""
    drift: float
    """Change of the reference step's duration over the run, by the median slope."""
    slowest: float
    """The reference's duration at its slowest, over its median."""
    flags: tuple[str, ...]
    """Sentences that a reader must know."""

    def as_dict(self) -> dict[str, Any]:
        """By name, figures rounded."""
        return {
            name: round(value, 5) if isinstance(value, float) else list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }


def assess(
    steps: Sequence[Step], clocks: Sequence[Mapping[str, Any]] = (), skipped: Sequence[Mapping[str, Any]] = ()
) -> tuple[Quality, npt.NDArray[np.bool_]]:
    """The quality of a run, and True for each step that may be used. `clocks` are readings of a GPU's clocks, `skipped` the designed
    steps that ran out of memory, as `run.json` has them.

    Raises: CalibrationError when the reference step is missing, so that nothing is known of the device's speed.
    """
    reference = [step for step in steps if step.group == "reference"]
    if len(reference) < LEAST_REFERENCE:
        raise CalibrationError(
            f"the reference step was timed {len(reference)} times; at least {LEAST_REFERENCE} are needed to see whether the "
            "device kept its speed: measure longer"
        )
    when = np.asarray([step.elapsed_s for step in reference])
    took = np.asarray([step.duration_us for step in reference])
    speed = _rolling_median(took) / float(np.median(took))
    at = np.asarray([step.elapsed_s for step in steps])
    slow = np.interp(at, when, speed) > SLOW
    flags = []
    if slow.mean() > MOST_SLOW:
        flags.append(
            f"the device changed its speed: the reference step took up to {speed.max():.2f} times its median, and for "
            f"{slow.mean():.0%} of the run more than {SLOW}; nothing was left out, measure again on a quieter device"
        )
        slow[:] = False
    elif slow.any():
        flags.append(f"{int(slow.sum())} of {len(steps)} steps were left out: the device was slow when they were timed")
    outlier, noise = _outliers(steps, ~slow)
    drift = _median_slope(when, took) * float(when[-1] - when[0]) / float(np.median(took))
    if abs(drift) > SLOW - 1:
        flags.append(f"the reference step drifted by {drift:+.0%} over the run: the device warmed up or was throttled")
    if noise > NOISY:
        flags.append(f"repeats of a step differ by {noise:.0%}: no fit can be better than that")
    flags += clock_flags(clocks)
    if skipped:
        flags.append(
            f"{len(skipped)} designed steps ran out of memory and were left out; the first: {skipped[0]['why']}"
        )
    kept = ~slow & ~outlier
    quality = Quality(
        steps=len(steps),
        kept=int(kept.sum()),
        noise_floor=noise,
        outliers=int(outlier.sum()),
        slow=int(slow.sum()),
        drift=drift,
        slowest=float(speed.max()),
        flags=tuple(flags),
    )
    return quality, kept


def clock_flags(clocks: Sequence[Mapping[str, Any]]) -> list[str]:
    """What readings of a GPU's clocks say: how often something slowed it, and by how much it fell below its usual clock."""
    if not clocks:
        return []
    absent = [one["absent"] for one in clocks if "absent" in one]
    if absent:
        return [f"whether the GPU lowered its clocks is not known: {absent[0]}"]
    found = []
    reasons = [one["slowed_by"] for one in clocks if one.get("slowed_by") is not None]
    slowed = [words for words in reasons if words]
    if slowed:
        named = ", ".join(sorted({word for words in slowed for word in words}))
        found.append(
            f"the GPU lowered its clocks in {len(slowed) / len(reasons):.0%} of {len(reasons)} readings: {named}"
        )
    megahertz = np.asarray([one["sm_clock_mhz"] for one in clocks if one.get("sm_clock_mhz")], dtype=np.float64)
    if megahertz.size and megahertz.min() < (1 - CLOCK_FALL) * np.median(megahertz):
        found.append(
            f"the GPU's clock fell to {megahertz.min():.0f} MHz from usually {np.median(megahertz):.0f}: steps timed then took longer"
        )
    return found


def _outliers(steps: Sequence[Step], usable: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.bool_], float]:
    """Repeats that stand out from those of the same step, and the noise floor."""
    point = np.asarray([step.point for step in steps])
    took = np.log(np.asarray([step.duration_us for step in steps]))
    found = np.zeros(len(steps), dtype=bool)
    groups = [np.flatnonzero((point == number) & usable) for number in np.unique(point)]
    groups = [mine for mine in groups if mine.size >= LEAST_REPEATS]
    if not groups:
        return found, 0.0
    spreads = [_spread(took[mine]) for mine in groups]
    pooled = float(np.median(spreads))
    for mine, spread in zip(groups, spreads, strict=True):
        scale = max(spread, pooled)
        if scale > 0:
            found[mine] = np.abs(took[mine] - np.median(took[mine])) / scale > OUTLIER_Z
    return found, pooled


def _spread(values: Array) -> float:
    """Standard deviation by the median of absolute deviations, corrected for small samples."""
    size = values.size
    correction = FEW[size] if size in FEW else size / (size - 0.8)
    return correction * 1.4826 * float(np.median(np.abs(values - np.median(values))))


def _rolling_median(values: Array) -> Array:
    half = WINDOW // 2
    return np.asarray([np.median(values[max(0, i - half) : i + half + 1]) for i in range(values.size)])


def _median_slope(x: Array, y: Array) -> float:
    """The median of the slopes between all pairs (at most some thousands of them: every k-th point of a long series)."""
    step = max(1, x.size // 100)
    x, y = x[::step], y[::step]
    first, second = np.triu_indices(x.size, 1)
    apart = x[second] - x[first]
    valid = apart > 0
    return float(np.median((y[second] - y[first])[valid] / apart[valid])) if valid.any() else 0.0
