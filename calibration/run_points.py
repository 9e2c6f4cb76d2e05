"""From timed steps to points that a fit can use: repeats of a step become one, and what cannot be used is left out or refused."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sim.core.batch_shape import BatchShape

from .errors import CalibrationError
from .quality import Quality, assess
from .step_log import StepRun
from .tent import Array

EAGER = "eager"
"""The group of steps that a graph could have served."""
LEAST_POINTS = {"decode": 12, "prefill": 12, "mixed": 12}
"""Different steps of each kind without which its terms cannot be told apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """The different steps of a run."""

    shapes: tuple[BatchShape, ...]
    time_us: Array
    """Mean of the repeats that were kept, `[points]`. The mean, because what a run takes is a sum of steps."""
    repeats: npt.NDArray[np.int_]
    """How many those were."""
    noise: Array
    """Standard deviation of each such mean, relative: by what repeats of all steps together differ."""
    workspace_bytes: Array
    """Most of any repeat."""
    kinds: npt.NDArray[np.str_]
    """`decode`, `prefill` or `mixed`."""
    served_by: npt.NDArray[np.str_]
    """`eager`, or the captured graph."""
    quality: Quality

    def chosen(self, mask: npt.NDArray[np.bool_]) -> list[BatchShape]:
        """The shapes where `mask` is True."""
        return [shape for shape, wanted in zip(self.shapes, mask.tolist(), strict=True) if wanted]


def points_of(run: StepRun) -> Points:
    """Raises: CalibrationError when a kind of step has too few points to identify its terms."""
    quality, kept = assess(run.steps, run.document.get("clocks", ()), run.document.get("skipped", ()))
    by_point: dict[int, list[int]] = {}
    for index in np.flatnonzero(kept).tolist():
        if run.steps[index].group == EAGER:
            continue
        by_point.setdefault(run.steps[index].point, []).append(index)
    shapes, time_us, repeats, workspace = [], [], [], []
    squares = 0.0
    for point in sorted(by_point):
        mine = [run.steps[index] for index in by_point[point]]
        shapes.append(mine[0].shape)
        if any(step.shape != mine[0].shape for step in mine):
            raise CalibrationError(
                f"{run.name}: step {point} has different sizes in different rows; repeats are of one step"
            )
        time_us.append(float(np.mean([step.duration_us for step in mine])))
        repeats.append(len(mine))
        squares += float(np.sum((np.asarray([step.duration_us for step in mine]) / time_us[-1] - 1) ** 2))
        workspace.append(max(step.workspace_bytes for step in mine))
    kinds = np.asarray([kind_of(shape) for shape in shapes])
    for kind, least in LEAST_POINTS.items():
        count = int((kinds == kind).sum())
        if count < least:
            raise CalibrationError(
                f"{run.name}: {count} different {kind} steps cannot identify the terms of {kind} steps; at least {least} are needed: "
                "measure with a larger --budget"
            )
    free = sum(repeats) - len(repeats)
    spread = (squares / free) ** 0.5 if free else 0.0
    return Points(
        shapes=tuple(shapes),
        time_us=np.asarray(time_us),
        repeats=np.asarray(repeats),
        noise=spread / np.sqrt(np.asarray(repeats, dtype=np.float64)),
        workspace_bytes=np.asarray(workspace, dtype=np.float64),
        kinds=kinds,
        served_by=np.asarray([run.steps[by_point[point][0]].served_by for point in sorted(by_point)]),
        quality=quality,
    )


def eager_decode_us(run: StepRun, points: Points) -> float | None:
    """What a decode step takes longer when its kernels are launched one by one, in microseconds: the median over those that were timed
    both ways. None where none was.
    """
    _, kept = assess(run.steps)
    graph = dict(zip(points.shapes, points.time_us.tolist(), strict=True))
    took: dict[BatchShape, list[float]] = {}
    for index in np.flatnonzero(kept).tolist():
        step = run.steps[index]
        if step.group == EAGER:
            took.setdefault(step.shape, []).append(step.duration_us)
    longer = [float(np.mean(times)) - graph[shape] for shape, times in took.items() if shape in graph]
    return max(0.0, float(np.median(longer))) if longer else None


def kind_of(shape: BatchShape) -> str:
    """`decode`, `prefill` or `mixed`."""
    if not shape.prefill:
        return "decode"
    return "mixed" if shape.decode_seqs else "prefill"
