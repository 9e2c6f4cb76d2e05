"""DeviceRoom: what fits a device before the first step, and how much of it is left for the steps.

On CUDA the driver is asked. The CPU may be given a hard limit: then it is a device of so many bytes, on which weights, KV pool, constants
and buffers come first, and the temporary tensors of a step get what those leave.
"""

from __future__ import annotations

from typing import Any

import torch

from sim.catalog.shape import ModelShape
from sim.core.config import ConfigError

from .machine import available_bytes
from .metering import GIB, DeviceBudget
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

    def check_weights(self, shape: ModelShape, dtype: str) -> None:
        """Find out before the weights are made that they will not fit. Raises ConfigError with what would be right."""
        weights, free = shape.weight_bytes(dtype), self._free_bytes()
        if free is not None and weights > free:
            raise ConfigError(
                f"the weights of {shape.name} in {dtype} ({weights / GIB:.2f} GiB) do not fit into the {free / GIB:.2f} GiB that "
                f"are free on {self._device}; take a smaller model, or simulate it"
            )

    def check_pool(self, pool_bytes: int, workspace_bytes: int) -> None:
        """Find out before the pool is taken that it will not fit. Raises ConfigError with what would be right."""
        free = self._free_bytes()
        if free is not None and pool_bytes + workspace_bytes > free:
            lower = (
                "gpu_memory_utilization or num_gpu_blocks_override"
                if self._device.type == "cuda"
                else "num_gpu_blocks_override"
            )
            raise ConfigError(
                f"the KV pool ({pool_bytes / GIB:.2f} GiB) and the workspace ({workspace_bytes / GIB:.2f} GiB) do not fit into the "
                f"{free / GIB:.2f} GiB that are free on {self._device}; lower {lower}"
            )

    def _free_bytes(self) -> int | None:
        """What the device has left; None where the system does not tell."""
        if self._device.type != "cuda":
            return available_bytes()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])
