"""Workspace: short-lived memory of a step, taken once, handed out by moving a mark.

KV lives long and has its own arena (`gpu.pool`); what a step needs and forgets comes from here, so neither can fragment the
other. Handing out costs no allocator call; the arena's high-water mark says what a step really needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .metering import DeviceBudget

ALIGNMENT = 256
"""Every buffer begins at a multiple of this many bytes, as torch's own CUDA allocations do at 512."""


class WorkspaceFullError(RuntimeError):
    """A buffer does not fit into what is left of the workspace. The message has the numbers, and so have the attributes."""

    def __init__(self, name: str, shape: tuple[int, ...], wanted_bytes: int, free_bytes: int, limit_bytes: int) -> None:
        super().__init__(name, shape, wanted_bytes, free_bytes, limit_bytes)
        self.name, self.shape = name, shape
        self.wanted_bytes, self.free_bytes, self.limit_bytes = wanted_bytes, free_bytes, limit_bytes

    def __str__(self) -> str:
        return (
            f"{self.name} {list(self.shape)} needs {self.wanted_bytes} bytes, but {self.free_bytes} of the workspace's "
            f"{self.limit_bytes} are left"
        )


class Workspace:
    """An arena of `num_bytes` on `device`: `take` moves a mark up, leaving a `scope` moves it back, `reset` to zero."""

    def __init__(self, num_bytes: int, device: Any = "cpu", *, budget: DeviceBudget | None = None) -> None:
        self.num_bytes = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if budget is not None:
            budget.reserve("workspace", self.num_bytes)
        self._arena = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        self._mark = 0
        self.on_take: Callable[[str, int, int], None] | None = None
        """Told of each buffer: its name and its bytes `[start, end)` in the arena."""
        self.step_high_water_bytes = 0
        """Most bytes in use at once since the last `reset`."""
        self.high_water_bytes = 0
        """Most bytes in use at once, ever."""

    @property
    def used_bytes(self) -> int:
        """Bytes in use now."""
        return self._mark

    def take(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """An uninitialised tensor, valid until its scope is left or the workspace is reset. No allocator call.

        Raises:
            WorkspaceFullError: it does not fit; nothing is changed.
        """
        count = 1
        for size in shape:
            count *= size
        size = count * dtype.itemsize
        end = self._mark + -(-size // ALIGNMENT) * ALIGNMENT
        if end > self.num_bytes:
            raise WorkspaceFullError(name, shape, size, self.num_bytes - self._mark, self.num_bytes)
        if self.on_take is not None:
            self.on_take(name, self._mark, end)
        buffer = self._arena[self._mark : self._mark + size].view(dtype).view(shape)
        self._mark = end
        self.step_high_water_bytes = max(self.step_high_water_bytes, end)
        self.high_water_bytes = max(self.high_water_bytes, end)
        return buffer

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Give back at the end what was taken inside; what was taken before stays."""
        mark = self._mark
        try:
            yield
        finally:
            self._mark = mark

    def rewind(self) -> None:
        """Another pass of the same step: nothing is in use, and the step's high-water mark stays."""
        self._mark = 0

    def note(self, used_bytes: int) -> None:
        """So many bytes were in use at once by work that did not take them itself: the replay of a captured graph."""
        self.step_high_water_bytes = max(self.step_high_water_bytes, used_bytes)
        self.high_water_bytes = max(self.high_water_bytes, used_bytes)

    def offset(self, tensor: Any) -> int | None:
        """Where in the arena `tensor` begins; None when it lies elsewhere."""
        start = int(tensor.data_ptr()) - int(self._arena.data_ptr())
        return start if 0 <= start < self.num_bytes else None

    def reset(self) -> int:
        """A new step: nothing is in use. Returns the high-water mark of the step that ended, in bytes."""
        used = self.step_high_water_bytes
        self._mark = self.step_high_water_bytes = 0
        return used
