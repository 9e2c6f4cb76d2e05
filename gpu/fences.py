"""Fences: when has the last reader finished?

A block may be rewritten only by work that is ordered after its last reader. On a GPU that moment is an event in the
reader's stream; on the CPU, where steps run one after the other, it is the end of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from .require import require


class Fence(Protocol):
    """A point in the device's work."""

    def passed(self) -> bool:
        """Whether all work before it is done. Does not wait."""
        ...

    def order(self) -> None:
        """Order what the current stream is given from now on after this point. Does not wait on the host."""
        ...

    def wait(self) -> None:
        """Wait on the host until it has passed."""
        ...


class FenceError(RuntimeError):
    """A block was taken although its last reader's fence has not passed. Names the block, both owners and the step."""


class StepClock:
    """Counts steps where there are no streams."""

    def __init__(self) -> None:
        self.step = 0
        """The step in progress, or the next one."""
        self.completed = -1
        """The last step that is done."""

    def begin(self, step: int) -> None:
        """Step `step` starts."""
        self.step = step

    def end(self) -> None:
        """The step in progress is done."""
        self.completed = self.step
        self.step += 1


@dataclass(frozen=True, slots=True)
class StepFence:
    """Passes when a step is done."""

    clock: StepClock
    step: int
    """The step that must be done."""

    def passed(self) -> bool:
        """Whether it is."""
        return self.clock.completed >= self.step

    def order(self) -> None:
        """Nothing can be ordered after a step that has not run.

        Raises:
            FenceError: it has not passed.
        """
        self.wait()

    def wait(self) -> None:
        """Nothing will run while the caller waits.

        Raises:
            FenceError: it has not passed.
        """
        if not self.passed():
            raise FenceError(f"step {self.step} is not done (last done: {self.clock.completed}); waiting would not end")


class CudaFence:
    """An event in a CUDA stream."""

    __slots__ = ("_event",)

    def __init__(self, stream: Any = None) -> None:
        cuda = require("torch", "a CUDA fence").cuda
        self._event = cuda.Event()
        self._event.record(cuda.current_stream() if stream is None else stream)

    def passed(self) -> bool:
        """Whether the event has been reached."""
        return bool(self._event.query())

    def order(self) -> None:
        """Make the current stream wait for the event."""
        require("torch", "a CUDA fence").cuda.current_stream().wait_event(self._event)

    def wait(self) -> None:
        """Wait on the host."""
        self._event.synchronize()
