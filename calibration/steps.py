"""Linear step costs from a log of steps: the simplest loop, and the one whose answer can be known beforehand.

    duration = base + per_token * tokens + per_context_token * context + per_seq * sequences

A simulation priced by `FixedCost` with known numbers, logged, fitted and compared with them, tests the loop itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sim.core.batch_shape import BatchShape
from sim.core.clock import to_s
from sim.core.plan import StepPlan, StepResult
from sim.costs.protocol import CostModel
from sim.world.executors import ModelExecutor

from .errors import CalibrationError
from .split import bootstrap
from .tent import Array, robust_nonnegative

TERMS = ("base_s", "per_token_s", "per_context_token_s", "per_seq_s")
LEAST_STEPS = 40
CONDITION_LIMIT = 1e4
"""Above this, the steps of a log are so alike that their terms cannot be told apart."""


class LoggingExecutor:
    """Prices plans with a cost model and writes down the shape and duration of every first step of a plan."""

    def __init__(self, cost: CostModel, log: list[tuple[BatchShape, float]]) -> None:
        """Appends `(shape, seconds)` to `log`."""
        self._inner, self._log = ModelExecutor(cost), log

    def execute(self, plan: StepPlan) -> StepResult:
        """As `ModelExecutor`."""
        result = self._inner.execute(plan)
        self._log.append((plan.shape, to_s(result.durations.before_fs(1))))
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFit:
    """Fitted costs in seconds by the names of `FixedCost`, with 95 % intervals."""

    values: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    unidentified: tuple[str, ...]
    """Terms that the log cannot tell from others."""


def fit_steps(log: Sequence[tuple[BatchShape, float]], resamples: int = 200) -> StepFit:
    """The costs behind logged steps. Raises: CalibrationError for too few steps."""
    if len(log) < LEAST_STEPS:
        raise CalibrationError(
            f"{len(log)} logged steps cannot identify {len(TERMS)} terms; at least {LEAST_STEPS} are needed"
        )
    design = np.asarray([_features(shape) for shape, _ in log], dtype=np.float64)
    time_s = np.asarray([seconds for _, seconds in log])

    def estimate(chosen: npt.NDArray[np.int_]) -> Array:
        return robust_nonnegative(design[chosen], time_s[chosen]).values

    values = estimate(np.arange(len(log)))
    samples = bootstrap(len(log), estimate, resamples)
    # Standard errors of the bootstrap: with so few resamples their quantiles are too narrow (coverage 92 to 93 % instead of 95 %).
    count, terms = design.shape
    half = 1.96 * samples.std(axis=0, ddof=1) * np.sqrt(count / (count - terms))
    low, high = np.maximum(values - half, 0.0), values + half
    return StepFit(
        values=dict(zip(TERMS, values.tolist(), strict=True)),
        intervals={name: (float(low[i]), float(high[i])) for i, name in enumerate(TERMS)},
        unidentified=_unidentified(design),
    )


def _unidentified(design: Array) -> tuple[str, ...]:
    """Terms whose column the others (nearly) make up."""
    scaled = design / np.maximum(np.linalg.norm(design, axis=0), 1e-300)
    found = []
    for i, name in enumerate(TERMS):
        others = np.delete(scaled, i, axis=1)
        rest = scaled[:, i] - others @ np.linalg.lstsq(others, scaled[:, i], rcond=None)[0]
        if float(np.linalg.norm(rest)) < 1 / CONDITION_LIMIT:
            found.append(name)
    return tuple(found)


def _features(shape: BatchShape) -> tuple[int, int, int, int]:
    context = shape.decode_context_tokens + sum(cached for _, cached in shape.prefill)
    return 1, shape.num_tokens, context, shape.decode_seqs + len(shape.prefill)
