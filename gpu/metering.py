"""Who allocates? A meter of storages on the CPU, a reader of the caching allocator on CUDA, and a hard limit in bytes.

"Steady state makes zero allocator calls a step" is a claim about the allocator, so it is counted there: on CUDA by
`torch.cuda.memory_stats`, on the CPU, which keeps no such count, by watching every operation for a storage that is new.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GIB = 2**30


class CpuOutOfMemoryError(torch.OutOfMemoryError):  # type: ignore[misc]  # torch has no types here
    """The CPU device's byte limit is reached. A `torch.OutOfMemoryError`, worded as CUDA's is, so that whoever handles or
    parses that one handles this one.
    """

    def __init__(self, wanted: int, live: int, limit: int, what: str) -> None:
        super().__init__(
            wanted, live, limit, what
        )  # the arguments, so that a copy (another process's, say) is the same error
        self.wanted_bytes, self.live_bytes, self.limit_bytes, self.what = wanted, live, limit, what

    def __str__(self) -> str:
        limit, live = self.limit_bytes, self.live_bytes
        return (
            f"CPU out of memory. Tried to allocate {_size(self.wanted_bytes)}. CPU has a total capacity of {_size(limit)} of which "
            f"{_size(max(limit - live, 0))} is free. Of the allocated memory {_size(live)} is allocated by PyTorch. "
            f"Asked for by {self.what}."
        )

    @property
    def free_bytes(self) -> int:
        """What was left."""
        return max(self.limit_bytes - self.live_bytes, 0)


def _size(num_bytes: int) -> str:
    """A size as torch's messages write it."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.2f} MiB"


class DeviceBudget:
    """A hard limit on what is taken from the CPU device, long-lived and short-lived together."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.reserved: dict[str, int] = {}
        """Bytes taken once and kept, by name."""
        self.paused = False
        """Whether what is allocated now is no part of the device."""

    @property
    def left_bytes(self) -> int:
        """Bytes that are neither reserved nor beyond the limit."""
        return max(self.limit_bytes - self.reserved_bytes, 0)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Inside, no meter counts: what looks at a run, and what stands for the host beside the device, takes none of its memory."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    @property
    def reserved_bytes(self) -> int:
        """Bytes taken once and kept."""
        return sum(self.reserved.values())

    def reserve(self, name: str, num_bytes: int) -> None:
        """Take bytes for good, before they are allocated.

        Raises:
            CpuOutOfMemoryError: there are not so many left; nothing is changed.
        """
        if self.reserved_bytes + num_bytes > self.limit_bytes:
            raise CpuOutOfMemoryError(num_bytes, self.reserved_bytes, self.limit_bytes, name)
        self.reserved[name] = self.reserved.get(name, 0) + num_bytes


class AllocationMeter(Protocol):
    """Counts allocator calls between entering and leaving it, and goes on counting when entered again."""

    @property
    def allocations(self) -> int:
        """Allocator calls so far."""
        ...

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> Any: ...


class StorageMeter(TorchDispatchMode):  # type: ignore[misc]  # torch has no types here
    """While active, counts the storages that operations return and nobody had before, on the CPU.

    What an operation takes and gives back inside itself (a scratch buffer of a matrix product) is not seen. With a
    `budget`, live bytes above its limit raise, after the operation and before its result is used.
    """

    def __init__(self, budget: DeviceBudget | None = None) -> None:
        super().__init__()
        self.allocations = 0
        """Storages made while the meter was active, and storages that grew."""
        self.by_operation: dict[str, int] = {}
        """The same, by the name of the operation."""
        self.peak_bytes = 0
        """Most bytes that were live at once, of storages made while the meter was active."""
        self._budget = budget
        self._live: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, then look at what it returned."""
        kwargs = kwargs or {}
        if self._budget is not None and self._budget.paused:
            return func(*args, **kwargs)
        known = {storage._cdata: storage.nbytes() for storage in _storages((args, kwargs))}
        result = func(*args, **kwargs)
        grown = 0
        for storage in _storages(result):
            key, size = storage._cdata, storage.nbytes()
            before = known.get(key, self._bytes_of(key))
            if size and (before is None or size > before):
                self.allocations += 1
                self.by_operation[str(func)] = self.by_operation.get(str(func), 0) + 1
                self._live[key] = (StorageWeakRef(storage), size)
                grown += size
        if grown:
            self._check(grown, str(func))
        return result

    @property
    def live_bytes(self) -> int:
        """Bytes of storages that were made while the meter was active and still exist."""
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        return sum(size for _, size in self._live.values())

    def _bytes_of(self, key: int) -> int | None:
        entry = self._live.get(key)
        return None if entry is None or entry[0].expired() else entry[1]

    def _check(self, grown: int, what: str) -> None:
        live = self.live_bytes
        self.peak_bytes = max(self.peak_bytes, live)
        if self._budget is not None and self._budget.reserved_bytes + live > self._budget.limit_bytes:
            before = self._budget.reserved_bytes + live - grown
            raise CpuOutOfMemoryError(grown, before, self._budget.limit_bytes, what)


def _storages(tree: Any) -> Iterator[Any]:
    """The storages of all CPU tensors in nested arguments."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and leaf.layout is torch.strided:
            yield leaf.untyped_storage()


class CudaAllocatorMeter(AbstractContextManager["CudaAllocatorMeter"]):
    """Counts requests to torch's CUDA caching allocator, and calls of it to the driver."""

    def __init__(self, device: Any = None) -> None:
        self._device = device
        self.allocations = 0
        """Allocations that torch served, from its cache or the driver."""
        self.device_allocations = 0
        """Segments that it took from the driver for them."""
        self._start = (0, 0)

    def _counts(self) -> tuple[int, int]:
        stats = torch.cuda.memory_stats(self._device)
        if not stats:  # torch has not touched the device yet, and has taken nothing
            return 0, 0
        try:
            return int(stats["allocation.all.allocated"]), int(stats["segment.all.allocated"])
        except KeyError as error:  # a meter that sees nothing must not say that there was nothing
            raise RuntimeError(f"this torch ({torch.__version__}) does not count allocations under {error}") from None

    def __enter__(self) -> CudaAllocatorMeter:
        self._start = self._counts()
        return self

    def __exit__(self, *error: Any) -> None:
        allocations, segments = self._counts()
        self.allocations += allocations - self._start[0]
        self.device_allocations += segments - self._start[1]


def allocation_meter(device: Any) -> AllocationMeter:
    """The meter for a device."""
    meter: AllocationMeter
    meter = CudaAllocatorMeter(device) if torch.device(device).type == "cuda" else StorageMeter()
    return meter
