"""OpTimeline: live bytes operation by operation, for one step: which operation holds the peak, and what served it.

The profile that every memory tool gives is a curve over time; to act on it one must know whose top it is. Here every
operation of the step is written down with the temporary bytes that were live while it ran: those in use in the workspace, and
those that anything took from the allocator besides. Operations of `Ops` are told from what happens inside them, so that the
scratch of a torch twin counts for the operation it serves; everything else is a torch operation that writes into a named buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sim.core.batch_shape import BatchShape

from .metering import StorageMeter
from .ops import OPERATIONS, Ops
from .workspace import Workspace


@dataclass(slots=True)
class OpEvent:
    """One operation."""

    index: int
    """Its place in the step."""
    operation: str
    """A name of `gpu.ops.OPERATIONS`, or a torch operation such as `mm`."""
    served_by: str
    """`triton` or `torch`."""
    fallback: bool
    """Whether something else was meant to serve it."""
    into: str
    """The buffer that it writes, where that is one of the workspace's; else empty."""
    workspace_bytes: int
    """In use in the workspace, at the most."""
    allocated_bytes: int
    """Taken from the allocator since the step began and still live, at the most."""
    live: tuple[tuple[str, int], ...] = ()
    """Buffers of the workspace in use then, with their bytes."""

    @property
    def live_bytes(self) -> int:
        """Temporary bytes while it ran."""
        return self.workspace_bytes + self.allocated_bytes


class OpTimeline:
    """Follows step number `step`. The step runs eagerly, whatever served its neighbours: a replayed graph has no operations."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.shape: BatchShape | None = None
        """What the step computed; None until it has run."""
        self.events: list[OpEvent] = []
        self._buffers: list[tuple[str, int, int]] = []
        self._open: OpEvent | None = None

    @property
    def peak(self) -> OpEvent | None:
        """The first operation with the most live bytes."""
        return max(self.events, key=lambda event: event.live_bytes, default=None)

    @contextmanager
    def follow(self, shape: BatchShape, ops: Ops, workspace: Workspace) -> Iterator[None]:
        """Write down what runs inside. A step that is run again replaces what was written."""
        self.shape, self.events, self._buffers, self._open = shape, [], [], None
        meter = _live_meter(ops.device)
        workspace.on_take = self._taken
        own = dict(vars(ops))  # an operation may have been replaced on this very object
        for name in OPERATIONS:
            setattr(ops, name, self._wrapped(name, getattr(ops, name), ops, workspace, meter))
        try:
            with meter.context, _Watcher(lambda func, result: self._seen(func, result, workspace, meter)):
                yield
        finally:
            workspace.on_take = None
            for name in OPERATIONS:
                if name in own:
                    setattr(ops, name, own[name])
                else:
                    delattr(ops, name)  # the class's own again

    # -- what is seen ---------------------------------------------------------------------------------------------

    def _taken(self, name: str, start: int, end: int) -> None:
        while self._buffers and self._buffers[-1][1] >= start:
            self._buffers.pop()  # its scope was left, and its place is given anew
        self._buffers.append((name, start, end))
        if self._open is not None:  # scratch of an operation that is under way
            self._grow(self._open, end, self._open.allocated_bytes)

    def _wrapped(
        self, name: str, function: Callable[..., Any], ops: Ops, workspace: Workspace, meter: _LiveMeter
    ) -> Callable[..., Any]:
        @wraps(function)
        def watched(*arguments: Any, **named: Any) -> Any:
            before = dict(ops.served)
            event = self._event(name, "", workspace, meter)
            self._open = event
            try:
                return function(*arguments, **named)
            finally:
                self._open = None
                event.served_by = "torch" if ops.served[name, "torch"] > before.get((name, "torch"), 0) else "triton"
                event.fallback = event.served_by != ops.meant
                self._grow(event, workspace.used_bytes, meter.live_bytes())

        return watched

    def _seen(self, func: Any, result: Any, workspace: Workspace, meter: _LiveMeter) -> None:
        if self._open is not None:
            self._grow(self._open, workspace.used_bytes, meter.live_bytes())
            return
        if not isinstance(result, torch.Tensor) or func.is_view:
            return
        operation = str(func).removeprefix("aten.").partition(".")[0].rstrip("_")
        into = self._name_at(workspace.offset(result))
        self._event(operation, into, workspace, meter)

    def _event(self, operation: str, into: str, workspace: Workspace, meter: _LiveMeter) -> OpEvent:
        event = OpEvent(len(self.events), operation, "torch", False, into, 0, 0)
        self.events.append(event)
        self._grow(event, workspace.used_bytes, meter.live_bytes())
        return event

    def _grow(self, event: OpEvent, workspace_bytes: int, allocated_bytes: int) -> None:
        if event.live and workspace_bytes + allocated_bytes <= event.live_bytes:
            return
        event.workspace_bytes, event.allocated_bytes = workspace_bytes, allocated_bytes
        event.live = tuple((name, end - start) for name, start, end in self._buffers if start < workspace_bytes)

    def _name_at(self, offset: int | None) -> str:
        return next((name for name, start, _ in self._buffers if start == offset), "")


class _Watcher(TorchDispatchMode):  # type: ignore[misc]  # torch has no types here
    """Tells of every torch operation, after it."""

    def __init__(self, seen: Callable[[Any, Any], None]) -> None:
        super().__init__()
        self._tell = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, then tell."""
        result = func(*args, **(kwargs or {}))
        self._tell(func, result)
        return result


@dataclass(frozen=True, slots=True)
class _LiveMeter:
    """Bytes from the allocator that are live and were not when the step began."""

    context: Any
    live_bytes: Callable[[], int]


def _live_meter(device: Any) -> _LiveMeter:
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        return _LiveMeter(nullcontext(), lambda: max(torch.cuda.memory_allocated(device) - before, 0))
    meter = StorageMeter()
    return _LiveMeter(meter, lambda: meter.live_bytes)
