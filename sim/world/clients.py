"""Clients as SimPy processes: when requests are sent, and when their senders lose patience."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from itertools import groupby
from typing import Any

import simpy

from sim.core.clock import to_fs
from sim.core.request import Outcome, RequestSpec

CLIENT_TURNAROUND_FS = 10**9
"""A client of a closed loop sends its next request one microsecond after the end of the one before: later than the decision
that the end made possible, as over any network."""


def open_loop(
    env: simpy.Environment, requests: Sequence[RequestSpec], send: Callable[[RequestSpec], None]
) -> Generator[simpy.Event, Any, None]:
    """Send every request at its time, whatever the engine does."""
    for spec in requests:
        yield from _wait_until(env, spec.arrival_s)
        send(spec)


def closed_loop(
    env: simpy.Environment,
    requests: Sequence[RequestSpec],
    send: Callable[[RequestSpec], simpy.Event],
    max_concurrency: int,
) -> Generator[simpy.Event, Any, None]:
    """Send requests in order, each at its time or, if later, when fewer than `max_concurrency` are outstanding.

    As `vllm bench serve --max-concurrency`: a request's clock starts when it is sent, not when it could have been. The samples of one
    request are sent together, and are one that is outstanding until the last of them ends.
    """
    slots = simpy.Resource(env, max_concurrency)

    def occupy(
        together: Sequence[RequestSpec], slot: simpy.resources.resource.Request
    ) -> Generator[simpy.Event, Any, None]:
        yield from [send(spec) for spec in together]
        yield env.timeout(CLIENT_TURNAROUND_FS)
        slots.release(slot)

    for _, samples in groupby(requests, key=lambda spec: spec.sample_of or spec.request_id):
        together = list(samples)
        yield from _wait_until(env, together[0].arrival_s)
        slot = slots.request()
        yield slot
        env.process(occupy(together, slot))


def patience(
    env: simpy.Environment, spec: RequestSpec, abort: Callable[[str, Outcome, str], None]
) -> Generator[simpy.Event, Any, None]:
    """Wait as long as this client will, then give up."""
    limits = []
    if spec.timeout_s is not None:
        limits.append(
            (to_fs(spec.timeout_s), Outcome.TIMED_OUT, f"not served within its time-out of {spec.timeout_s:g} s")
        )
    if spec.cancel_after_s is not None:
        limits.append(
            (
                to_fs(spec.cancel_after_s),
                Outcome.ABORTED,
                f"the client cancelled {spec.cancel_after_s:.3f} s after sending",
            )
        )
    wait_fs, outcome, reason = min(limits, key=lambda limit: limit[0])
    yield env.timeout(wait_fs)
    abort(spec.request_id, outcome, reason)


def _wait_until(env: simpy.Environment, time_s: float) -> Generator[simpy.Event, Any, None]:
    wait_fs = to_fs(time_s) - env.now
    if wait_fs > 0:
        yield env.timeout(wait_fs)
