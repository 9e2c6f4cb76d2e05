"""PyTorch's caching allocator, sizes: how a request is rounded, and how large a segment it asks the device for.

**Source:** c10/cuda/CUDACachingAllocator.cpp (`round_size`, `get_allocation_size`, `should_split`) and
c10/core/AllocatorConfig.h, PyTorch 2.5 to 2.13.
"""

from __future__ import annotations

from .base import round_up
from .caching_settings import CachingSettings

MIB = 1 << 20
MIN_BLOCK_BYTES = 512
"""Every size is a multiple of this, and no smaller rest is split off."""
SMALL_LIMIT_BYTES = MIB
"""The largest request of the small pool; a large block is split only if more than this is left."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""Segments of the small pool, and the pages of its expandable segments."""
MIN_LARGE_BYTES = 10 * MIB
"""Requests of this size and more get a segment of their own."""
LARGE_GRAIN_BYTES = 2 * MIB
"""A segment of its own is a multiple of this."""


def round_size(size_bytes: int, settings: CachingSettings) -> int:
    """The size of the block that a request of `size_bytes` is looked up by.

    >>> round_size(1, CachingSettings())
    512
    """
    if size_bytes < MIN_BLOCK_BYTES:
        return MIN_BLOCK_BYTES
    divisions = settings.divisions_for(size_bytes)
    if divisions > 1 and size_bytes > MIN_BLOCK_BYTES * divisions:
        return _round_to_division(size_bytes, divisions)
    return round_up(size_bytes, MIN_BLOCK_BYTES)


def _round_to_division(size_bytes: int, divisions: int) -> int:
    """The next of the `divisions` equal steps between two powers of two: with 4, 1200 is rounded to 1280."""
    floor = 1 << (size_bytes.bit_length() - 1)
    step = floor >> (divisions.bit_length() - 1)
    if size_bytes == floor:
        return size_bytes
    if step == 0:
        return floor << 1
    return round_up(size_bytes, step)


def is_small(rounded_bytes: int) -> bool:
    """Whether a rounded request belongs to the small pool."""
    return rounded_bytes <= SMALL_LIMIT_BYTES


def segment_size(rounded_bytes: int, settings: CachingSettings) -> int:
    """Bytes asked of the device for a rounded request that no cached block serves; the size an OOM message names."""
    if is_small(rounded_bytes):
        return SMALL_SEGMENT_BYTES
    if rounded_bytes < MIN_LARGE_BYTES:
        return settings.large_segment_size_bytes
    return round_up(rounded_bytes, LARGE_GRAIN_BYTES)


def should_split(block_bytes: int, rounded_bytes: int, *, small: bool, settings: CachingSettings) -> bool:
    """Whether the rest of a block becomes a block of its own, or stays with the request."""
    rest = block_bytes - rounded_bytes
    if small or settings.expandable_segments:
        return rest >= MIN_BLOCK_BYTES
    unlimited = settings.max_split_size_bytes is None
    return (unlimited or rounded_bytes < (settings.max_split_size_bytes or 0)) and rest > SMALL_LIMIT_BYTES
