"""Workloads: arrival processes, named random streams, readers of public traces, built-in workloads."""

from sim.workload.arrival_choice import ARRIVALS
from sim.workload.arrivals import ArrivalProcess, Batch, Deterministic, Gamma, Poisson, Replay
from sim.workload.builtin import WORKLOADS
from sim.workload.errors import TraceError, UnknownWorkload, WorkloadError
from sim.workload.generate import BuiltWorkload, build_requests
from sim.workload.on_off import OnOff
from sim.workload.readers import read_trace
from sim.workload.streams import stream
from sim.workload.trace import Trace

__all__ = [
    "ARRIVALS",
    "WORKLOADS",
    "ArrivalProcess",
    "Batch",
    "BuiltWorkload",
    "Deterministic",
    "Gamma",
    "OnOff",
    "Poisson",
    "Replay",
    "Trace",
    "TraceError",
    "UnknownWorkload",
    "WorkloadError",
    "build_requests",
    "read_trace",
    "stream",
]
