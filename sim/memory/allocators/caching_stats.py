"""PyTorch's caching allocator, counters: the numbers of `torch.cuda.memory_stats`, under its names.

**Source:** `DeviceStats` of c10/core/CachingDeviceAllocator.h and torch/cuda/memory.py, PyTorch 2.13.
"""

from __future__ import annotations

from .events import PoolId

ARRAYS = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)
"""Counters kept for `all`, `large_pool` and `small_pool`."""


class Stat:
    """One counter: its value now, its peak, and everything ever added and taken away."""

    __slots__ = ("current", "peak", "allocated", "freed")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def add(self, amount: int) -> None:
        """Increase; a negative amount decreases."""
        self.current += amount
        if amount >= 0:
            self.allocated += amount
            self.peak = max(self.peak, self.current)
        else:
            self.freed -= amount

    def as_dict(self) -> dict[str, int]:
        """The four numbers under PyTorch's names."""
        return {"current": self.current, "peak": self.peak, "allocated": self.allocated, "freed": self.freed}


class DeviceStats:
    """All counters of one device."""

    def __init__(self, max_split_size_bytes: int | None) -> None:
        self._arrays = {name: {pool: Stat() for pool in ("all", "large_pool", "small_pool")} for name in ARRAYS}
        self._private_reserved: dict[PoolId, dict[str, Stat]] = {}
        self.oversize_allocations = Stat()
        self.oversize_segments = Stat()
        self.num_alloc_retries = 0
        self.num_ooms = 0
        self.num_sync_all_streams = 0
        self.num_device_alloc = 0
        self.num_device_free = 0
        # PyTorch keeps "no limit" as the largest size_t and shows it as a signed number.
        self.max_split_size = -1 if max_split_size_bytes is None else max_split_size_bytes

    def add(self, name: str, amount: int, *, small: bool) -> None:
        """Count in `all` and in the pool."""
        array = self._arrays[name]
        array["all"].add(amount)
        array["small_pool" if small else "large_pool"].add(amount)

    def reserve(self, amount: int, *, small: bool, pool_id: PoolId) -> None:
        """Count reserved bytes, in the private pool too if it is one."""
        self.add("reserved_bytes", amount, small=small)
        if pool_id != (0, 0):
            pools = {pool: Stat() for pool in ("all", "large_pool", "small_pool")}
            private = self._private_reserved.setdefault(pool_id, pools)
            private["all"].add(amount)
            private["small_pool" if small else "large_pool"].add(amount)

    def current(self, name: str) -> int:
        """The value of a counter over all pools now."""
        return self._arrays[name]["all"].current

    def peak(self, name: str) -> int:
        """The highest value of a counter over all pools."""
        return self._arrays[name]["all"].peak

    def as_dict(self) -> dict[str, int]:
        """What `torch.cuda.memory_stats()` returns: flat names, sorted."""
        flat: dict[str, int] = {}

        def put(prefix: str, stat: Stat) -> None:
            flat.update({f"{prefix}.{key}": value for key, value in stat.as_dict().items()})

        for name, pools in self._arrays.items():
            for pool, stat in pools.items():
                put(f"{name}.{pool}", stat)
        for (first, second), pools in self._private_reserved.items():
            for pool, stat in pools.items():
                put(f"reserved_bytes_by_private_pools.{first}_{second}.{pool}", stat)
        put("oversize_allocations", self.oversize_allocations)
        put("oversize_segments", self.oversize_segments)
        for name in ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free"):
            flat[name] = getattr(self, name)
        flat["num_oom_rejections"] = 0  # of a policy (throw_on_cudamalloc_oom) that is not modelled
        flat["max_split_size"] = self.max_split_size
        return dict(sorted(flat.items()))
