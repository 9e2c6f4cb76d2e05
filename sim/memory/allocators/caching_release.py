"""PyTorch's caching allocator, giving memory back to the device: three ways, from gentle to thorough.

**Source:** c10/cuda/CUDACachingAllocator.cpp (`garbage_collect_cached_blocks`, `release_available_cached_blocks`,
`release_blocks`), PyTorch 2.5 to 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable

from .caching_blocks import BlockPool
from .caching_expandable import unmap
from .caching_state import CachingState
from .events import DEFAULT_POOL


def collect_garbage(state: CachingState) -> None:
    """Return whole cached segments of the large pool, those unused for longest first, once more than the threshold is reserved.

    Age is counted in searches of the pool. Each round frees all that are of average age or older, until enough is freed.
    """
    allowed = state.allowed_bytes
    if allowed is None:
        return
    threshold = int(state.settings.garbage_collection_threshold * allowed)
    target = state.reserved_bytes - threshold
    if target <= 0:
        return
    pool = state.pool(DEFAULT_POOL, small=False)
    candidates = [block for block in pool if not block.is_split and block.virtual is None]
    reclaimed = 0
    while reclaimed < target and candidates:
        average = sum(pool.searches - block.gc_base for block in candidates) / len(candidates)
        old = [block for block in candidates if pool.searches - block.gc_base >= average]
        for block in old:
            reclaimed += block.size
            state.free_segment(block)
        candidates = [block for block in candidates if block not in old]


def release_oversize(state: CachingState, pool: BlockPool, stream: int, size: int) -> bool:
    """With `max_split_size`: return just enough oversize cached segments for a request; whether enough was returned."""
    limit = state.settings.max_split_size_bytes
    if limit is None:
        return False
    wanted = max(limit, size)
    block = pool.best_fit(stream, wanted)
    if block is not None and block.virtual is None:
        state.free_segment(block)
        return True
    released = 0
    for block in pool.descending(stream):
        if released >= wanted or block.size < limit or block.virtual is not None:
            break
        released += block.size
        state.free_segment(block)
    return released >= wanted


def release_cached(state: CachingState, pools: Iterable[BlockPool]) -> None:
    """Return every segment that is one free block, and every page of expandable segments that nobody uses."""
    for pool in pools:
        expandable = []
        for block in pool:
            if block.virtual is not None:
                expandable.append(block)  # unmapping changes the pool: gather first
            elif not block.is_split:
                state.free_segment(block)
        for block in expandable:
            unmap(state, block)
