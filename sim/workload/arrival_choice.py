"""Which arrival process a run has, and its arrival times for a number of requests or a duration."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from sim.workload.arrivals import ArrivalProcess, Batch, Deterministic, Gamma, Poisson, Replay
from sim.workload.errors import WorkloadError, did_you_mean
from sim.workload.on_off import OnOff
from sim.workload.streams import stream

MOST_REQUESTS = 10_000_000
"""A duration that would take more requests than this is taken for a mistake."""

ARRIVALS = {
    "poisson": "independent arrivals",
    "deterministic": "regular intervals",
    "batch": "everything at time 0",
    "on-off": "bursts and drifts as fitted to the trace of a built-in workload",
}
"""Names that `arrival` understands, and what they mean."""


def choose_arrivals(
    own: Poisson | Gamma | OnOff | Batch,
    own_bursts: Callable[[], OnOff],
    *,
    rate_per_s: float | None,
    burstiness: float | None,
    arrival: ArrivalProcess | str | None,
) -> ArrivalProcess:
    """The arrival process that the settings ask for; `own` is what the workload has when they ask for nothing.

    Raises: WorkloadError for settings that contradict each other or an unknown name.
    """
    if arrival is not None and burstiness is not None:
        raise WorkloadError("burstiness is the shape of gamma arrivals; give either arrival or burstiness")
    if arrival is not None and not isinstance(arrival, str):
        if rate_per_s is not None:
            raise WorkloadError("an arrival process has its own rate; give either arrival or rate_per_s")
        return arrival
    if isinstance(arrival, str) and arrival not in ARRIVALS:
        raise WorkloadError(
            f"unknown arrival {arrival!r}{did_you_mean(arrival, ARRIVALS)}; known are {', '.join(ARRIVALS)}"
        )
    rate = own.rate_per_s if rate_per_s is None else rate_per_s
    if arrival == "batch" or rate_per_s == math.inf:
        if (
            burstiness is not None
            or (arrival is not None and arrival != "batch")
            or (rate_per_s is not None and rate_per_s != math.inf)
        ):
            raise WorkloadError(
                "everything arrives at time 0 here, so no other rate, arrival or burstiness can be given"
            )
        return Batch()
    if rate == math.inf:
        if arrival is not None or burstiness is not None:
            raise WorkloadError(
                "all recorded arrivals are at one time, so there is no rate to keep; give rate_per_s as well"
            )
        return own
    if arrival == "deterministic":
        return Deterministic(rate_per_s=rate)
    if arrival == "on-off":
        return own_bursts() if rate_per_s is None else own_bursts().at_rate(rate)
    if burstiness is not None and burstiness != 1:
        return Gamma(rate_per_s=rate, burstiness=burstiness)
    if arrival == "poisson" or burstiness is not None or isinstance(own, Batch):
        return Poisson(rate_per_s=rate)
    if rate_per_s is None:
        return own
    return own.at_rate(rate) if isinstance(own, OnOff) else replace(own, rate_per_s=rate)


def arrival_times_s(
    process: ArrivalProcess,
    num_requests: int | None,
    duration_s: float | None,
    default: int,
    seed: int,
    replication: int,
) -> list[float]:
    """The first `num_requests` arrival times, those in `[0, duration_s)`, or with both the fewer; with neither the first `default`.

    Raises: WorkloadError when no request arrives in time, or the duration bounds nothing.
    """
    if num_requests is None and isinstance(process, Replay):
        num_requests = len(process.recorded_s)  # a recording cannot be drawn longer
    if duration_s is None or num_requests is not None:
        wanted = default if num_requests is None else num_requests
        times_s = process.times_s(wanted, stream(seed, "arrival", replication)).tolist()
        kept = times_s if duration_s is None else [time_s for time_s in times_s if time_s < duration_s]
    else:
        if process.rate_per_s == math.inf:
            raise WorkloadError("all requests arrive at time 0, so duration_s bounds nothing; give num_requests")
        # A longer draw keeps the earlier times, so the number needed is found by drawing more until one is too late.
        wanted = int(process.rate_per_s * duration_s * 1.2) + 16
        while True:
            if wanted > MOST_REQUESTS:
                raise WorkloadError(
                    f"duration_s {duration_s:g} at {process.rate_per_s:g} requests a second takes more than {MOST_REQUESTS:,} requests; "
                    "lower one of them, or give num_requests"
                )
            times_s = process.times_s(wanted, stream(seed, "arrival", replication)).tolist()
            if times_s[-1] >= duration_s:
                break
            wanted *= 2
        kept = [time_s for time_s in times_s if time_s < duration_s]
    if not times_s:
        raise WorkloadError("the recording has no arrivals")
    if not kept:
        raise WorkloadError(
            f"no request arrives within duration_s = {duration_s:g} (the first would at {times_s[0]:.4g} s); give a longer duration"
        )
    return kept
