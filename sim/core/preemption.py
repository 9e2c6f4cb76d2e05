"""Who gives way when a running request needs a block and none is free.

A victim is a pure function of what the policy may look at (I11): the same state, the same victim.
"""

from __future__ import annotations

from collections.abc import Callable

from .request import Request

VictimPolicy = Callable[[dict[int, Request]], Request]
"""Picks from the running requests, keyed by admission order, oldest first; there is at least one."""


def last_admitted(running: dict[int, Request]) -> Request:
    """The most recently admitted request (vLLM V1, FCFS)."""
    return running[next(reversed(running))]


def worst_priority(running: dict[int, Request]) -> Request:
    """The least important request, the latest arrival of them (vLLM V1, priority scheduling)."""
    return max(running.values(), key=lambda request: (request.spec.priority, request.arrival_fs, request.seq))


VICTIMS: dict[str, VictimPolicy] = {"fcfs": last_admitted, "priority": worst_priority}
"""Victim policy by scheduling policy."""
