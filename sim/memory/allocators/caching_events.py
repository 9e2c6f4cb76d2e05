"""PyTorch's caching allocator, pending frees: blocks given back while another stream may still read them.

At the free, an event is recorded on each stream that used the block. The block returns to its pool when all of its events
have passed **and** the allocator has looked: at the next allocation, or when it waits for all of them before it gives up.
**Source:** `record_stream`, `insert_events`, `process_events` and `synchronize_and_free_events` of
c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.5 to 2.13 (one queue for each stream; up to 2.0 one queue for all, #71616).
"""

from __future__ import annotations

from .base import UnknownAllocationError
from .caching_blocks import Block
from .caching_state import CachingState


class PendingFrees:
    """The events that given back blocks wait for, and which of them have passed."""

    def __init__(self, state: CachingState) -> None:
        self._state = state
        self._queues: dict[int, list[Block]] = {}  # stream -> blocks with an outstanding event there, oldest first
        self._passed: dict[int, int] = {}  # stream -> how many of its events have passed, from the oldest on
        self._observed: dict[str, Block] = {}  # id -> block whose events are known by their end only
        self._ended_early: set[str] = set()  # ids whose wait was cut short by a synchronisation

    def add(self, block: Block) -> None:
        """A block was given back: record an event on each stream that used it."""
        for stream in sorted(block.stream_uses):
            block.event_count += 1
            self._queues.setdefault(stream, []).append(block)
        block.stream_uses.clear()

    def add_observed(self, allocation_id: str, block: Block) -> None:
        """A block was given back that is known to wait, until `observed`."""
        block.event_count += 1
        self._observed[allocation_id] = block

    def observed(self, allocation_id: str) -> None:
        """The wait of a block is over.

        Raises UnknownAllocationError if it was not waiting and its wait was not cut short either.
        """
        block = self._observed.pop(allocation_id, None)
        if block is not None:
            self._passed_one(block)
        elif allocation_id in self._ended_early:
            self._ended_early.discard(allocation_id)
        else:
            raise UnknownAllocationError(allocation_id, "completed")

    def is_waiting(self, allocation_id: str) -> bool:
        """Whether an allocation given back by its two halves still waits."""
        return allocation_id in self._observed

    def stream_done(self, stream: int) -> None:
        """All events recorded on a stream so far have passed. Nobody has looked yet."""
        if self._queues.get(stream):
            self._passed[stream] = len(self._queues[stream])

    def process(self) -> None:
        """Look at the events, as each allocation does first: blocks all of whose events have passed become free."""
        for stream in sorted(self._passed):
            queue = self._queues[stream]
            passed = self._passed.pop(stream)
            for block in queue[:passed]:
                self._passed_one(block)
            del queue[:passed]

    def synchronize(self) -> None:
        """Wait for every event: all blocks given back become free."""
        self._state.stats.num_sync_all_streams += 1
        self._passed = {stream: len(queue) for stream, queue in self._queues.items()}
        self.process()
        for allocation_id, block in self._observed.items():
            self._ended_early.add(allocation_id)
            self._passed_one(block)
        self._observed.clear()

    def _passed_one(self, block: Block) -> None:
        block.event_count -= 1
        if block.event_count == 0:
            self._state.return_block(block)
