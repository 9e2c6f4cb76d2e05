"""What a diagnosis says: the phases, the causes, the verdict with its evidence, and its JSON document."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Phase(StrEnum):
    """What the engine was doing when memory ran out. The unspecific ones are said where the finer one is not in the evidence."""

    LOADING = "loading"
    PROFILING = "profiling"
    GRAPH_CAPTURE = "graph capture"
    SAMPLER_WARM_UP = "sampler warm-up"
    START_UP = "start-up"
    PREFILL = "prefill"
    DECODE = "decode"
    SAMPLING = "sampling"
    COMMUNICATION = "communication"
    AFTER_RELEASE = "after release"
    SERVING = "serving"
    UNKNOWN = "unknown"

    @property
    def is_start_up(self) -> bool:
        """Before the first request."""
        return self in _START_UP


_START_UP = frozenset({Phase.LOADING, Phase.PROFILING, Phase.GRAPH_CAPTURE, Phase.SAMPLER_WARM_UP, Phase.START_UP})


class Cause(StrEnum):
    """Why memory ran out, or why work did not proceed as if it had."""

    KV_CAPACITY = "KV capacity"
    TRANSIENT_PEAK = "transient peak"
    KERNEL_FALLBACK = "kernel fallback"
    WEIGHTS = "weights"
    CUDA_GRAPHS = "CUDA graphs"
    FRAGMENTATION = "fragmentation"
    PENDING_FREES = "pending frees"
    NON_TORCH = "non-torch growth"
    OTHER_PROCESS = "another process"
    LEAK = "leak"
    DOUBLE_RELEASE = "double release"
    BUDGET = "budget too high"
    RESERVED_ONLY = "reserved by the allocator only"
    KV_DUPLICATION = "KV duplication"
    LATE_RELEASE = "late release"
    BLOCK_USE = "poor block use"
    RESERVATION = "reservation-bound"
    BLOCKED = "scheduler blocked"
    KERNEL_LIMIT = "kernel resource limit"
    HOST_MEMORY = "host memory"
    UNKNOWN = "cannot tell from this"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """One change and what it is predicted to do."""

    change: str
    """The flag to set, as it is typed, or the one thing to do."""
    effect_gib: float | None = None
    """GiB it returns to what ran out; None where that cannot be computed from what is known."""
    effect_tokens: int | None = None
    """Change of the KV pool in tokens (negative: the pool shrinks); None where it cannot be computed."""
    basis: str = ""
    """The numbers behind the prediction, or why there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileVerdict:
    """What one file says by itself."""

    file: str
    phase: Phase
    cause: str
    """With its detail."""
    confidence: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The verdict over all files together."""

    phase: Phase
    """What was being done."""
    cause: Cause
    """The most likely cause."""
    detail: str = ""
    """The operation of a transient peak, or another word that narrows the cause; may be empty."""
    confidence: float
    """0 to 1. 0 with `Cause.UNKNOWN`."""
    evidence: tuple[str, ...] = ()
    """Sentences with the numbers that speak for the verdict."""
    ruled_out: tuple[str, ...] = ()
    """`cause: why not`, one sentence each."""
    fixes: tuple[Fix, ...] = ()
    """What to change, the most effective first."""
    next_to_record: tuple[str, ...] = ()
    """What to record so that the next failure can be told apart from its neighbours."""
    by_file: tuple[FileVerdict, ...] = ()
    """What each file says by itself, where there are several of a kind."""
    notes: tuple[str, ...] = ()
    """What a reader must know: files that were not understood, a model that is not in the catalogue."""

    @property
    def headline(self) -> str:
        """Cause with its detail, e.g. `transient peak: logits in float32`."""
        return f"{self.cause}: {self.detail}" if self.detail else str(self.cause)

    def as_document(self) -> dict[str, Any]:
        """The JSON document of `kvtwin diagnose --json`. `category` is the cause without its detail."""
        return {
            "phase": str(self.phase),
            "cause": self.headline,
            "category": str(self.cause),
            "confidence": round(self.confidence, 3),
            "evidence": list(self.evidence),
            "ruled_out": list(self.ruled_out),
            "fixes": [
                {
                    "change": fix.change,
                    "effect_gib": None if fix.effect_gib is None else round(fix.effect_gib, 4),
                    "effect_tokens": fix.effect_tokens,
                    "basis": fix.basis,
                }
                for fix in self.fixes
            ],
            "next_to_record": list(self.next_to_record),
            "by_file": [
                {
                    "file": one.file,
                    "phase": str(one.phase),
                    "cause": one.cause,
                    "confidence": round(one.confidence, 3),
                }
                for one in self.by_file
            ],
            "notes": list(self.notes),
        }
