"""Job: one stage under way: what it was asked, how long it may take, what it has found out so far."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sim.results.files import write_json


class SkippedError(Exception):
    """A stage that has nothing to do on this device; the message says why."""


@dataclass(slots=True, kw_only=True)
class Job:
    """Written down after every finding, so that what is known is known even when the stage does not end."""

    device: str
    """`cpu`, `cuda` or `cuda:N`."""
    out: Path
    """Where the findings go."""
    limit_s: float
    small: bool = False
    """Whether only the run itself is tried, with the smallest sizes."""
    facts: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    """Bars that were not met."""
    skipped: str = ""
    finished: bool = False
    started_s: float = field(default_factory=time.perf_counter)

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.limit_s - (time.perf_counter() - self.started_s)

    @property
    def cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.startswith("cuda")

    def note(self, **facts: Any) -> None:
        """Something was found out."""
        self.facts.update(facts)
        self.write()

    def fail(self, *bars: str) -> None:
        """Bars were not met."""
        self.failures += bars
        self.write()

    def write(self) -> None:
        """Write down what is known."""
        document = {
            "device": self.device,
            "small": self.small,
            "finished": self.finished,
            "seconds": round(time.perf_counter() - self.started_s, 1),
            "failures": self.failures,
            "skipped": self.skipped,
            "facts": self.facts,
        }
        write_json(self.out, document)
