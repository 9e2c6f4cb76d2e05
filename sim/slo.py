"""Service-level objectives: what counts as served well, in one line of text.

`ttft_p99=2.0,tpot_p99=0.05` reads: the 99th percentile of the time to first token is at most 2 s, and that of the time
per output token at most 50 ms. A name without a statistic means p99. Two uses: a run *meets* its objectives when every
statistic is within its limit (capacity), and a single request is *good* when each of its own times is within the limit
of that metric (goodput, as `vllm bench serve --goodput` counts it, but in seconds).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass

METRICS = ("ttft", "tpot", "itl", "e2el")
"""Time to first token, time per output token, inter-token latency, end-to-end latency."""
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")
"""Statistics over the finished requests of a run, as `summary.json` has them."""
EXAMPLE = "ttft_p99=2.0,tpot_p99=0.05"


class SloError(ValueError):
    """An objective that cannot be read. The message says which one and what would be right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SloTarget:
    """One objective: a statistic of a latency metric and its limit."""

    metric: str
    """One of `METRICS`."""
    statistic: str
    """One of `STATISTICS`."""
    limit_s: float
    """Largest value that is still good, in seconds."""

    @property
    def name(self) -> str:
        """`ttft_p99`: the name in text and in tables."""
        return f"{self.metric}_{self.statistic}"

    def value_s(self, summary: Mapping[str, object]) -> float | None:
        """This statistic in a run's summary, in seconds; None where the run has none (nothing finished)."""
        statistics = summary.get(f"{self.metric}_s")
        value = statistics.get(self.statistic) if isinstance(statistics, Mapping) else None
        return float(value) if isinstance(value, int | float) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """A set of objectives; all of them must hold."""

    targets: tuple[SloTarget, ...]

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Objectives from `ttft_p99=2.0,tpot_p99=0.05` (seconds). Raises SloError."""
        limits: dict[str, object] = {}
        for part in (part.strip() for part in text.split(",")):
            if not part:
                continue
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if not equals:
                raise SloError(f"{part!r} has no limit; write NAME=SECONDS, for example {EXAMPLE}")
            if name in limits:
                raise SloError(f"{name} is given twice")
            try:
                limits[name] = float(value)
            except ValueError:
                raise SloError(f"{name} is {value!r}; it must be a number of seconds, for example {EXAMPLE}") from None
        return cls.of(limits)

    @classmethod
    def of(cls, limits: Mapping[str, object]) -> Slo:
        """Objectives from names and limits in seconds, as in the table `[slo]`. Raises SloError."""
        targets = tuple(_target(name, value) for name, value in limits.items())
        if not targets:
            raise SloError(f"no objective is given; for example {EXAMPLE}")
        names = [target.name for target in targets]
        for name in names:
            if names.count(name) > 1:
                raise SloError(f"{name} is given twice ({name.rpartition('_')[0]} alone means its p99)")
        return cls(targets=targets)

    @property
    def limits_s(self) -> dict[str, float]:
        """The limit a single request is held to, a metric: the smallest where a metric has several, in seconds."""
        limits: dict[str, float] = {}
        for target in self.targets:
            limits[target.metric] = min(target.limit_s, limits.get(target.metric, math.inf))
        return limits

    def as_dict(self) -> dict[str, float]:
        """Name and limit in seconds of each objective, in the order given."""
        return {target.name: target.limit_s for target in self.targets}

    def __str__(self) -> str:
        return ",".join(f"{name}={limit_s:g}" for name, limit_s in self.as_dict().items())


def _target(name: str, value: object) -> SloTarget:
    metric, _, statistic = name.partition("_")
    statistic = statistic or "p99"
    if metric not in METRICS or statistic not in STATISTICS:
        known = [f"{metric}_{statistic}" for metric in METRICS for statistic in STATISTICS]
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"nearest is {close[0]}" if close else "an objective is a metric, _ and a statistic, such as ttft_p99"
        raise SloError(
            f"{name!r} is not an objective; {hint} (metrics {', '.join(METRICS)}; statistics {', '.join(STATISTICS)})"
        )
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise SloError(f"{name} is {value!r}; it must be a number of seconds above 0")
    return SloTarget(metric=metric, statistic=statistic, limit_s=float(value))
