"""A case: everything that was read from the files of one failure, and what rules say about it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .allocator_runs import AllocatorRuns
from .curve import Curve
from .curve_facts import CurveFacts
from .diagnosis import Cause, Phase
from .engine_log import EngineLog
from .failures import Failure
from .known import Known
from .log_load import LogLoad
from .oom_message import OomMessage
from .phases import Mark
from .request_log import RequestLog
from .sizes import GIB
from .snapshot import SnapshotFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is known of one failure."""

    known: Known
    """Settings and shapes."""
    text: str = ""
    """All text files together, hints of out-of-memory messages cut out."""
    oom: OomMessage | None = None
    """The first complete message of PyTorch's allocator."""
    num_messages: int = 0
    """How many there are."""
    failures: tuple[Failure, ...] = ()
    """Other known failure texts."""
    mark: Mark | None = None
    """The strongest sign of the phase."""
    log: EngineLog | None = None
    curve: Curve | None = None
    curve_facts: CurveFacts | None = None
    requests: RequestLog | None = None
    snapshot: SnapshotFacts | None = None
    allocator: AllocatorRuns | None = None
    """The snapshot's history, replayed under its own and other settings."""
    load: LogLoad | None = None
    """What was served at the failure, by the log."""

    @property
    def phase(self) -> Phase:
        """What texts say about the phase: the failure's own word, then the mark."""
        for failure in self.failures:
            if failure.kind.phase not in (Phase.UNKNOWN, Phase.SERVING):
                return failure.kind.phase
        if self.mark is not None:
            return self.mark.phase
        return Phase.SERVING if any(failure.kind.phase is Phase.SERVING for failure in self.failures) else Phase.UNKNOWN

    @property
    def total_bytes(self) -> float | None:
        """Physical memory of the GPU: by the message, the log, the curve, or the catalogue."""
        if self.oom and self.oom.total:
            return self.oom.total.bytes
        if self.log and "total_gib" in self.log.account:
            return self.log.account["total_gib"] * GIB
        if self.curve and self.curve.total_bytes:
            return self.curve.total_bytes
        return float(self.known.gpu.total_bytes) if self.known.gpu else None

    @property
    def shortage_bytes(self) -> float | None:
        """What was missing: tried less free; None without both."""
        if self.oom is None or self.oom.tried is None or self.oom.free is None:
            return None
        return self.oom.tried.bytes - self.oom.free.bytes

    @property
    def speaks_of_oom(self) -> bool:
        """The text says in words that memory ran out."""
        return bool(re.search(r"\bOOM\b|out of memory|OutOfMemory|not enough memory", self.text, re.IGNORECASE))

    def says(self, pattern: str) -> str:
        """The first match of `pattern` in the text, empty when there is none."""
        match = re.search(pattern, self.text, re.IGNORECASE)
        return " ".join(match[0].split()) if match else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One explanation."""

    cause: Cause
    score: float
    """0 to 1: how sure this rule is, taken by itself."""
    detail: str = ""
    evidence: tuple[str, ...] = ()
    phase: Phase = Phase.UNKNOWN
    """Where this cause puts the failure, used only when nothing else says."""
    phase_why: str = ""
    """Why there; may be empty."""
    effect_bytes: float | None = None
    """What mending it would give back, where the evidence says."""
    record: tuple[str, ...] = ()
    """What to record to be surer of this explanation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Excluded:
    """An explanation that the evidence speaks against."""

    cause: Cause
    why: str


Verdict = Candidate | Excluded
