"""Arrival times that a recorder rounded to ticks: found in the data, and spread again inside the tick.

Replayed as recorded, a trace on 3 s ticks is a train of artificial bursts: ten requests at one instant, then silence.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from sim.workload.streams import stream

SHARED_STAMP_SHARE = 0.5
"""Share of consecutive rows with the same time stamp above which times are taken to be quantised."""
REGULAR_SHARE = 0.9
"""Share of the distances between distinct stamps that must be whole multiples of the tick (within 1 %)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticks:
    """Recorded times that sit on ticks."""

    tick_s: float
    """Usual distance between neighbouring stamps."""
    recorded_s: tuple[float, ...]
    """The recorded times, sorted, starting at 0."""

    @classmethod
    def detect(cls, times_s: list[float]) -> Ticks | None:
        """The ticks of sorted times, or None when they are not quantised.

        Quantised means: most consecutive rows share a stamp, there are at least three stamps, and distances between
        stamps are whole multiples of one distance. A burst at one instant, or rounding to a millisecond, is neither.
        """
        import statistics

        stamps = sorted(set(times_s))
        if len(stamps) < 3 or len(times_s) - len(stamps) <= SHARED_STAMP_SHARE * (len(times_s) - 1):
            return None
        distances = [after - before for before, after in pairwise(stamps)]
        tick_s = statistics.median(distances)
        regular = sum(
            abs(distance - round(distance / tick_s) * tick_s) <= 0.01 * tick_s * max(1, round(distance / tick_s))
            for distance in distances
        )
        if regular < REGULAR_SHARE * len(distances):
            return None
        return cls(tick_s=tick_s, recorded_s=tuple(times_s))

    def spread_s(self, *, seed: int, replication: int = 0) -> tuple[float, ...]:
        """The times with each stamp's requests placed uniformly in `[stamp, stamp + tick)`, in their recorded order.

        A tick that is a little shorter than usual ends where the next begins, so order is kept across ticks too.
        """
        import numpy as np

        recorded = np.array(self.recorded_s)
        stamps, inverse = np.unique(recorded, return_inverse=True)
        widths = np.minimum(np.diff(stamps, append=np.inf), self.tick_s)
        spread = recorded + stream(seed, "ticks", replication).random(len(recorded)) * widths[inverse]
        # Sorting the times, not the requests, keeps the recorded order inside each tick.
        return tuple(np.sort(spread).tolist())

    def note(self, *, spread: bool) -> str:
        """The sentence a result prints about these times."""
        arrivals = f"{len(self.recorded_s):,} arrivals were recorded on ticks of about {self.tick_s:.3g} s"
        if spread:
            return f"{arrivals}; each was spread uniformly inside its tick"
        return f"{arrivals} and are replayed as recorded: every tick is an artificial burst"
