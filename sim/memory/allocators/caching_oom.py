"""PyTorch's caching allocator, failing: the out-of-memory error in PyTorch's own words.

**Source:** `DeviceCachingAllocator::malloc` and `format_size` of c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.5 to 2.13.
"""

from __future__ import annotations

from .base import NoRoom
from .caching_blocks import DeviceMemory
from .caching_sizes import segment_size
from .caching_state import CachingState
from .events import DEFAULT_POOL, PoolId

HINT = (
    "If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
    "fragmentation.  See documentation for Memory Management  "
    "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
"""Printed whatever the cause is, even if the setting is on already."""


def format_size(size_bytes: int) -> str:
    """A size as PyTorch prints it: two decimals from KiB on.

    >>> format_size(20 << 20)
    '20.00 MiB'
    """
    if size_bytes <= 1024:
        return f"{size_bytes} bytes"
    if size_bytes <= 1 << 20:
        return f"{size_bytes / (1 << 10):.2f} KiB"
    if size_bytes <= 1 << 30:
        return f"{size_bytes / (1 << 20):.2f} MiB"
    return f"{size_bytes / (1 << 30):.2f} GiB"


def out_of_memory(state: CachingState, stream: int, size: int, pool_id: PoolId, tag: str) -> NoRoom:
    """Count and record a failed allocation of `size` rounded bytes and say why it failed.

    `tried_bytes` is the size of the segment asked for, as in the message: not the tensor's.
    """
    state.stats.num_ooms += 1
    state.record("oom", state.device_free_bytes, size, stream=stream, pool_id=pool_id, tag=tag)
    pools = list(state.pools.values())
    return NoRoom(
        tried_bytes=segment_size(size, state.settings),
        free_bytes=sum(pool.free_bytes for pool in pools),
        largest_free_bytes=max(pool.largest_bytes for pool in pools),
        device_free_bytes=state.device_free_bytes,
        message=_message(state, segment_size(size, state.settings)),
    )


def _message(state: CachingState, tried: int) -> str:
    memory = state.memory
    allocated = state.stats.current("allocated_bytes")
    private = sum(pool.free_bytes for pool in state.pools.values() if pool.pool_id != DEFAULT_POOL)
    allowed = state.allowed_bytes
    parts = [
        f"CUDA out of memory. Tried to allocate {format_size(tried)}.",
        f"GPU {memory.index} has a total capacity of {format_size(memory.total_bytes)} of which "
        f"{format_size(state.device_free_bytes)} is free.",
        *_processes(memory, state.reserved_bytes),
        *([f"{format_size(allowed)} allowed;"] if allowed is not None else []),
        f"Of the allocated memory {format_size(allocated + private)} is allocated by PyTorch,",
        *([f"with {format_size(private)} allocated in private pools (e.g., CUDA Graphs),"] if private else []),
        f"and {format_size(state.reserved_bytes - allocated - private)} is reserved by PyTorch but unallocated.",
        HINT,
    ]
    return " ".join(parts)


def _processes(memory: DeviceMemory, reserved_bytes: int) -> list[str]:
    if not memory.shows_processes:
        return []
    own = memory.non_torch_bytes + reserved_bytes
    return [
        *(f"Process {process} has {format_size(held)} memory in use." for process, held in memory.other_processes),
        f"Including non-PyTorch memory, this process has {format_size(own)} memory in use.",
    ]
