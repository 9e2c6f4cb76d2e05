"""SizeClassPool: buffers that outlive a step's scopes, in powers of two, kept when they are given back.

What lies in the `Workspace` is gone when its scope is left. A buffer that a copy still reads, or that another stream was told of, may
not be: it is given back behind a fence, and leased again when the fence has passed. Meanwhile whoever needs one takes another, so nobody
waits.
"""

from __future__ import annotations

from typing import Any

import torch

from sim.core.blocks import IntegrityError

from .fences import Fence


class Buffer:
    """A lease of a pooled buffer: `tensor` until it is given back."""

    __slots__ = ("address", "name", "size_class", "storage", "tensor")

    def __init__(self, name: str, size_class: int, storage: Any, tensor: Any) -> None:
        self.name = name
        """What it is for."""
        self.size_class = size_class
        """Bytes that it really takes."""
        self.storage = storage
        self.address: int = storage.data_ptr()
        """Where it begins."""
        self.tensor = tensor
        """The buffer in the shape and format asked for."""


class SizeClassPool:
    """Buffers of one memory. A lease takes the smallest power of two of bytes that holds it: what PyTorch's pinned allocations take anyway.

    After a warm-up every lease is served from what was given back, so a steady state allocates nothing. A lease that is
    never given back shows in `live`: that is how a leak by a forgotten reference looks (SGLang #20640).
    """

    SMALLEST = 512

    def __init__(self, device: Any = "cpu", *, pinned: bool = False) -> None:
        self._device = device
        self._pinned = pinned
        self._free: dict[int, list[tuple[Any, Fence | None]]] = {}
        self.live: dict[str, int] = {}
        """Leases out now, by name."""
        self.allocations = 0
        """Buffers ever allocated."""
        self.reserved_bytes = 0
        """Bytes of all buffers, leased or not."""

    def lease(self, name: str, shape: tuple[int, ...], dtype: Any) -> Buffer:
        """An uninitialised buffer; give it back with `give_back`."""
        size = dtype.itemsize
        for length in shape:
            size *= length
        size_class = self.class_of(size)
        storage = self._free_storage(size_class)
        if storage is None:
            storage = self._allocate(size_class)
        buffer = Buffer(name, size_class, storage, storage[:size].view(dtype).view(shape))
        self.live[name] = self.live.get(name, 0) + 1
        return buffer

    def give_back(self, buffer: Buffer, fence: Fence | None = None) -> None:
        """Take a lease back. Its tensor must not be used any more, but by work before `fence`: until that has passed nobody gets it.

        Raises:
            ValueError: it was given back before.
        """
        if buffer.tensor is None:
            raise ValueError(f"buffer {buffer.name!r} is given back twice")
        buffer.tensor = None
        self.live[buffer.name] -= 1
        if not self.live[buffer.name]:
            del self.live[buffer.name]
        self._free.setdefault(buffer.size_class, []).append((buffer.storage, fence))

    def warm(self, num_bytes: int, count: int = 1) -> None:
        """See to it that `count` leases of every size up to `num_bytes` can be out at once without an allocation."""
        size = self.SMALLEST
        while size <= self.class_of(num_bytes):
            free = self._free.setdefault(size, [])
            while len(free) < count:
                free.append((self._allocate(size), None))
            size *= 2

    def check_returned(self, when: str) -> None:
        """Verify that no lease is out, `when` none should be.

        Raises:
            IntegrityError: some are; names them.
        """
        if self.live:
            leases = ", ".join(f"{count} of {name!r}" for name, count in sorted(self.live.items()))
            raise IntegrityError(f"buffers on {self._device} were not given back by {when}: {leases}")

    def class_of(self, num_bytes: int) -> int:
        """Bytes that a lease of `num_bytes` takes."""
        return max(self.SMALLEST, 1 << max(num_bytes - 1, 0).bit_length())

    def _free_storage(self, size_class: int) -> Any:
        """The buffer that was given back first, of those whose fence has passed; None when there is none."""
        free = self._free.get(size_class, ())
        for index, (storage, fence) in enumerate(free):
            if fence is None or fence.passed():
                del self._free[size_class][index]
                return storage
        return None

    def _allocate(self, size_class: int) -> Any:
        storage = torch.empty(size_class, dtype=torch.uint8, device=self._device, pin_memory=self._pinned)
        self.allocations += 1
        self.reserved_bytes += size_class
        return storage
