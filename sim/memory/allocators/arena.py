"""An arena: a fixed range of memory, taken from the device once, and the books that all allocators inside it share."""

from __future__ import annotations

from abc import ABC, abstractmethod

from .base import DuplicateAllocationError, MemoryState, NoRoom, Placement, UnknownAllocationError
from .events import DEFAULT_POOL, PoolId


class _NoDevice:
    """The parts of the protocol that make no difference to memory taken from the device once."""

    def advance(self, time_s: float) -> None:
        """An arena keeps no record of time."""

    def stream_done(self, stream: int) -> None:
        """Nothing waits for a stream here."""

    def empty_cache(self) -> None:
        """An arena is held until the end."""


class ArenaAllocator(_NoDevice, ABC):
    """An allocator of the bytes `[0, capacity_bytes)`. A subclass decides where things go; the books are kept here.

    It knows no streams: memory that a stream may still read is kept until `complete_free`, and `record_stream` is refused,
    because without an event nobody could tell when the other stream is done.
    """

    name = "arena"

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 1:
            raise ValueError(f"an arena needs at least one byte, not {capacity_bytes}")
        self.capacity_bytes = capacity_bytes
        self._alive: dict[str, tuple[Placement, int]] = {}  # id -> placement, bytes requested
        self._closing: dict[str, Placement] = {}  # given back, but somebody may still read it
        self._requested_bytes = 0
        self._allocated_bytes = 0
        self._pending_bytes = 0

    # -- what a subclass decides ----------------------------------------------------------------------------------

    @abstractmethod
    def _size_for(self, size_bytes: int) -> int:
        """Bytes to set aside for a request of `size_bytes`."""

    @abstractmethod
    def _take(self, size_bytes: int, allocation_id: str) -> int | None:
        """Take `size_bytes` (as `_size_for` gave) and return the address, or None, changing nothing."""

    @abstractmethod
    def _give_back(self, placement: Placement, allocation_id: str) -> None:
        """Make a placement available again."""

    @abstractmethod
    def _largest_free_bytes(self) -> int:
        """The largest request that would fit now."""

    # -- the protocol ---------------------------------------------------------------------------------------------

    def allocate(
        self, allocation_id: str, size_bytes: int, *, stream: int = 0, pool: PoolId = DEFAULT_POOL, tag: str = ""
    ) -> Placement | NoRoom:
        """Set memory aside; stream, pool and tag make no difference here.

        Raises ValueError for less than one byte and DuplicateAllocationError for an id that is alive.
        """
        if size_bytes < 1:
            raise ValueError(f"allocation {allocation_id!r} asks for {size_bytes} bytes; at least 1 can be asked for")
        if allocation_id in self._alive or allocation_id in self._closing:
            raise DuplicateAllocationError(allocation_id)
        wanted = self._size_for(size_bytes)
        address = self._take(wanted, allocation_id)
        if address is None:
            return self._no_room(allocation_id, size_bytes, wanted)
        placement = Placement(address=address, size_bytes=wanted)
        self._alive[allocation_id] = (placement, size_bytes)
        self._requested_bytes += size_bytes
        self._allocated_bytes += wanted
        return placement

    def free(self, allocation_id: str) -> None:
        """Give an allocation back. Raises UnknownAllocationError if it is not alive."""
        self._give_back(self._leave(allocation_id), allocation_id)

    def request_free(self, allocation_id: str) -> None:
        """Give an allocation back, but keep its bytes from others until `complete_free`."""
        placement = self._leave(allocation_id)
        self._closing[allocation_id] = placement
        self._pending_bytes += placement.size_bytes

    def complete_free(self, allocation_id: str) -> None:
        """The bytes of an allocation given back by `request_free` are available now."""
        placement = self._closing.pop(allocation_id, None)
        if placement is None:
            raise UnknownAllocationError(allocation_id, "completed")
        self._pending_bytes -= placement.size_bytes
        self._give_back(placement, allocation_id)

    def record_stream(self, allocation_id: str, stream: int) -> None:
        """Always raises NotImplementedError: an arena has no events to wait for."""
        raise NotImplementedError(
            f"{self.name} knows no streams: it cannot tell when stream {stream} is done with {allocation_id!r}; "
            "use free_requested and free_completed"
        )

    def state(self) -> MemoryState:
        """The memory now; all of the arena counts as reserved."""
        return MemoryState(
            requested_bytes=self._requested_bytes,
            allocated_bytes=self._allocated_bytes,
            reserved_bytes=self.capacity_bytes,
            free_bytes=self.capacity_bytes - self._allocated_bytes - self._pending_bytes,
            largest_free_bytes=self._largest_free_bytes(),
            pending_bytes=self._pending_bytes,
        )

    # -- inside ---------------------------------------------------------------------------------------------------

    def _leave(self, allocation_id: str) -> Placement:
        held = self._alive.pop(allocation_id, None)
        if held is None:
            raise UnknownAllocationError(allocation_id, "given back")
        placement, requested = held
        self._requested_bytes -= requested
        self._allocated_bytes -= placement.size_bytes
        return placement

    def _no_room(self, allocation_id: str, size_bytes: int, wanted: int) -> NoRoom:
        free = self.capacity_bytes - self._allocated_bytes - self._pending_bytes
        largest = self._largest_free_bytes()
        return NoRoom(
            tried_bytes=wanted,
            free_bytes=free,
            largest_free_bytes=largest,
            device_free_bytes=0,
            message=f"{self.name}: {allocation_id!r} asks for {size_bytes} B and needs {wanted} B; {free} B of "
            f"{self.capacity_bytes} B are free, the largest piece has {largest} B, {self._pending_bytes} B wait for a reader",
        )
