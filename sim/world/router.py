"""Which replica gets a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sim.core.engine import EngineCore
from sim.core.request import RequestSpec

Router = Callable[[RequestSpec, Sequence[EngineCore]], int]
"""Picks the index of a replica. It may look at the engines and must not touch them."""


class RoundRobin:
    """Each replica in turn."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, spec: RequestSpec, engines: Sequence[EngineCore]) -> int:
        """The next in turn."""
        chosen = self._next % len(engines)
        self._next += 1
        return chosen


class LeastRequests:
    """The replica with the fewest requests in the system; the first of equals."""

    def __call__(self, spec: RequestSpec, engines: Sequence[EngineCore]) -> int:
        """The least loaded."""
        return min(range(len(engines)), key=lambda index: engines[index].num_unfinished)


class LeastKv:
    """The replica whose KV pool is used least; the first of equals."""

    def __call__(self, spec: RequestSpec, engines: Sequence[EngineCore]) -> int:
        """The emptiest pool."""
        return min(range(len(engines)), key=lambda index: engines[index].pool.num_owned)


ROUTERS: dict[str, Callable[[], Router]] = {
    "round-robin": RoundRobin,
    "least-requests": LeastRequests,
    "least-kv": LeastKv,
}
"""Routers by name."""
