"""What if: the worst published rows priced again under other readings of how they came about, to see which brings them nearer.

None of these is used for a prediction. A reading that mends a row is a candidate for its cause, and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from sim.core.batch_shape import BatchShape
from sim.core.clock import to_s
from sim.costs.piecewise import Line
from sim.costs.profile import FittedProfile
from sim.costs.protocol import CostModel

GPUS_OF_A_NODE = 8
HOST_SEQ_S = 35e-6
"""What two rows of vLLM with 128 clients lack; it is tried on the others."""
FASTER = 0.8
EXPLAINED = 0.5
"""A reading counts where it at least halves the error."""
Tpot = Callable[[CostModel, int], float]
"""TPOT of a row by the prices and how many clients share an engine, in seconds."""


def explained(row: Any, cost: FittedProfile, tpot: Tpot) -> str:
    """The reading under which a row comes nearest to what was measured, in words with the error it leaves.

    `row` has `silicon_tpot_ms`, `tpot_error`, `how`, `batch_size`, `tp_size`, `isl` and `osl`.
    """
    errors = {name: tpot_s * 1e3 / row.silicon_tpot_ms - 1 for name, tpot_s in _readings(row, cost, tpot)}
    name, left = min(errors.items(), key=lambda one: abs(one[1]))
    if abs(left) > EXPLAINED * abs(row.tpot_error):
        return f"no reading halves it; nearest {left:+.0%}, if {name}"
    return f"{left:+.0%} if {name}"


def _readings(row: Any, cost: FittedProfile, tpot: Tpot) -> Iterator[tuple[str, float]]:
    """Readings of a row, and its TPOT under each, in seconds."""
    clients, terms = int(row.batch_size), cost.terms
    replicas = max(1, GPUS_OF_A_NODE // int(row.tp_size))
    if row.how == "steady state" and 1 < replicas <= clients:
        yield f"{replicas} replicas shared the clients", tpot(cost, round(clients / replicas))
    if row.how == "burst":
        yield "every prompt was computed before the first decode", _decodes_s(cost, clients, int(row.isl), int(row.osl))
    if terms.all_reduce is not None:
        yield "collectives took half the time", tpot(_with(cost, all_reduce=_scaled(terms.all_reduce, 0.5)), clients)
    yield f"matrices took {FASTER} of the time", tpot(_with(cost, dense=_scaled(terms.dense, FASTER)), clients)
    yield f"the host took {HOST_SEQ_S * 1e6:.0f} us a sequence", tpot(_with(cost, seq_s=HOST_SEQ_S), clients)


def _decodes_s(cost: CostModel, clients: int, prompt: int, output: int) -> float:
    """A step of decodes alone, halfway through the outputs."""
    context = round(clients * (prompt + output / 2))
    shape = BatchShape(decode_seqs=clients, decode_context_tokens=context, sampled_seqs=clients)
    return to_s(cost.step_fs(shape))


def _with(cost: FittedProfile, **changed: Any) -> FittedProfile:
    return FittedProfile(replace(cost.terms, **changed), name=cost.name)


def _scaled(table: Line, factor: float) -> Line:
    return Line(table.x, tuple(value * factor for value in table.y))
