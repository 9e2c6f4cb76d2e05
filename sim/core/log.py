"""The decision log: what the core decided, step by step, in the same words in a simulation and on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .draft import Draft
from .family import Fork
from .plan import CpuMove

DecisionSink = Callable[[dict[str, object], int], None]
"""Takes one log entry and the time at which its step started, in femtoseconds; writing it somewhere is the world's business."""


@dataclass(slots=True)
class Decisions:
    """Decisions taken since the last logged step, waiting for the next one."""

    preempted: list[str] = field(default_factory=list)
    swapped_out: list[tuple[str, list[tuple[int, int]]]] = field(default_factory=list)
    swapped_in: list[tuple[str, list[tuple[int, int]]]] = field(default_factory=list)
    copied: list[tuple[int, int]] = field(default_factory=list)
    forked: list[tuple[str, str, tuple[int, ...]]] = field(default_factory=list)
    """As `StepPlan.forks`."""
    released: list[tuple[str, list[int]]] = field(default_factory=list)
    admitted: list[str] = field(default_factory=list)
    rejected: list[tuple[str, str]] = field(default_factory=list)
    ladder: list[tuple[str, str]] = field(default_factory=list)
    saved: list[list[tuple[int, int]]] = field(default_factory=list)
    loaded: list[tuple[str, list[tuple[int, int]]]] = field(default_factory=list)
    to_cpu: list[CpuMove] = field(default_factory=list)
    from_cpu: list[CpuMove] = field(default_factory=list)

    def note(self, draft: Draft) -> None:
        """What a draft decided; who could not be served, or was turned away, is written down when it ends."""
        self.preempted += [request.request_id for request in draft.preempted]
        self.released += draft.released
        self.admitted += [request.request_id for request in draft.admitted]
        self.copied += draft.copies
        if draft.swap_outs or draft.swap_ins:
            self.swapped_out += draft.swap_outs
            self.swapped_in += draft.swap_ins
            self.to_cpu += draft.to_cpu
            self.from_cpu += draft.from_cpu

    def note_forks(self, forks: list[Fork]) -> None:
        """Sequences that go on as copies of others."""
        for fork in forks:
            child = fork.child
            if fork.released is not None:
                self.released.append((child.request_id, fork.released))
            if fork.started:
                self.admitted.append(child.request_id)
            self.forked.append((child.request_id, fork.source.request_id, fork.shared))

    def entry(self, step: int, scheduled: list[tuple[str, int, list[int]]]) -> dict[str, object]:
        """The log entry of `step`; keys and order are those of the decision-log format, with `forked`, `saved`, `loaded` and `to_cpu`
        when something was.
        """
        forked = [(child, source) for child, source, _ in self.forked]
        to_cpu = [move.request_id for move in self.to_cpu]
        seldom = {"forked": forked, "saved": self.saved, "loaded": self.loaded, "to_cpu": to_cpu}
        return {
            "step": step,
            "scheduled": scheduled,
            "preempted": self.preempted,
            "swapped_out": self.swapped_out,
            "swapped_in": self.swapped_in,
            "copied": self.copied,
            "released": self.released,
            "admitted": self.admitted,
            "rejected": self.rejected,
            "ladder": self.ladder,
            **{what: decisions for what, decisions in seldom.items() if decisions},
        }

    @property
    def any(self) -> bool:
        """Whether anything is waiting to be logged."""
        return bool(
            self.preempted
            or self.swapped_out
            or self.swapped_in
            or self.copied
            or self.forked
            or self.released
            or self.admitted
            or self.rejected
            or self.ladder
        )
