"""Where the torch twins keep intermediate results: in a workspace, or, when nobody counts allocations, anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class Scratch(Protocol):
    """Short-lived buffers. `gpu.workspace.Workspace` is one."""

    def take(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """An uninitialised tensor, valid until the scope it was taken in is left."""
        ...

    def scope(self) -> Any:
        """A context at whose end everything taken in it is given back."""
        ...


class Allocating:
    """Scratch from torch's own allocator: for proofs, where clarity counts and allocations do not."""

    def __init__(self, device: Any = "cpu") -> None:
        self._device = device

    def take(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """A new tensor."""
        return torch.empty(shape, dtype=dtype, device=self._device)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Nothing to give back: tensors go when nobody holds them."""
        yield
