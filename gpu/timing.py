"""How long a step took: by events on CUDA; elsewhere by the monotonic clock, or by the time that the thread had a processor."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from sim.core.config import ConfigError

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


CLOCKS: dict[str, Callable[[], int]] = {"wall": time.perf_counter_ns, "thread": time.thread_time_ns}
"""Clocks of the host, in nanoseconds. `thread` stands still while other processes have the core: on a shared machine it says what a
step takes on an idle one, as long as torch works in this thread alone."""


class HostTimer:
    """A clock of the host, where work is done when the call returns."""

    def __init__(self, clock: str = "wall") -> None:
        self._now_ns = CLOCKS[clock]
        self._started_ns = 0

    def start(self) -> None:
        """Now."""
        self._started_ns = self._now_ns()

    def stop_fs(self) -> int:
        """Time since `start`."""
        return max(self._now_ns() - self._started_ns, 1) * FS_PER_NS


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


def check_clock(device: Any, clock: str) -> None:
    """Raise ConfigError for no such clock, or one that says nothing of `device`."""
    if clock not in CLOCKS:
        raise ConfigError(f"clock is {clock!r}; it must be one of {', '.join(CLOCKS)}")
    if clock == "thread" and torch.device(device).type == "cuda":
        raise ConfigError("clock 'thread' counts this thread's time only, while a GPU works besides it; use 'wall'")


def clock_name(device: Any, clock: str) -> str:
    """What times the steps on `device`, as provenance has it."""
    return "CUDA events" if torch.device(device).type == "cuda" else clock


def step_timer(device: Any, clock: str = "wall") -> StepTimer:
    """The timer for a device.

    Raises:
        ConfigError: no such clock, or one that says nothing of this device.
    """
    check_clock(device, clock)
    if clock == "thread" and torch.get_num_threads() > 1:
        raise ConfigError(
            f"clock 'thread' counts this thread's time only, while torch's {torch.get_num_threads()} threads work besides it; use 'wall'"
        )
    timer: StepTimer = CudaTimer(device) if torch.device(device).type == "cuda" else HostTimer(clock)
    return timer
