"""A memory failure that is not PyTorch's own message: its text, and what it stands for.

**Source:** texts printed by vLLM, SGLang, TensorRT-LLM, llama.cpp, FlashInfer, Triton, NCCL, cuBLAS and the Linux kernel.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .diagnosis import Cause, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One known text."""

    name: str
    """Short name, used in rules and tests."""
    pattern: re.Pattern[str]
    """With named groups for its numbers."""
    phase: Phase
    """What it says about the phase; UNKNOWN when nothing."""
    cause: Cause
    """The cause it stands for when nothing else is known."""
    detail: str = ""
    """Which operation, where the text says."""
    score: float = 0.6
    """How sure the text alone is."""
    meaning: str
    """In words."""


def kind(
    name: str, pattern: str, phase: Phase, cause: Cause, meaning: str, detail: str = "", score: float = 0.6
) -> Kind:
    """A known text, found whatever its case and across lines."""
    return Kind(
        name=name,
        pattern=re.compile(pattern, re.IGNORECASE | re.DOTALL),
        phase=phase,
        cause=cause,
        detail=detail,
        score=score,
        meaning=meaning,
    )
