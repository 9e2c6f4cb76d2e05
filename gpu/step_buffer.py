"""StepBuffer: a tensor that the host fills and the device reads, taken once."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_C_TYPES: dict[Any, Any] = {torch.int64: ctypes.c_int64, torch.int32: ctypes.c_int32, torch.float32: ctypes.c_float}


class StepBuffer:
    """A tensor on the device and, on CUDA, its pinned twin on the host; filled through a C array."""

    def __init__(self, size: int, dtype: Any, device: Any) -> None:
        cuda = device.type == "cuda"
        self._host = torch.zeros(size, dtype=dtype, pin_memory=cuda)
        self._device = torch.zeros(size, dtype=dtype, device=device) if cuda else self._host
        self._cuda = cuda
        self.tensors = (self._host, self._device)
        self.cells: Any = (_C_TYPES[dtype] * size).from_address(self._host.data_ptr())
        """The host's memory; assign to slices of it."""

    def sent(self, size: int) -> Any:
        """The first `size` cells, on the device."""
        if self._cuda:
            self._device[:size].copy_(self._host[:size], non_blocking=True)
        return self._device[:size]
