"""DeviceRoom: what is taken of a device for good, and how much of it is left for the steps.

The CPU may be given a hard limit: then it is a device of so many bytes, on which weights, KV pool, constants and buffers come first,
and the temporary tensors of a step get what those leave.
"""

from __future__ import annotations

from typing import Any

import torch

from .metering import DeviceBudget
from .workspace import ALIGNMENT, Workspace


class DeviceRoom:
    """The memory of one device."""

    def __init__(self, device: Any, limit_bytes: int | None) -> None:
        """`limit_bytes` is the CPU's hard limit; None for none."""
        self._device = torch.device(device)
        self.budget = None if limit_bytes is None else DeviceBudget(limit_bytes)
        """What is taken under the limit."""

    def reserve(self, name: str, num_bytes: int) -> None:
        """Take bytes for good.

        Raises:
            OutOfMemoryError: they do not fit the limit.
        """
        if self.budget is not None:
            self.budget.reserve(name, num_bytes)

    def workspace(self, wanted: int, *, given: bool) -> Workspace:
        """A workspace of `wanted` bytes. Under a limit it gets no more than is left, as on a GPU: a step that needs more is taken
        back. A size that was `given` is not lowered.

        Raises:
            OutOfMemoryError: nothing is left, or less than was given.
        """
        if self.budget is not None and not given:
            wanted = max(min(wanted, self.budget.left_bytes // ALIGNMENT * ALIGNMENT), ALIGNMENT)
        return Workspace(wanted, self._device, budget=self.budget)
