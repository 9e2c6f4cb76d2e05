"""The search for the highest sustainable rate: a bisection on common random numbers, three times over.

A rate is sustainable when the mean over replications of each objective's statistic is within its limit, the queue does not
keep growing, and (nearly) every request that an empty system serves is served. The same question asked of the lower and of the
upper end of the t interval of each mean gives the interval of the answer. Rates are tried once and remembered, and replication k
has the same requests at every rate, only closer together, so that the answer to the question changes once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sim.results.statistics import mean_interval
from sim.scenario import Scenario
from sim.slo import Slo, SloTarget

from .replicate import Measured, Runner, Task

LOWEST_RATE_PER_S = 0.01
"""So low that requests do not meet: what misses its objective here misses it at any rate."""
FIRST_RATE_PER_S = 1.0
HIGHEST_RATE_PER_S = 4096.0
"""Where the search gives up looking for a limit."""
TOLERANCE = 0.02
"""Relative distance between the highest rate that passes and the lowest that fails."""
SERVED_SHARE = 0.99
"""Least share of the requests served at the lowest rate that must still be served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """All replications at one rate."""

    rate_per_s: float
    runs: tuple[Measured, ...]
    served_alone: float
    """Requests that finish at the lowest rate, mean over replications; NaN at the lowest rate itself."""

    def values_s(self, target: SloTarget) -> list[float]:
        """The objective's statistic in each replication, in seconds; infinite where nothing finished."""
        values = (target.value_s(run.summary) for run in self.runs)
        return [math.inf if value is None else value for value in values]

    def served(self) -> float:
        """Requests that finished, mean over replications."""
        return sum(float(run.summary["finished"]) for run in self.runs) / len(self.runs)

    def sustained(self, slo: Slo, side: int = 0) -> bool:
        """Whether the rate is sustainable: by the means (side 0), beyond doubt (1), or possibly (-1)."""
        growing = sum(run.queue_grows for run in self.runs)
        allowed = {1: 0, 0: len(self.runs) // 2, -1: len(self.runs) - 1}[side]
        if growing > allowed or self.served() < SERVED_SHARE * self.served_alone:
            return False
        return all(_bound(self.values_s(target), side) <= target.limit_s for target in slo.targets)

    def shortfalls(self, slo: Slo) -> list[str]:
        """Why the rate is not sustainable, in words with numbers."""
        reasons = [
            f"{target.name} is {_bound(self.values_s(target), 0):.4g} s, above {target.limit_s:g} s"
            for target in slo.targets
            if _bound(self.values_s(target), 0) > target.limit_s
        ]
        growing = sum(run.queue_grows for run in self.runs)
        if growing > len(self.runs) // 2:
            reasons.append(f"the queue keeps growing in {growing} of {len(self.runs)} replications")
        if self.served() < SERVED_SHARE * self.served_alone:
            reasons.append(
                f"{self.served():.0f} requests finish, of {self.served_alone:.0f} that finish at the lowest rate"
            )
        return reasons


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the search came to."""

    value: float | None
    """Highest sustainable rate, requests a second; None when the lowest rate is not sustainable."""
    low: float | None
    """Highest rate that is sustainable beyond doubt (0 when there is none)."""
    high: float | None
    """Lowest rate that is certainly not sustainable; None when there is none up to the highest tried."""
    passed: Point
    """The highest rate that passed, or the lowest rate when that failed."""
    failed: Point | None
    """The lowest rate that failed; None when none did."""


class Search:
    """Remembers every rate tried. Nothing is drawn here: equal scenarios give equal answers."""

    def __init__(
        self,
        scenario: Scenario,
        slo: Slo,
        replications: int,
        runner: Runner,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._scenario = scenario
        self._slo = slo
        self._replications = replications
        self._runner = runner
        self._say = say
        self._points: dict[float, Point] = {}
        self._served_alone = math.nan  # a comparison with NaN is false: the lowest rate is not compared with itself

    def find(self) -> Found:
        """Bracket and bisect. Raises what a run raises."""
        lowest = self._at(LOWEST_RATE_PER_S)
        if not lowest.sustained(self._slo):
            return Found(value=None, low=None, high=None, passed=lowest, failed=lowest)
        self._served_alone = lowest.served()
        rate = FIRST_RATE_PER_S
        while self._at(rate).sustained(self._slo) and rate < HIGHEST_RATE_PER_S:
            rate = min(rate * 4, HIGHEST_RATE_PER_S)
        passed, failed = self._boundary(0)
        low, _ = self._boundary(1)
        _, high = self._boundary(-1)
        return Found(
            value=passed.rate_per_s,
            low=low.rate_per_s if low.sustained(self._slo, 1) else 0.0,
            high=None if high is None else high.rate_per_s,
            passed=passed,
            failed=failed,
        )

    def points(self) -> list[Point]:
        """Every rate tried, ascending."""
        return [self._points[rate] for rate in sorted(self._points)]

    def _boundary(self, side: int) -> tuple[Point, Point | None]:
        """The highest rate that passes below the lowest that fails, and that one, within the tolerance."""
        while True:
            tried = self.points()
            failed = next((point for point in tried if not point.sustained(self._slo, side)), None)
            passed = max(
                (point for point in tried if failed is None or point.rate_per_s < failed.rate_per_s),
                default=tried[0],
                key=_rate,
            )
            if failed is None and passed.rate_per_s < HIGHEST_RATE_PER_S:
                self._at(min(passed.rate_per_s * 2, HIGHEST_RATE_PER_S))
            elif failed is None or passed is failed or failed.rate_per_s <= passed.rate_per_s * (1 + TOLERANCE):
                return passed, failed
            else:
                self._at(math.sqrt(passed.rate_per_s * failed.rate_per_s))

    def _at(self, rate_per_s: float) -> Point:
        rate = float(f"{rate_per_s:.4g}")
        if rate not in self._points:
            self._say(f"trying {rate:g} requests/s")
            scenario = self._scenario.with_(rate=rate)
            runs = self._runner.run([Task(scenario=scenario, replication=k) for k in range(self._replications)])
            self._points[rate] = Point(rate_per_s=rate, runs=tuple(runs), served_alone=self._served_alone)
        return self._points[rate]


def _rate(point: Point) -> float:
    return point.rate_per_s


def _bound(values: Sequence[float], side: int) -> float:
    """The mean (side 0), or the upper (1) or lower (-1) end of its 95 % interval; infinite when a value is."""
    if math.inf in values:
        return math.inf
    if side == 0 or len(set(values)) == 1:
        return sum(values) / len(values)
    interval = mean_interval(values)
    return interval.high if side > 0 else interval.low
