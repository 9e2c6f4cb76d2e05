"""Host and launch time, which no kernel table holds, from what requests of a real run took.

    predicted(step_s, seq_s) = measured        for a statistic of one or more runs

solved for non-negative times by Gauss-Newton steps with numerical derivatives. One observation can only tell the time a step;
the time a sequence needs runs with different batch sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from sim.costs.profile import FittedProfile

from .errors import CalibrationError
from .tent import Array

PROBE_STEP_S = 2e-4
PROBE_SEQ_S = 2e-5
ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFit:
    """What was found."""

    step_s: float
    seq_s: float
    residuals: tuple[float, ...]
    """Relative error left at each observation."""
    identified: tuple[str, ...]
    """Which of the two the observations can tell."""


def with_host(cost: FittedProfile, step_s: float, seq_s: float = 0.0) -> FittedProfile:
    """The same prices with other host times."""
    return FittedProfile(replace(cost.terms, step_s=step_s, seq_s=seq_s), name=cost.name)


def fit_host(predict: Callable[[float, float], Array], measured: Array) -> HostFit:
    """Host times under which `predict(step_s, seq_s)` comes closest to `measured`, relatively; `[observations]` each.

    Raises: CalibrationError when a measured value is not positive.
    """
    from scipy.optimize import nnls

    if not (measured > 0).all():
        raise CalibrationError(f"host time cannot be fitted to {measured.tolist()}: times must be above 0")
    both = measured.size > 1
    step, seq = 0.0, 0.0
    for _ in range(ROUNDS):
        here = predict(step, seq)
        slopes = [(predict(step + PROBE_STEP_S, seq) - here) / PROBE_STEP_S]
        if both:
            slopes.append((predict(step, seq + PROBE_SEQ_S) - here) / PROBE_SEQ_S)
        design = np.stack(slopes, axis=1) / measured[:, None]
        wanted = (measured - here) / measured + design @ np.asarray([step, seq][: design.shape[1]])
        solved, _ = nnls(design, wanted)
        step, seq = float(solved[0]), float(solved[1]) if both else 0.0
    left = predict(step, seq) / measured - 1
    return HostFit(
        step_s=step,
        seq_s=seq,
        residuals=tuple(float(value) for value in left),
        identified=("step_s", "seq_s") if both else ("step_s",),
    )
