"""What every allocator can be asked, and the measures that compare them.

Three sizes are kept apart: **requested** (what the program asked for), **allocated** (what was set aside for it, after
rounding) and **reserved** (what the allocator holds, whether or not anybody uses it).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .events import DEFAULT_POOL, PoolId


class UnknownAllocationError(RuntimeError):
    """Something was done to an allocation that is not alive: given back twice, or never made."""

    def __init__(self, allocation_id: str, what: str) -> None:
        super().__init__(
            f"allocation {allocation_id!r} is not alive and cannot be {what}: it was never made, or was given back"
        )
        self.allocation_id = allocation_id


class DuplicateAllocationError(RuntimeError):
    """An id was allocated while an allocation of that name was alive."""

    def __init__(self, allocation_id: str) -> None:
        super().__init__(f"allocation {allocation_id!r} is alive already")
        self.allocation_id = allocation_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where an allocation was put: `[address, address + size_bytes)`."""

    address: int
    """First byte. For a paged pool, that of the first block."""
    size_bytes: int
    """Bytes set aside, at least those requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRoom:
    """An allocation did not fit; the numbers say why."""

    tried_bytes: int
    """Bytes the allocator tried to find, after its rounding."""
    free_bytes: int
    """Bytes it held that nobody used."""
    largest_free_bytes: int
    """The largest request those could have served."""
    device_free_bytes: int
    """Bytes of the device that nobody held."""
    message: str
    """The same in words."""

    @property
    def is_fragmentation(self) -> bool:
        """Enough bytes were free, but not in one piece."""
        return self.free_bytes + self.device_free_bytes >= self.tried_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryState:
    """An allocator's memory at one moment, in bytes."""

    requested_bytes: int
    """Asked for by the allocations that are alive."""
    allocated_bytes: int
    """Set aside for them."""
    reserved_bytes: int
    """Held by the allocator."""
    free_bytes: int
    """Held, and available to the next allocation."""
    largest_free_bytes: int
    """The largest request that what is held could serve."""
    pending_bytes: int = 0
    """Given back, but not available yet: a stream may still use it."""
    device_free_bytes: int = 0
    """Not held by anybody: an allocator that grows could still take it."""

    @property
    def external_fragmentation(self) -> float:
        """`1 − largest free / Σ free`: the share of the free bytes that one large request could not have; 0 if none is free."""
        return 1.0 - self.largest_free_bytes / self.free_bytes if self.free_bytes else 0.0

    @property
    def internal_fragmentation(self) -> float:
        """`1 − requested / allocated`: the share of what was set aside that nobody asked for; 0 if nothing is allocated."""
        return 1.0 - self.requested_bytes / self.allocated_bytes if self.allocated_bytes else 0.0


class Allocator(Protocol):
    """What a replay needs of an allocator.

    A failed allocation is a value and changes nothing that is alive; misuse raises `UnknownAllocationError` or
    `DuplicateAllocationError`.
    """

    def advance(self, time_s: float) -> None:
        """It is now `time_s`. For records only: no allocator decides by the clock."""

    def allocate(
        self, allocation_id: str, size_bytes: int, *, stream: int = 0, pool: PoolId = DEFAULT_POOL, tag: str = ""
    ) -> Placement | NoRoom:
        """Set at least `size_bytes` aside under `allocation_id`, or say why not."""

    def free(self, allocation_id: str) -> None:
        """Give an allocation back."""

    def request_free(self, allocation_id: str) -> None:
        """Give an allocation back that somebody may still read, until `complete_free`."""

    def complete_free(self, allocation_id: str) -> None:
        """The last reader of an allocation given back by `request_free` is done."""

    def record_stream(self, allocation_id: str, stream: int) -> None:
        """An allocation is also used by another stream."""

    def stream_done(self, stream: int) -> None:
        """All work queued on `stream` so far has finished."""

    def empty_cache(self) -> None:
        """Return to the device what is held and not used."""

    def state(self) -> MemoryState:
        """The memory now."""


def round_up(value: int, grain: int) -> int:
    """The smallest multiple of `grain` that is not below `value`."""
    return -(-value // grain) * grain
