"""Who sends a request: its priority, its tenant and the adapter it asks for, drawn by share from named streams.

Each is drawn from a stream of its own, so that asking for one changes no other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from sim.core.request import RequestSpec
from sim.workload.errors import WorkloadError
from sim.workload.streams import stream

Value = TypeVar("Value", int, str)


def drawn(what: str, shares: Mapping[Value, float], seed: int, replication: int, count: int) -> list[Value]:
    """`count` values from the stream `what`, each with its share of the probability.

    Raises WorkloadError unless the shares add up to 1.
    """
    if any(not share >= 0 for share in shares.values()) or not math.isclose(sum(shares.values()), 1.0, abs_tol=1e-6):
        raise WorkloadError(f"{_PLURAL[what]} is {dict(shares)!r}; the shares must be at least 0 and add up to 1")
    order = sorted(value for value, share in shares.items() if share > 0)
    bounds, total = [], 0.0
    for value in order:
        total += shares[value]
        bounds.append(total)
    uniform = stream(seed, what, replication).random(count).tolist()
    return [next((v for v, bound in zip(order, bounds, strict=True) if at < bound), order[-1]) for at in uniform]


_PLURAL = {"priority": "priorities", "tenant": "tenants", "lora": "loras"}


def with_senders(
    requests: Sequence[RequestSpec],
    tenants: Mapping[str, float] | None,
    loras: Mapping[str, float] | None,
    seed: int,
    replication: int,
) -> tuple[tuple[RequestSpec, ...], list[str]]:
    """The requests with tenants and adapters drawn by share, and a sentence on each; what adapters leave of 1 asks for the base model.

    Raises WorkloadError for shares that add up to no more or less than they should.
    """
    notes = []
    if tenants is not None:
        names = drawn("tenant", tenants, seed, replication, len(requests))
        requests = [replace(spec, tenant=name) for spec, name in zip(requests, names, strict=True)]
        notes.append("tenants were drawn: " + _listed(tenants))
    if loras is not None:
        base = 1.0 - sum(loras.values())
        if "" in loras or base < -1e-6:
            raise WorkloadError(
                f"loras is {dict(loras)!r}; adapters have names, and shares that add up to at most 1 (the rest asks for the base model)"
            )
        names = drawn("lora", {**loras, "": max(base, 0.0)}, seed, replication, len(requests))
        requests = [
            replace(spec, namespace=replace(spec.namespace, lora=name))
            for spec, name in zip(requests, names, strict=True)
        ]
        notes.append("adapters were drawn: " + _listed(loras))
    return tuple(requests), notes


def _listed(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{name} for {share:.0%}" for name, share in sorted(shares.items()))
