"""DecodeGraphs: decode batches by buckets, each captured once and replayed.

Launching the kernels of one decode step takes the host longer than running them takes a GPU, so engines capture the step for a
few batch sizes and pad each batch to the next of them. Everything that a captured step reads lies in memory that is taken once, for a
bucket at the same places each time: what is new in a step is copied there, rows beyond the batch store nowhere and read nothing, and
temporary tensors the same places of the workspace each time. The bucket sizes are vLLM's (`sim.memory.graphs`), which the ledger counts.

Where there is nothing to capture, on the CPU, the same step can be run through the same buffers and buckets by calling it again.

**Source:** CUDA graphs in PyTorch, `torch.cuda.CUDAGraph`; vLLM 0.29, `cudagraph_capture_sizes`, mode FULL for pure decode.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .batch import Work
from .ops import Ops, Record
from .workspace import Workspace, WorkspaceFullError

WARM_UPS = 2
"""Runs before a capture: they compile kernels and let libraries take their workspaces, which a capture may not."""


class Capture(Protocol):
    """Makes a step repeatable."""

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        """What does again all that `step` does, from the same buffers."""
        ...

    @property
    def held_bytes(self) -> int:
        """Device memory that the captures took."""
        ...

    @property
    def in_tensors_bytes(self) -> int:
        """The part of it that the allocator counts as allocated."""
        ...

    @property
    def kept_free_bytes(self) -> int:
        """The part of it that the allocator has reserved, and keeps free for replays."""
        ...


class CallAgain:
    """The CPU's twin of a capture: nothing is recorded, the step is called each time."""

    held_bytes = in_tensors_bytes = kept_free_bytes = 0

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        """The step itself."""
        return step


class CudaCapture:
    """Captures into CUDA graphs that share one memory pool.

    All are warmed up and captured on one stream: the workspace that cuBLAS takes for each stream it meets is then taken once, outside
    a capture, and is the one that the graphs use.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self.held_bytes = 0
        """By what the device's free memory fell: graphs, the workspace of their stream, kernels that were loaded for them."""
        self.in_tensors_bytes = self.kept_free_bytes = 0

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        """Run it a few times on a stream of its own, then record it. The first replay comes at once: with it the device takes the
        memory of a graph.
        """
        torch.cuda.empty_cache()  # as beginning a capture does: what that gives back is not to be set off against what is taken
        free, allocated, reserved = self._memory()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UPS):
                    step()
        finally:  # also what a warm-up that failed has begun comes before whatever is next
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            step()
        graph.replay()
        torch.cuda.synchronize(self._device)
        left, more_allocated, more_reserved = self._memory()
        self.held_bytes += max(free - left, 0)
        self.in_tensors_bytes += more_allocated - allocated
        self.kept_free_bytes += max(more_reserved - reserved - (more_allocated - allocated), 0)
        replay: Callable[[], None] = graph.replay
        return replay

    def _memory(self) -> tuple[int, int, int]:
        """Bytes free on the device, allocated by torch, reserved by it."""
        free = int(torch.cuda.mem_get_info(self._device)[0])
        return free, torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)


@dataclass(frozen=True, slots=True)
class _Captured:
    replay: Callable[[], None]
    record: Record
    """What one run of the step adds to the record of operations."""
    workspace_bytes: int
    """Its high-water mark."""


class DecodeGraphs:
    """The captured decode steps of one executor."""

    def __init__(self, sizes: Sequence[int], ops: Ops, workspace: Workspace, capture: Capture) -> None:
        """`sizes` are the buckets, in sequences; at least one."""
        self.sizes = tuple(sorted(sizes))
        self._ops, self._workspace, self._capture = ops, workspace, capture
        self._captured: dict[int, _Captured] = {}
        self.replays: Counter[int] = Counter()
        """Steps by bucket."""
        self.eager: Counter[str] = Counter()
        """Steps that went without a graph, by reason."""

    def capture(self, prepared: Callable[[int], Callable[[], None]]) -> None:
        """Capture a step for every bucket, the largest first: smaller ones then fit into the memory it took. `prepared(size)` puts into the
        buffers what the step of a bucket reads while it is captured, and returns the step: buckets share the buffers.
        """
        for size in reversed(self.sizes):
            before = self._ops.record()
            try:
                self._captured[size] = self._capture_one(prepared(size))
            except WorkspaceFullError:  # when warming up; a batch of so many runs out of memory, and the core is told
                self.sizes = tuple(smaller for smaller in self.sizes if smaller < size)
            finally:
                self._ops.restore(before)
        self._workspace.reset()

    def _capture_one(self, step: Callable[[], None]) -> _Captured:
        replay = self._capture(lambda: self._from_start(step))
        before = self._ops.record()
        self._from_start(step)  # once more, to see what a run adds to the record
        return _Captured(replay, self._ops.record() - before, self._workspace.step_high_water_bytes)

    def choose(self, work: Sequence[Work]) -> int | None:
        """The bucket of a step; None, and the reason on record, for one that goes without a graph."""
        if any(item.num_tokens > 1 for item in work):
            reason = "a prompt is computed"
        elif not all(item.samples for item in work):
            reason = "a sequence samples nothing"
        elif not self.sizes:
            reason = "the workspace is too small for any graph"
        elif len(work) > self.sizes[-1]:
            reason = f"more than {self.sizes[-1]} sequences, the largest graph"
        else:
            return self.sizes[bisect_left(self.sizes, len(work))]
        self.eager[reason] += 1
        return None

    def replay(self, size: int) -> None:
        """Run the captured step of a bucket on what its buffers hold now."""
        captured = self._captured[size]
        before = self._ops.num_calls
        captured.replay()
        if self._ops.num_calls == before:  # a graph does not pass through Ops again
            self._ops.add(captured.record)
        self._workspace.note(captured.workspace_bytes)
        self.replays[size] += 1

    @property
    def captured_bytes(self) -> int:
        """Device memory that the captures took."""
        return self._capture.held_bytes

    @property
    def allocator_bytes(self) -> tuple[int, int]:
        """The parts of it that torch's allocator counts as allocated, and that it has reserved and keeps free."""
        return self._capture.in_tensors_bytes, self._capture.kept_free_bytes

    def report(self) -> dict[str, Any]:
        """What was captured, replayed, and went without, as JSON values."""
        return {
            "sizes": list(self.sizes),
            "captured_bytes": self.captured_bytes,
            "replays": {str(size): count for size, count in sorted(self.replays.items())},
            "eager_steps": dict(sorted(self.eager.items())),
        }

    def _from_start(self, step: Callable[[], None]) -> None:
        """Every run takes the same places of the workspace."""
        self._workspace.reset()
        step()
