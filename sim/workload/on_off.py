"""Bursts that last: a Poisson process whose rate is itself random."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sim.workload.arrivals import check_positive
from sim.workload.errors import WorkloadError

if TYPE_CHECKING:
    import numpy as np

    from sim.workload.arrivals import Times


@dataclass(frozen=True, slots=True, kw_only=True)
class OnOff:
    """A Poisson process whose rate alternates between two values, each held for an exponentially distributed time.

    Also called a two-state Markov-modulated Poisson process (MMPP): the simplest process with bursts that last.

    Source: Fischer and Meier-Hellstern, "The Markov-modulated Poisson process cookbook", 1993.
    """

    rate_on_per_s: float
    """Arrivals a second while on."""
    rate_off_per_s: float
    """Arrivals a second while off; may be 0."""
    mean_on_s: float
    """Mean length of an on period."""
    mean_off_s: float
    """Mean length of an off period."""

    def __post_init__(self) -> None:
        for name in ("rate_on_per_s", "mean_on_s", "mean_off_s"):
            check_positive(name, getattr(self, name))
        if not 0 <= self.rate_off_per_s < math.inf:
            raise WorkloadError(f"rate_off_per_s is {self.rate_off_per_s}; it must be a finite number, at least 0")

    @property
    def share_on(self) -> float:
        """Share of the time that the process is on."""
        return self.mean_on_s / (self.mean_on_s + self.mean_off_s)

    @property
    def rate_per_s(self) -> float:
        """Mean arrivals a second in the long run."""
        return self.share_on * self.rate_on_per_s + (1 - self.share_on) * self.rate_off_per_s

    @property
    def gap_cv(self) -> float:
        """Coefficient of variation of the gaps between arrivals (1 for Poisson), exact."""
        # Gaps are phase-type: started from phi (the state just after an arrival), killed by D0 = Q - diag(rates).
        leave_on, leave_off = 1 / self.mean_on_s, 1 / self.mean_off_s
        a, d = leave_on + self.rate_on_per_s, leave_off + self.rate_off_per_s
        det = a * d - leave_on * leave_off
        mean_from_on, mean_from_off = (d + leave_on) / det, (a + leave_off) / det
        phi_on = self.share_on * self.rate_on_per_s / self.rate_per_s
        half_second_moment = (
            phi_on * (d * mean_from_on + leave_on * mean_from_off)
            + (1 - phi_on) * (leave_off * mean_from_on + a * mean_from_off)
        ) / det
        return math.sqrt(max(0.0, 2 * half_second_moment * self.rate_per_s**2 - 1))

    def dispersion(self, window_s: float) -> float:
        """Variance over mean of the number of arrivals in a window of that length (1 for Poisson), exact."""
        check_positive("window_s", window_s)
        relax_per_s = 1 / self.mean_on_s + 1 / self.mean_off_s
        rate_variance = self.share_on * (1 - self.share_on) * (self.rate_on_per_s - self.rate_off_per_s) ** 2
        decayed = -math.expm1(-relax_per_s * window_s) / (relax_per_s * window_s)
        return 1 + 2 * rate_variance / self.rate_per_s / relax_per_s * (1 - decayed)

    def at_rate(self, rate_per_s: float) -> OnOff:
        """The same pattern played faster or slower: its mean rate becomes `rate_per_s`, `gap_cv` stays."""
        check_positive("rate_per_s", rate_per_s)
        faster = rate_per_s / self.rate_per_s
        return replace(
            self,
            rate_on_per_s=self.rate_on_per_s * faster,
            rate_off_per_s=self.rate_off_per_s * faster,
            mean_on_s=self.mean_on_s / faster,
            mean_off_s=self.mean_off_s / faster,
        )

    def times_s(self, n: int, rng: np.random.Generator) -> Times:
        """The first `n` arrival times `[n]` in seconds. The process starts in its steady state, not in an on period."""
        import numpy as np

        # A unit-rate Poisson process in "expected arrivals", mapped back to time through the integrated rate.
        # Two child streams, so that more arrivals lengthen both sequences without disturbing either.
        arrivals_rng, periods_rng = rng.spawn(2)
        expected = arrivals_rng.standard_exponential(n).cumsum()
        starts_on = bool(periods_rng.random() < self.share_on)
        means = np.array([self.mean_on_s, self.mean_off_s] if starts_on else [self.mean_off_s, self.mean_on_s])
        rates = np.array([self.rate_on_per_s, self.rate_off_per_s])
        rates = rates if starts_on else rates[::-1]
        periods = np.empty((0, 2))
        arrived = np.zeros(1)
        while arrived[-1] <= (expected[-1] if n else 0.0):
            periods = np.concatenate([periods, periods_rng.standard_exponential((256, 2)) * means])
            arrived = (periods * rates).ravel().cumsum()
        ends_s = periods.ravel().cumsum()
        period = np.searchsorted(arrived, expected, side="left")
        rate = np.tile(rates, len(periods))[period]
        times_s: Times = ends_s[period] - (arrived[period] - expected) / rate
        return np.maximum.accumulate(times_s)

    def describe(self) -> str:
        """The process in words, with its figures."""
        return (
            f"on/off arrivals at {self.rate_per_s:.4g}/s ({self.rate_on_per_s:.4g}/s for {self.mean_on_s:.4g} s, "
            f"{self.rate_off_per_s:.4g}/s for {self.mean_off_s:.4g} s, on average; gap CV {self.gap_cv:.3g})"
        )
