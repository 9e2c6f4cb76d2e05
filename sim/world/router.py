"""Which replica gets a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from sim.core.request import RequestSpec


class Load(Protocol):
    """What a router may know of a replica, as it is at this moment, in the middle of a stretch too."""

    @property
    def num_unfinished(self) -> int:
        """Requests in the system."""
        ...

    @property
    def num_owned_blocks(self) -> int:
        """KV blocks in use."""
        ...


Router = Callable[[RequestSpec, Sequence[Load]], int]
"""Picks the index of a replica."""


class RoundRobin:
    """Each replica in turn."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, spec: RequestSpec, replicas: Sequence[Load]) -> int:
        """The next in turn."""
        chosen = self._next % len(replicas)
        self._next += 1
        return chosen


class LeastRequests:
    """The replica with the fewest requests in the system; the first of equals."""

    def __call__(self, spec: RequestSpec, replicas: Sequence[Load]) -> int:
        """The least loaded."""
        return min(range(len(replicas)), key=lambda index: replicas[index].num_unfinished)


class LeastKv:
    """The replica whose KV pool is used least; the first of equals."""

    def __call__(self, spec: RequestSpec, replicas: Sequence[Load]) -> int:
        """The emptiest pool."""
        return min(range(len(replicas)), key=lambda index: replicas[index].num_owned_blocks)


ROUTERS: dict[str, Callable[[], Router]] = {
    "round-robin": RoundRobin,
    "least-requests": LeastRequests,
    "least-kv": LeastKv,
}
"""Routers by name."""
