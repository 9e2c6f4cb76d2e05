"""PyTorch's own memory snapshot of a run on CUDA: every allocation with its stack, in the file that `kvtwin diagnose` and
PyTorch's viewer read.

**Source:** `torch.cuda.memory._record_memory_history` and `_dump_snapshot`, PyTorch 2.1 and later.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sim.core.config import ConfigError

ENTRIES = 200_000
"""Events kept: the last ones, should there be more."""


@contextmanager
def memory_history(path: Path | None, device: Any) -> Iterator[None]:
    """Record while inside, and write the snapshot to `path` at the end, also when a run fails; None records nothing.

    Raises:
        ConfigError: the device is not CUDA, whose allocator is the one that keeps a history.
    """
    if path is None:
        yield
        return
    if torch.device(device).type != "cuda":
        raise ConfigError(
            f"a memory snapshot is of CUDA's caching allocator, but the device is {device}; leave it out, or use --device cuda"
        )
    torch.cuda.memory._record_memory_history(max_entries=ENTRIES)
    try:
        yield
    finally:
        torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)
