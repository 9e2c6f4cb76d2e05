"""The same run under every way of holding its KV cache, side by side: "why paged" as numbers and a plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .base import Allocator
from .buddy import Buddy
from .caching import CachingAllocator
from .caching_blocks import DeviceMemory
from .fitting import BestFit, Contiguous
from .kv_log import KvScheme, KvSpan, kv_log
from .paged import PagedPool
from .replay import OnFailure, Replay, replay


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One way of holding the KV cache, and what became of the run under it."""

    name: str
    """Scheme and allocator."""
    scheme: KvScheme
    """How the run became a log."""
    capacity_bytes: int
    """Memory for KV."""
    requests_served: int
    """Requests whose memory was there from start to end."""
    requests_dropped: int
    """Requests of which an allocation did not fit; they gave back what they had."""
    replay: Replay
    """The time series."""

    @property
    def best_use(self) -> float:
        """The highest share of the memory that held keys and values at one moment."""
        return self.replay.peak_used_bytes / self.capacity_bytes

    @property
    def fragmentation_failures(self) -> int:
        """Allocations that failed although enough bytes were free, but not in one piece."""
        return sum(failure.no_room.is_fragmentation for failure in self.replay.failures)


def compare_holdings(
    spans: Sequence[KvSpan],
    capacity_bytes: int,
    *,
    bytes_per_token: int,
    block_size: int = 16,
    on_failure: OnFailure = "drop_tag",
) -> list[Holding]:
    """Replay one run under each scheme, on the same number of bytes.

    By default a request whose next allocation does not fit is dropped, so more dropped requests mean less load that fits.
    """
    block_bytes = block_size * bytes_per_token
    grain = bytes_per_token
    ways: list[tuple[str, KvScheme, Callable[[], Allocator]]] = [
        ("worst-case reservation", "contiguous_max", lambda: Contiguous(capacity_bytes, grain_bytes=grain)),
        ("exact reservation", "contiguous_exact", lambda: Contiguous(capacity_bytes, grain_bytes=grain)),
        ("worst case, buddy", "contiguous_max", lambda: Buddy(capacity_bytes)),
        ("grow and copy, best fit", "realloc_copy", lambda: BestFit(capacity_bytes, grain_bytes=grain)),
        (
            "grow and copy, PyTorch's allocator",
            "realloc_copy",
            lambda: CachingAllocator(DeviceMemory(total_bytes=capacity_bytes)),
        ),
        ("paged", "paged", lambda: PagedPool(capacity_bytes, block_bytes=block_bytes)),
    ]
    holdings = []
    for name, scheme, make in ways:
        log = kv_log(spans, scheme, bytes_per_token=bytes_per_token, block_size=block_size)
        result = replay(log, make(), on_failure=on_failure)
        dropped = len({failure.event.tag for failure in result.failures})
        holdings.append(
            Holding(
                name=name, scheme=scheme, capacity_bytes=capacity_bytes, requests_served=len(spans) - dropped,
                requests_dropped=dropped, replay=result,
            )
        )  # fmt: skip
    return holdings
