"""The real twin: a paged KV pool and the kernels that read and write it, on a device.

`KVLayout` is plain Python. Everything else needs torch, and the kernels need triton; both are imported when first asked
for, so `import gpu` works without them and says what to install when they are missing. May import `sim.core`, `sim.memory`
and `sim.catalog`; never SimPy or the simulated world, so that a GPU machine needs torch and triton and nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .layout import KVLayout
from .owners import ForeignReadError, OwnerTags
from .require import MissingExtraError, require

if TYPE_CHECKING:
    from .buffer_pool import SizeClassPool
    from .cpu_pool import CpuBlockPool
    from .device import find_device
    from .executor import TorchExecutor
    from .handover import hand_over
    from .kernels.attention import DecodeCall, PrefillCall
    from .kernels.launch import KVView
    from .kernels.sampling import SampleCall
    from .metering import CpuOutOfMemoryError, DeviceBudget, allocation_meter
    from .ops import Ops
    from .pool import PagedKVPool, PoisonedReadError
    from .readings import MemoryReading, StepReading
    from .real_engine import RealEngine
    from .real_settings import RealSettings
    from .swap import BlockMover, Transfer
    from .workspace import Workspace, WorkspaceFullError

_LAZY = {
    "BlockMover": "swap",
    "CpuBlockPool": "cpu_pool",
    "CpuOutOfMemoryError": "metering",
    "DecodeCall": "kernels.attention",
    "DeviceBudget": "metering",
    "KVView": "kernels.launch",
    "MemoryReading": "readings",
    "Ops": "ops",
    "PagedKVPool": "pool",
    "PoisonedReadError": "pool",
    "PrefillCall": "kernels.attention",
    "RealEngine": "real_engine",
    "RealSettings": "real_settings",
    "SampleCall": "kernels.sampling",
    "SizeClassPool": "buffer_pool",
    "StepReading": "readings",
    "TorchExecutor": "executor",
    "Transfer": "swap",
    "Workspace": "workspace",
    "WorkspaceFullError": "workspace",
    "allocation_meter": "metering",
    "choose_splits": "kernels.splits",
    "find_device": "device",
    "hand_over": "handover",
    "split_bytes": "kernels.splits",
}

__all__ = [
    "BlockMover",
    "CpuBlockPool",
    "CpuOutOfMemoryError",
    "DecodeCall",
    "DeviceBudget",
    "ForeignReadError",
    "KVLayout",
    "KVView",
    "MemoryReading",
    "MissingExtraError",
    "Ops",
    "OwnerTags",
    "PagedKVPool",
    "PoisonedReadError",
    "PrefillCall",
    "RealEngine",
    "RealSettings",
    "SampleCall",
    "SizeClassPool",
    "StepReading",
    "TorchExecutor",
    "Transfer",
    "Workspace",
    "WorkspaceFullError",
    "allocation_meter",
    "choose_splits",
    "find_device",
    "hand_over",
    "split_bytes",
]


def __getattr__(name: str) -> Any:
    """What needs torch, imported on first use.

    Raises:
        MissingExtraError: torch is not installed.
    """
    if name not in _LAZY:
        raise AttributeError(f"module 'gpu' has no attribute {name!r}")
    require("torch", f"gpu.{name}")
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
