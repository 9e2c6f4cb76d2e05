"""Arrival processes: when requests come.

Each process is a small frozen value with `times_s(n, rng)`: the first `n` arrival times, in seconds from the start,
never decreasing. Asking for more requests never changes the earlier ones. Gaps are neither clamped nor rescaled: a
process that is stretched so that its last arrival lands on n/rate (as `vllm bench serve` does) is no longer Poisson,
and hides the slow bursts that fill a GPU's memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from sim.workload.errors import WorkloadError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Times = npt.NDArray[np.float64]


class ArrivalProcess(Protocol):
    """When requests come."""

    @property
    def rate_per_s(self) -> float:
        """Mean arrivals a second in the long run; infinite when all come at once."""

    def times_s(self, n: int, rng: np.random.Generator) -> Times:
        """The first `n` arrival times `[n]` in seconds, never decreasing."""

    def describe(self) -> str:
        """The process in words, with its figures."""


def check_positive(name: str, value: float) -> None:
    """Raises: WorkloadError unless the value is finite and above 0."""
    if not (value > 0 and math.isfinite(value)):
        raise WorkloadError(f"{name} is {value}; it must be a finite number above 0")


def _normalized(times_s: Times, end_s: float) -> Times:
    return times_s * (end_s / times_s[-1]) if len(times_s) and times_s[-1] > 0 else times_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Poisson:
    """Independent arrivals: exponential gaps of mean 1/rate."""

    rate_per_s: float
    """Mean arrivals a second."""
    normalize: bool = False
    """Rescale so that the last of n arrivals lands on n/rate, to reproduce a `vllm bench serve` run."""

    def __post_init__(self) -> None:
        check_positive("rate_per_s", self.rate_per_s)

    def times_s(self, n: int, rng: np.random.Generator) -> Times:
        """The first `n` arrival times `[n]` in seconds."""
        times_s = rng.standard_exponential(n).cumsum() / self.rate_per_s
        return _normalized(times_s, n / self.rate_per_s) if self.normalize else times_s

    def describe(self) -> str:
        """The process in words, with its figures."""
        return f"Poisson arrivals at {self.rate_per_s:.4g}/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gamma:
    """Independent gamma-distributed gaps of mean 1/rate; their coefficient of variation is 1/sqrt(burstiness).

    Source: vLLM `bench serve`, `--burstiness`.
    """

    rate_per_s: float
    """Mean arrivals a second."""
    burstiness: float = 1.0
    """Shape of the gamma distribution: 1 is Poisson, below 1 is burstier, above 1 more regular."""
    normalize: bool = False
    """Rescale so that the last of n arrivals lands on n/rate, to reproduce a `vllm bench serve` run."""

    def __post_init__(self) -> None:
        check_positive("rate_per_s", self.rate_per_s)
        check_positive("burstiness", self.burstiness)

    def times_s(self, n: int, rng: np.random.Generator) -> Times:
        """The first `n` arrival times `[n]` in seconds."""
        times_s = rng.standard_gamma(self.burstiness, n).cumsum() / (self.burstiness * self.rate_per_s)
        return _normalized(times_s, n / self.rate_per_s) if self.normalize else times_s

    def describe(self) -> str:
        """The process in words, with its figures."""
        return f"gamma arrivals at {self.rate_per_s:.4g}/s, burstiness {self.burstiness:.4g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deterministic:
    """One arrival every 1/rate seconds, the first at 0."""

    rate_per_s: float
    """Arrivals a second."""

    def __post_init__(self) -> None:
        check_positive("rate_per_s", self.rate_per_s)

    def times_s(self, n: int, rng: np.random.Generator) -> Times:
        """The first `n` arrival times `[n]` in seconds; `rng` is not used."""
        import numpy as np

        return np.arange(n, dtype=np.float64) / self.rate_per_s

    def describe(self) -> str:
        """The process in words, with its figures."""
        return f"arrivals at regular intervals, {self.rate_per_s:.4g}/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Everything at time 0: an infinite rate, as `--request-rate inf` in vLLM bench. Used with a bound on concurrency."""

    @property
    def rate_per_s(self) -> float:
        """Infinite."""
        return math.inf

    def times_s(self, n: int, rng: np.random.Generator) -> Times:
        """`n` zeros; `rng` is not used."""
        import numpy as np

        return np.zeros(n, dtype=np.float64)

    def describe(self) -> str:
        """The process in words."""
        return "all requests arrive at time 0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Arrival times as they were recorded."""

    recorded_s: tuple[float, ...]
    """Seconds from the start, never decreasing."""

    def __post_init__(self) -> None:
        before_s = 0.0
        for i, time_s in enumerate(self.recorded_s):
            if not (math.isfinite(time_s) and time_s >= before_s):
                raise WorkloadError(
                    f"recorded_s[{i}] is {time_s}; times must be finite, at least 0 and not decrease (before: {before_s})"
                )
            before_s = time_s

    @property
    def rate_per_s(self) -> float:
        """Gaps divided by the time from the first arrival to the last; infinite when that time is 0."""
        if not self.recorded_s:
            return math.inf
        span_s = self.recorded_s[-1] - self.recorded_s[0]
        return (len(self.recorded_s) - 1) / span_s if span_s > 0 else math.inf

    def times_s(self, n: int, rng: np.random.Generator) -> Times:
        """The first `n` recorded times `[n]` in seconds; `rng` is not used.

        Raises: WorkloadError when more are asked for than were recorded.
        """
        import numpy as np

        if n > len(self.recorded_s):
            raise WorkloadError(f"{n} arrivals were asked for, the recording has {len(self.recorded_s)}")
        return np.array(self.recorded_s[:n], dtype=np.float64)

    def describe(self) -> str:
        """The process in words, with its figures."""
        return f"{len(self.recorded_s)} recorded arrivals, {self.rate_per_s:.4g}/s"
