"""What the host writes for a step and the device reads: buffers that are taken once, and sent together.

On CUDA the buffers of a step are parts of one pinned tensor of the host, with a twin on the device. What was written is sent by as few
copies as there are regions far apart, one as a rule. A copy that is under way reads pinned memory when it comes to it, not when
it was asked for: so the host waits for the last one before it writes again (two micro-batches of a step have no other reason to
wait for each other).
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_C_TYPES: dict[Any, Any] = {torch.int64: ctypes.c_int64, torch.int32: ctypes.c_int32, torch.float32: ctypes.c_float}
ALIGNMENT = 256
"""Every part begins at a multiple of this many bytes: kernels are compiled for pointers that do."""
GAP_BYTES = 1 << 17
"""Regions nearer to each other are one copy: the bytes between them cost less than another call."""


class StepBuffer:
    """A part: `size` cells of one format, filled on the host through a C array."""

    def __init__(self, size: int, dtype: Any, arena: StepArena) -> None:
        self._arena, self._dtype = arena, dtype
        self._start = arena.reserve(self, size * dtype.itemsize)
        self._size = size
        self._device: Any = None
        self.cells: Any = None
        """The host's memory; assign to slices of it."""

    def place(self, host: Any, device: Any) -> None:
        """The arena has been made: bytes of the host, and those of the device."""
        part = slice(self._start, self._start + self._size * self._dtype.itemsize)
        self._device = device[part].view(self._dtype)
        self.cells = (_C_TYPES[self._dtype] * self._size).from_address(host.data_ptr() + self._start)

    def sent(self, size: int) -> Any:
        """The first `size` cells on the device; they are there once the arena has been sent."""
        self._arena.note(self._start, self._start + size * self._dtype.itemsize)
        return self._device[:size]


class StepArena:
    """The memory of a step's buffers: on the CPU one tensor, on CUDA a pinned one and its twin on the device."""

    def __init__(self, device: Any) -> None:
        self._device = torch.device(device)
        self._cuda = self._device.type == "cuda"
        self._parts: list[StepBuffer] = []
        self._num_bytes = 0
        self._used: list[tuple[int, int]] = []
        self._copied: Any = None
        self.tensors: tuple[Any, ...] = ()
        """On the host, and on the device."""

    def reserve(self, part: StepBuffer, num_bytes: int) -> int:
        """Where a part begins. Before `make`."""
        start = self._num_bytes
        self._parts.append(part)
        self._num_bytes += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return start

    def make(self) -> None:
        """Take the memory, and give each part its own."""
        host = torch.zeros(self._num_bytes, dtype=torch.uint8, pin_memory=self._cuda)
        there = torch.zeros(self._num_bytes, dtype=torch.uint8, device=self._device) if self._cuda else host
        self.tensors = (host, there)
        self._copied = torch.cuda.Event() if self._cuda else None
        for part in self._parts:
            part.place(host, there)

    def refill(self) -> None:
        """The host is about to write: wait until what was sent before has left its memory."""
        self._used.clear()
        if self._copied is not None:
            self._copied.synchronize()

    def note(self, start: int, end: int) -> None:
        """Bytes `[start, end)` are to be sent."""
        self._used.append((start, end))

    def send(self) -> None:
        """Send what was noted since `refill`, in order before what the current stream is given next."""
        if self._copied is None:
            return
        host, there = self.tensors
        for start, end in merged(self._used):
            there[start:end].copy_(host[start:end], non_blocking=True)
        self._copied.record(torch.cuda.current_stream(self._device))


def merged(regions: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Half-open regions in order, those less than `GAP_BYTES` apart as one; empty ones left out.

    >>> merged([(400, 410), (0, 20), (256, 256), (10**6, 10**6 + 5)])
    [(0, 410), (1000000, 1000005)]
    """
    found: list[tuple[int, int]] = []
    for start, end in sorted(region for region in regions if region[0] < region[1]):
        if found and start - found[-1][1] < GAP_BYTES:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found
