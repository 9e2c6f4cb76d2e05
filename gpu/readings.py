"""Readings: what a step did, and what the device held when it was over, by who could tell the holders apart from outside.

On CUDA the caching allocator and the driver are asked. The CPU keeps no such counts: there the long-lived tensors are added up
by their storages, and the operating system is asked for the process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """The device's memory at one moment. The lines do not overlap."""

    tensors_bytes: int
    """Weights, constants, buffers and what captured graphs keep: PyTorch's, beside pool and workspace."""
    weights_bytes: int
    """The part of it that are weights."""
    graphs_bytes: int
    """The part of it that captured graphs keep. What the driver takes for graphs besides is not PyTorch's."""
    buffers_bytes: int
    """The part of it that input and output of steps take, and what kernels are told of moves."""
    staging_bytes: int
    """Memory of the host through which they go: page-locked beside a GPU, and no part of the device."""
    kv_pool_bytes: int
    """The KV pool, used or not."""
    workspace_bytes: int
    """The workspace's arena."""
    cached_bytes: int
    """Reserved by PyTorch and in no tensor; 0 on the CPU."""
    non_torch_bytes: int
    """Context, libraries and the driver's part of graphs, of this process; 0 on the CPU."""
    others_bytes: int
    """Other processes, as found before this one started; 0 on the CPU."""
    total_bytes: int
    """The device; on the CPU its hard limit, or, without one, all that the run has taken."""
    process_bytes: int | None
    """Resident memory of this process on the host; None where the system does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReading:
    """What one step did and held, for whoever records it."""

    step: int
    start_fs: int
    """When the world lets it begin."""
    duration_fs: int
    phase: str
    """`prefill`, `decode` or `mixed`."""
    num_tokens: int
    """Tokens computed."""
    num_seqs: int
    decode_seqs: int
    """Sequences that computed one token."""
    kv_tokens: int
    """Tokens in the KV cache of all requests that hold blocks, a shared one counted for each."""
    allocated_blocks: int
    """Blocks of the pool that requests hold, by the device's own book."""
    workspace_bytes: int
    """High-water mark of the step."""
    served_by: str
    """`eager`, `graph of N` (a captured batch of N sequences), or `N micro-batches`."""
    oom: bool
    memory: MemoryReading | None = None
    """What the device held; None where nobody reads it."""


class MemoryReader(Protocol):
    """Reads one device."""

    def read(self) -> MemoryReading:
        """Now."""
        ...


class CpuMemoryReader:
    """Adds up storages. `tensors` are the long-lived ones beside pool, workspace and buffers, weights included; `buffers` tells the bytes
    of those on the device and on the host.
    """

    def __init__(
        self,
        tensors: Iterable[Any],
        *,
        weights_bytes: int,
        buffers: Callable[[], tuple[int, int]],
        kv_pool_bytes: int,
        workspace_bytes: int,
        limit_bytes: int | None = None,
    ) -> None:
        self._tensors, self._weights, self._buffers = storage_bytes(tensors), weights_bytes, buffers
        self._kv_pool, self._workspace = kv_pool_bytes, workspace_bytes
        self._limit = limit_bytes

    def read(self) -> MemoryReading:
        """Long-lived storages as they were counted, and the process as it is now."""
        buffers, staging = self._buffers()
        tensors = self._tensors + buffers
        taken = tensors + self._kv_pool + self._workspace
        return MemoryReading(
            tensors_bytes=tensors,
            weights_bytes=self._weights,
            graphs_bytes=0,
            buffers_bytes=buffers,
            staging_bytes=staging,
            kv_pool_bytes=self._kv_pool,
            workspace_bytes=self._workspace,
            cached_bytes=0,
            non_torch_bytes=0,
            others_bytes=0,
            total_bytes=taken if self._limit is None else self._limit,
            process_bytes=process_bytes(),
        )


class CudaMemoryReader:
    """Asks the caching allocator and the driver. `others_bytes` is what other processes held before this one began; `graphs_bytes` what
    captures left allocated, and what they left free in a memory pool of their own (`DecodeGraphs.allocator_bytes`); `buffers` tells the
    bytes of those on the device and on the host.
    """

    def __init__(
        self,
        device: Any,
        *,
        weights_bytes: int,
        graphs_bytes: tuple[int, int],
        buffers: Callable[[], tuple[int, int]],
        kv_pool_bytes: int,
        workspace_bytes: int,
        others_bytes: int,
    ) -> None:
        self._device = device
        self._weights, self._graphs, self._others = weights_bytes, graphs_bytes, others_bytes
        self._kv_pool, self._workspace, self._buffers = kv_pool_bytes, workspace_bytes, buffers

    def read(self) -> MemoryReading:
        """Between two steps."""
        buffers, staging = self._buffers()
        allocated, reserved = torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        in_tensors, kept_free = self._graphs
        kept_free = min(kept_free, reserved - allocated)
        return MemoryReading(
            tensors_bytes=allocated - self._kv_pool - self._workspace + kept_free,
            weights_bytes=self._weights,
            graphs_bytes=in_tensors + kept_free,
            buffers_bytes=buffers,
            staging_bytes=staging,
            kv_pool_bytes=self._kv_pool,
            workspace_bytes=self._workspace,
            cached_bytes=reserved - allocated - kept_free,
            non_torch_bytes=max(total - free - reserved - self._others, 0),
            others_bytes=self._others,
            total_bytes=total,
            process_bytes=process_bytes(),
        )


def storage_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of the storages of `tensors`, each counted once."""
    found = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(found.values())


def process_bytes() -> int | None:
    """Resident memory of this process; None on a system without /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
