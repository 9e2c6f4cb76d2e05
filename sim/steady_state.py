"""Whether a run had a steady state: did the queue keep growing while requests arrived?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim.results.statistics import QueueTrend


def steady_state_warnings(timeline: Mapping[str, Sequence[Any]], until_s: float) -> list[str]:
    """A sentence when the queue grew significantly until `until_s`, the last arrival: means then describe the run's length."""
    trend = queue_trend(timeline, until_s)
    if not trend.grows:
        return []
    return [
        f"no steady state: the queue grows by {trend.slope_per_s:.3g} requests a second (95 % interval {trend.low:.3g} to "
        f"{trend.high:.3g}) while requests arrive, so latencies depend on how long that lasts ({until_s:.4g} s here)"
    ]


def queue_trend(timeline: Mapping[str, Sequence[Any]], until_s: float) -> QueueTrend:
    """The trend of the number of waiting requests from 0 to `until_s`, from the columns of timeline.csv."""
    from sim.results.statistics import queue_grows

    return queue_grows(*queue_lengths(timeline, until_s))


def queue_lengths(timeline: Mapping[str, Sequence[Any]], until_s: float) -> tuple[list[float], list[float]]:
    """Times (seconds) and the number of waiting requests of all replicas from then on, from 0 until `until_s`.

    A replica that is idle has nobody waiting.
    """
    changes: list[tuple[float, int, float]] = []
    for start_s, duration_s, waiting, replica in zip(
        timeline["time_s"], timeline["duration_s"], timeline["waiting"], timeline["replica"], strict=True
    ):
        # At one instant the end of an interval sorts before the start of the next: -1 marks the end.
        changes.append((start_s, replica, waiting))
        changes.append((start_s + duration_s, replica, -1))
    changes.sort(key=lambda change: (change[0], change[1], change[2]))
    by_replica: dict[int, float] = {}
    times, lengths = [0.0], [0.0]
    for time_s, replica, waiting in changes:
        if time_s > until_s:
            break
        by_replica[replica] = max(waiting, 0)
        times.append(time_s)
        lengths.append(sum(by_replica.values()))
    if until_s > times[-1]:
        times.append(until_s)
        lengths.append(lengths[-1])
    return times, lengths
