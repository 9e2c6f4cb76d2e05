"""How long a step took: by events on CUDA, by the monotonic clock elsewhere."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

FS_PER_NS = 10**6
_FS_PER_MS = 10**12


class StepTimer(Protocol):
    """Measures one step after another."""

    def start(self) -> None:
        """The step begins."""
        ...

    def stop_fs(self) -> int:
        """The step is submitted; wait for it, and return its duration in femtoseconds, at least 1."""
        ...


class HostTimer:
    """The monotonic clock, where work is done when the call returns."""

    def __init__(self) -> None:
        self._started_ns = 0

    def start(self) -> None:
        """Now."""
        self._started_ns = time.perf_counter_ns()

    def stop_fs(self) -> int:
        """Time since `start`."""
        return max(time.perf_counter_ns() - self._started_ns, 1) * FS_PER_NS


class CudaTimer:
    """Events in the current stream: the device's time, from its first kernel to its last, waiting for the host included."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._start = torch.cuda.Event(enable_timing=True)
        self._stop = torch.cuda.Event(enable_timing=True)

    def start(self) -> None:
        """Put the first event into the stream."""
        self._start.record(torch.cuda.current_stream(self._device))

    def stop_fs(self) -> int:
        """Put the second event into the stream and wait for it."""
        self._stop.record(torch.cuda.current_stream(self._device))
        self._stop.synchronize()
        return max(int(self._start.elapsed_time(self._stop) * _FS_PER_MS), 1)


def step_timer(device: Any) -> StepTimer:
    """The timer for a device."""
    device = torch.device(device)
    timer: StepTimer = CudaTimer(device) if device.type == "cuda" else HostTimer()
    return timer
