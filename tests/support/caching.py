"""A modelled caching allocator on a small device, and what it holds."""

from sim.memory.allocators import CachingAllocator, DeviceMemory

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def device(total=GIB, settings=None, **memory):
    return CachingAllocator(DeviceMemory(total_bytes=total, **memory), settings)


def held(allocator):
    """(reserved, allocated, active) in bytes."""
    stats = allocator.memory_stats()
    return tuple(stats[f"{name}_bytes.all.current"] for name in ("reserved", "allocated", "active"))


def layout(allocator):
    """Each segment as the (size, state) of its blocks."""
    return [
        [(block["size"], block["state"]) for block in segment["blocks"]] for segment in allocator.snapshot()["segments"]
    ]


A, P, F = "active_allocated", "active_pending_free", "inactive"
