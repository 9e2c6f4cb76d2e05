"""Page-locked memory of the host, as large as asked for.

PyTorch's own pinned allocations are rounded up to a power of two, which a pool of 40 GiB would take 64 for. Pages that are mapped
here and registered with the driver stay as many as they are.

**Source:** `CachingHostAllocator.h` in PyTorch (`PowerOf2Ceil`); `cudaHostRegister`, CUDA runtime API.
"""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import torch


def pinned_zeros(num_bytes: int) -> Any:
    """`[num_bytes]` uint8 of zeros that a CUDA device copies from and to without a detour; given back with the tensor.

    Pages of their own: memory that shares one with another registration is refused by the driver.

    Raises:
        CudaError: the driver cannot lock so many pages.
    """
    if not num_bytes:
        return torch.zeros(0, dtype=torch.uint8)
    buffer = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
    runtime, address = torch.cuda.cudart(), buffer.data_ptr()
    torch.cuda.check_error(int(runtime.cudaHostRegister(address, num_bytes, 0)))
    weakref.finalize(buffer, runtime.cudaHostUnregister, address)
    return buffer
