"""The smallest unit of the account: one named use of memory, as it was asked for and as it was given."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .rounding import allocated_bytes, reserved_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One use of memory by one operator or one part of the software stack."""

    name: str
    """What the memory is for."""
    requested_bytes: int
    """Bytes asked for."""
    formula: str
    """The formula with its numbers."""
    is_tensor: bool = True
    """True when PyTorch's allocator serves it, and rounds it; False for what the driver gives directly."""

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the block it is served with; what the account adds up."""
        return allocated_bytes(self.requested_bytes) if self.is_tensor else self.requested_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the segment a lone tensor of this size would hold."""
        return reserved_bytes(self.requested_bytes) if self.is_tensor else self.requested_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """One candidate for the peak of temporary memory: a phase of a step, and everything alive at its widest point."""

    phase: str
    """`prefill`, `decode`, `encoder`, `logits`, `sampler`, `prompt_logprobs` or `verification`."""
    ops: tuple[Op, ...]
    """What is alive at the same time."""
    profiled: bool
    """True when the engine's start-up profile runs it, so that the KV pool leaves room for it."""

    @property
    def bytes(self) -> int:
        """Allocated bytes alive at the peak."""
        return total(self.ops)

    @property
    def reserved_bytes(self) -> int:
        """Segments of the tensors above 10 MiB, the others at what they are allocated: they share segments."""
        return sum(op.reserved_bytes if op.requested_bytes >= 10 << 20 else op.allocated_bytes for op in self.ops)

    @property
    def text(self) -> str:
        """All addends, with their numbers."""
        return f"{self.phase}: " + " + ".join(f"{op.name} {op.formula}" for op in self.ops)


def total(ops: Iterable[Op]) -> int:
    """Allocated bytes of all of them."""
    return sum(op.allocated_bytes for op in ops)
