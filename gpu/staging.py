"""Staging: how numbers get from the host to the device and back, through buffers that a steady state does not allocate.

A copy between the two reads or writes page-locked memory when the device comes to it, not when it was asked for. So what the host writes
for the device lies in a buffer of its own, which is leased again when the copy's fence has passed: the pass after it is written meanwhile
into another one. On the CPU the two memories are one, copies are done when asked for, and a single buffer of each size serves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .buffer_pool import SizeClassPool
from .fences import CudaFence

MAX_IDS = 64
"""Ids of blocks that a kernel is told at once: whoever has more tells them in turns, and their buffers are small."""


class Staging:
    """The buffers between the host and one device."""

    def __init__(self, device: Any) -> None:
        self.device = torch.device(device)
        self._cuda = self.device.type == "cuda"
        self.host = SizeClassPool(pinned=self._cuda)
        """Page-locked, beside a GPU: what is written for the device, or read from it."""
        self.on_device = SizeClassPool(self.device)
        """What kernels are told besides the step's own input: ids of blocks that are moved or summed."""

    def warm(self, num_bytes: int) -> None:
        """See to it that input of up to `num_bytes`, and two lists of ids at once, take no allocation."""
        self.host.warm(num_bytes)
        self.on_device.warm(8 * MAX_IDS, count=2)

    @contextmanager
    def sending(self, name: str, into: Any) -> Iterator[int]:
        """Memory of the host as large as `into` (`[num_bytes]` uint8 on the device): yields its address, and sends it by one copy at the
        end, in order before what the current stream is given next.
        """
        buffer, fence = self.host.lease(name, tuple(into.shape), torch.uint8), None
        try:
            yield buffer.address
            into.copy_(buffer.tensor, non_blocking=True)
            fence = CudaFence() if self._cuda else None
        finally:
            self.host.give_back(buffer, fence)

    @contextmanager
    def ids(self, name: str, values: Sequence[int]) -> Iterator[Any]:
        """`[len(values)]` int64 on the device, for the work that the current stream is given inside."""
        buffer = self.on_device.lease(name, (8 * len(values),), torch.uint8)
        try:
            with self.sending(name, buffer.tensor) as address:
                (ctypes.c_int64 * len(values)).from_address(address)[:] = list(values)
            yield buffer.tensor.view(torch.int64)
        finally:
            self.on_device.give_back(buffer, CudaFence() if self._cuda else None)

    def read(self, name: str, tensor: Any) -> list[int]:
        """The numbers of a tensor on the device. The host waits for the work before it."""
        buffer = self.host.lease(name, tuple(tensor.shape), tensor.dtype)
        try:
            buffer.tensor.copy_(tensor, non_blocking=True)
            if self._cuda:
                CudaFence().wait()
            numbers: list[int] = buffer.tensor.tolist()
        finally:
            self.host.give_back(buffer)
        return numbers

    def check_returned(self, when: str) -> None:
        """Verify that no lease is out, `when` none should be.

        Raises:
            IntegrityError: some are; names them.
        """
        self.host.check_returned(when)
        self.on_device.check_returned(when)
