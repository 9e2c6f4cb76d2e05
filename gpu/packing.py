"""Packing: where the numbers of a batch lie in one piece of memory, the same place on the host, which writes them, and on the device.

The parts of a batch follow each other without gaps worth the name, so whatever its size one copy sends all of them.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from .workspace import ALIGNMENT

_C_TYPES: dict[Any, Any] = {torch.int64: ctypes.c_int64, torch.int32: ctypes.c_int32, torch.float32: ctypes.c_float}


class Part:
    """`size` numbers of one format."""

    __slots__ = ("_dtype", "_size", "_start", "_there", "cells")

    def __init__(self, start: int, size: int, dtype: Any) -> None:
        self._start, self._size, self._dtype = start, size, dtype
        self._there: Any = None
        self.cells: Any = None
        """A C array over the host's memory, once the packing has been opened there; assign to slices of it."""

    def open(self, address: int) -> None:
        """The packing begins at `address` on the host."""
        self.cells = (_C_TYPES[self._dtype] * self._size).from_address(address + self._start)

    def on(self, memory: Any) -> Any:
        """`[size]`: the part on a device on which the packing begins where `memory` (uint8) does: the same whenever it is asked for."""
        if self._there is None:
            self._there = memory[self._start : self._start + self._size * self._dtype.itemsize].view(self._dtype)
        return self._there


class Packing:
    """Parts one behind another, each at a multiple of `ALIGNMENT` bytes: kernels are compiled for pointers that are."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._address: int | None = None
        self.num_bytes = 0
        """Bytes of the parts so far."""

    def part(self, size: int, dtype: Any) -> Part:
        """Room for `size` numbers behind what is there."""
        part = Part(self.num_bytes, size, dtype)
        self._parts.append(part)
        self.num_bytes += -(-size * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        return part

    def open(self, address: int) -> None:
        """Let the parts be written, in memory of the host that begins at `address`."""
        if address != self._address:
            self._address = address
            for part in self._parts:
                part.open(address)
