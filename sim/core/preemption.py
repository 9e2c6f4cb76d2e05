"""Who gives way when a running request needs a block and none is free.

A victim is a pure function of what a policy may look at (I11): the same state, the same victim. None of these looks at how long
a request will really be. Ties go to the latest admission, which has waited least.
"""

from __future__ import annotations

from collections.abc import Callable

from .request import Request

KnownTokens = Callable[[Request], int]
"""Prompt and sampled tokens of a running request; those of a decoding one are not stored in it."""

VictimPolicy = Callable[[dict[int, Request], KnownTokens], Request]
"""Picks from the running requests, keyed by admission order, oldest first; there is at least one."""


def last_admitted(running: dict[int, Request], known: KnownTokens) -> Request:
    """The most recently admitted request (vLLM V1, FCFS; TensorRT-LLM; nano-vllm)."""
    return running[next(reversed(running))]


def worst_priority(running: dict[int, Request], known: KnownTokens) -> Request:
    """The least important request, the latest arrival of them (vLLM V1, priority scheduling)."""
    return max(running.values(), key=lambda request: (request.spec.priority, request.arrival_fs, request.seq))


def fewest_generated(running: dict[int, Request], known: KnownTokens) -> Request:
    """The request with the fewest generated tokens, of equals the one with the longest prompt (SGLang `retract_decode`)."""
    return min(
        running.values(),
        key=lambda request: (known(request) - request.spec.input_tokens, -request.spec.input_tokens, -request.order),
    )


def least_lost_work(running: dict[int, Request], known: KnownTokens) -> Request:
    """The request with the fewest tokens to compute again: prompt and output together, cached or not."""
    return min(running.values(), key=lambda request: (known(request), -request.order))


def largest_holder(running: dict[int, Request], known: KnownTokens) -> Request:
    """The request that holds the most blocks: one preemption makes the most room."""
    return max(running.values(), key=lambda request: (request.held_blocks, request.order))


VICTIMS: dict[str, VictimPolicy] = {
    "last-admitted": last_admitted,
    "worst-priority": worst_priority,
    "fewest-generated": fewest_generated,
    "least-lost-work": least_lost_work,
    "largest-holder": largest_holder,
}
"""Victim policies by name."""
