"""Faults that can be injected into a run: each takes memory, or needs it, in the way that one cause of real failures does.

A fault is a function of simulated time and of nothing else, so a run with faults is as reproducible as one without. What a fault
holds only changes at known moments and, until it gives everything back, only grows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sim.catalog.gpus import GIB
from sim.core.clock import to_fs
from sim.core.config import ConfigError

from .step_memory import PLAIN_ATTENTION, PROMPT_LOGPROBS

HOLDS: dict[str, str] = {
    "other_process": "another process takes memory of the same GPU",
    "non_torch": "libraries or communication of this process take memory outside PyTorch",
    "leak": "tensors that nothing needs any more stay allocated",
    "fragmentation": "memory is reserved by the allocator in pieces too small to use",
    "pending_frees": "freed memory waits for another stream",
    "cuda_graphs": "graphs captured while serving keep memory in their private pools",
    "cached": "the allocator keeps free segments; they go back to the device before anything fails",
}
"""Kinds that hold `gib`, and what each stands for."""
NEEDS: dict[str, str] = {
    "prompt_logprobs": "requests ask for the log-probabilities of their prompts",
    "kernel_fallback": "attention falls back to a kernel that writes out all scores",
}
"""Kinds that make steps need more, and what each stands for."""
STARTS: dict[str, str] = {
    "loading": "while weights are loaded, copies of them in another format are held beside them",
    "encoder": "start-up profiles a multimodal encoder with the largest inputs that the limits allow",
    "graph_capture": "CUDA graphs take more than was estimated when they are captured",
    "sampler_warm_up": "the engine runs its sampler once, with as many rows as it may ever get, before it serves",
}
"""Kinds that need memory while the engine starts, and what each stands for. All but the last say how much: `gib`."""
BREAKS: dict[str, str] = {"double_release": "a block of a running request is given back a second time"}
"""Kinds that break an invariant; the pool refuses, and the run ends with its message."""
KINDS = {**HOLDS, **NEEDS, **STARTS, **BREAKS}
_SIZED = {*HOLDS, *STARTS} - {"sampler_warm_up"}
_EXTRA = {"prompt_logprobs": PROMPT_LOGPROBS, "kernel_fallback": PLAIN_ATTENTION}
_KEYS = ("kind", "at_s", "until_s", "gib", "every_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault."""

    kind: str
    """One of `KINDS`."""
    at_s: float = 0.0
    """Seconds of simulated time at which it begins."""
    until_s: float = math.inf
    """When everything it holds is given back, or the extra need ends."""
    gib: float = 0.0
    """GiB that it takes at `at_s`, and again every `every_s`; only for kinds that hold memory."""
    every_s: float = 0.0
    """Seconds between growths; 0: it does not grow."""

    @classmethod
    def of(cls, index: int, given: Mapping[str, str | float]) -> Fault:
        """The fault that a table of a scenario file describes; `index` is its place in the list.

        Raises ConfigError naming the key that is wrong and what would be right.
        """
        where = f"[run] faults, entry {index + 1}"
        for key in given:
            if key not in _KEYS:
                raise ConfigError(f"{where}: no key {key!r}; known are {', '.join(_KEYS)}")
        kind = given.get("kind")
        if kind not in KINDS:
            raise ConfigError(f"{where}: kind is {kind!r}; it must be one of {', '.join(KINDS)}")
        numbers = {key: value for key, value in given.items() if key != "kind"}
        for key, value in numbers.items():
            if isinstance(value, str) or math.isnan(value) or value < 0:
                raise ConfigError(f"{where}: {key} is {value!r}; it must be a number of at least 0")
        fault = cls(kind=str(kind), **{key: float(value) for key, value in numbers.items()})
        if math.isinf(fault.at_s) or math.isinf(fault.gib) or math.isinf(fault.every_s):
            raise ConfigError(f"{where}: only until_s may be infinite")
        if kind in STARTS and (fault.at_s or fault.every_s or not math.isinf(fault.until_s)):
            raise ConfigError(
                f"{where}: kind {kind} happens while the engine starts; leave at_s, until_s and every_s out"
            )
        if (kind in _SIZED) != (fault.gib > 0):
            right = "must say how much it takes" if kind in _SIZED else "takes no memory of its own: leave gib out"
            raise ConfigError(f"{where}: kind {kind} has gib {fault.gib:g}; it {right}")
        if fault.until_s <= fault.at_s:
            raise ConfigError(f"{where}: until_s {fault.until_s:g} is not after at_s {fault.at_s:g}")
        return fault

    @property
    def at_fs(self) -> int:
        """When it begins, in femtoseconds."""
        return to_fs(self.at_s)

    @property
    def until_fs(self) -> int | None:
        """When it ends; None for never."""
        return None if math.isinf(self.until_s) else to_fs(self.until_s)

    def active(self, time_fs: int) -> bool:
        """Whether it is there at a time."""
        until_fs = self.until_fs
        return time_fs >= self.at_fs and (until_fs is None or time_fs < until_fs)

    def held_bytes(self, time_fs: int) -> int:
        """What it holds at a time."""
        if not self.gib or not self.active(time_fs):
            return 0
        every_fs = to_fs(self.every_s)
        times = 1 + ((time_fs - self.at_fs) // every_fs if every_fs else 0)
        return times * round(self.gib * GIB)


class Faults:
    """All faults of a run."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self.faults = tuple(faults)
        turns = {fault.at_fs for fault in self.faults if fault.kind in NEEDS}
        turns |= {fault.until_fs for fault in self.faults if fault.until_fs is not None}
        self.turns_fs = tuple(sorted(turns))
        """Moments other than which everything only gets tighter as time passes, in femtoseconds."""

    def __bool__(self) -> bool:
        return bool(self.faults)

    def held_bytes(self, kind: str, time_fs: int) -> int:
        """What all faults of a kind hold at a time."""
        return sum(fault.held_bytes(time_fs) for fault in self.faults if fault.kind == kind)

    def taken_bytes(self, time_fs: int) -> int:
        """What is missing from the workspace because of faults at a time."""
        return sum(fault.held_bytes(time_fs) for fault in self.faults if fault.kind in HOLDS and fault.kind != "cached")

    def extra(self, time_fs: int) -> frozenset[str]:
        """Unprofiled work that steps starting at a time do."""
        return frozenset(_EXTRA[fault.kind] for fault in self.faults if fault.kind in NEEDS and fault.active(time_fs))

    def starting_bytes(self, kind: str) -> int | None:
        """What a kind of `STARTS` needs while the engine starts; 0 where it needs what it needs, None where it is not among the faults."""
        found = [fault for fault in self.faults if fault.kind == kind]
        return sum(round(fault.gib * GIB) for fault in found) if found else None

    def double_release_due(self, time_fs: int) -> bool:
        """Whether a block is to be given back twice."""
        return any(fault.kind in BREAKS and fault.active(time_fs) for fault in self.faults)


def read_faults(given: Sequence[Mapping[str, str | float]] | None) -> Faults:
    """The faults of `[run] faults`. Raises ConfigError."""
    return Faults(Fault.of(index, entry) for index, entry in enumerate(given or ()))
