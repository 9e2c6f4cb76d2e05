"""What a table of a built-in workload holds."""

from __future__ import annotations

from dataclasses import dataclass

from sim.workload.arrivals import Gamma, Poisson
from sim.workload.lengths import LengthTable
from sim.workload.on_off import OnOff
from sim.workload.prefixes import PrefixTable


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadTable:
    """Everything that a built-in workload is made from."""

    source: str
    """Who recorded the trace, and its licence."""
    arrivals: Poisson | Gamma | OnOff
    """When requests come, unless told otherwise: the trace's rate and the variation of its gaps."""
    bursts: OnOff | None
    """The same, and also the dispersion of counts over 1, 10 and 60 s: bursts and drifts that last. None: not fitted."""
    lengths: LengthTable
    """How long prompts and outputs are."""
    prefixes: PrefixTable | None
    """What prompts have in common; None: nothing."""
