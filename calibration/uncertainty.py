"""What the uncertainty of a profile does to a prediction: the run is simulated again with terms as they may also be.

Each draw scales every term by a factor that its held-out points suggest, and the metrics of the runs so priced span the interval.
It is the uncertainty of the kernel tables alone. What no table holds (host time, gaps, clocks under load, an engine of another
version) is not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from sim.costs.overlap import OverlappedHost, overlapped
from sim.costs.piecewise import Grid, Line
from sim.costs.profile import FittedProfile
from sim.costs.protocol import CostModel

from .errors import CalibrationError
from .judge import Judgement
from .runs import RecordedRun
from .twin import SimulatedRun

SHARE = 0.9
"""Share of the draws that an interval holds."""
LEAST_DRAWS = 4


def drawn(cost: FittedProfile, number: int) -> FittedProfile:
    """The prices with every term scaled by its draw `number`; draws repeat when there are fewer."""
    terms = cost.terms
    factor = {name: drawn[number % len(drawn)] for name, drawn in terms.samples.items()}

    def line(table: Line, name: str) -> Line:
        return Line(table.x, tuple(value * factor.get(name, 1.0) for value in table.y))

    def grid(table: Grid, name: str) -> Grid:
        return Grid(table.x, table.y, tuple(tuple(value * factor.get(name, 1.0) for value in row) for row in table.z))

    scaled = replace(
        terms,
        dense=line(terms.dense, "dense"),
        rows=line(terms.rows, "rows"),
        prefill=grid(terms.prefill, "prefill"),
        decode=grid(terms.decode, "decode"),
        mixed=grid(terms.mixed, "mixed"),
        chunk_launch_s=terms.chunk_launch_s * factor.get("prefill", 1.0),
        mixed_tile_s=terms.mixed_tile_s * factor.get("mixed", 1.0),
    )
    return FittedProfile(scaled, name=cost.name)


def draws(cost: CostModel, count: int) -> list[CostModel]:
    """So many draws of the prices. Raises: CalibrationError for prices that know no uncertainty, or too few draws."""
    if isinstance(cost, OverlappedHost):
        return [overlapped(one) for one in draws(cost.inner, count)]
    if not isinstance(cost, FittedProfile) or not cost.terms.samples:
        raise CalibrationError(
            f"prices {cost.name!r} say nothing of their uncertainty; those of a fitted profile do (--profile auto)"
        )
    if count < LEAST_DRAWS:
        raise CalibrationError(f"{count} draws span no interval; at least {LEAST_DRAWS} are needed")
    return [drawn(cost, number) for number in range(count)]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The central `SHARE` of the values."""
    low, high = np.nanquantile(np.asarray(values, dtype=np.float64), [(1 - SHARE) / 2, (1 + SHARE) / 2])
    return float(low), float(high)


def with_intervals(
    judgement: Judgement,
    cost: CostModel,
    count: int,
    simulate: Callable[[CostModel], SimulatedRun],
    judged: Callable[[RecordedRun, SimulatedRun], Judgement],
) -> Judgement:
    """The judgement with the interval of every prediction. `simulate` prices the run again, `judged` compares as before.

    Raises: CalibrationError as `draws`.
    """
    again = [judged(judgement.run, simulate(one)) for one in draws(cost, count)]
    values: dict[str, list[float]] = {metric.name: [] for metric in judgement.metrics}
    for other in again:
        for metric in other.metrics:
            values[metric.name].append(metric.predicted)
    metrics = []
    for metric in judgement.metrics:
        low, high = interval(values[metric.name])
        metrics.append(
            replace(metric, predicted_low=min(low, metric.predicted), predicted_high=max(high, metric.predicted))
        )
    return replace(judgement, metrics=tuple(metrics))
