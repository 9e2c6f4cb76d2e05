"""What the PyTorch caching allocator makes of a request: requested, allocated and reserved bytes are three different things.

**Source:** c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.x, default settings.
"""

from __future__ import annotations

MIB = 1 << 20
GRAIN_BYTES = 512
"""Every request is rounded up to a multiple of this."""
SEGMENT_GRAIN_BYTES = 2 * MIB
"""A large request gets a segment of its own, a multiple of this."""
SHARED_SEGMENT_BYTES = 20 * MIB
"""Requests above 1 MiB and below 10 MiB are cut from segments of this size."""


def allocated_bytes(requested: int) -> int:
    """Bytes that `torch.cuda.memory_allocated` grows by for a tensor of `requested` bytes in a fresh segment.

    A tensor of 10 MiB or more gets its own segment; what is left over at its end is split off only when it is more than
    1 MiB, and belongs to the tensor otherwise. Smaller tensors share segments and are rounded to 512 bytes.

    >>> allocated_bytes(int(31.5 * MIB)) / MIB
    32.0
    """
    rounded = -(-requested // GRAIN_BYTES) * GRAIN_BYTES
    if rounded < 10 * MIB:
        return rounded
    segment = -(-rounded // SEGMENT_GRAIN_BYTES) * SEGMENT_GRAIN_BYTES
    return segment if segment - rounded <= MIB else rounded


def reserved_bytes(requested: int) -> int:
    """Bytes of the segment that a lone tensor of `requested` bytes makes the allocator take from the device.

    >>> reserved_bytes(1), reserved_bytes(2 * MIB) // MIB, reserved_bytes(11 * MIB) // MIB
    (2097152, 20, 12)
    """
    if requested == 0:
        return 0
    if requested <= MIB:
        return SEGMENT_GRAIN_BYTES
    if requested < 10 * MIB:
        return SHARED_SEGMENT_BYTES
    return -(-requested // SEGMENT_GRAIN_BYTES) * SEGMENT_GRAIN_BYTES
