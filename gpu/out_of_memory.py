"""From the errors that mean "no memory" to the report that the core answers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sim.core.plan import OomReport

from .workspace import WorkspaceFullError

OUT_OF_MEMORY = (torch.OutOfMemoryError, WorkspaceFullError)
"""Errors after which a step can be taken back and tried smaller."""

_DRIVER = re.compile(
    r"Triton Error \[CUDA\]: out of memory|CUDA (?:driver )?error: out of memory|CUDA_ERROR_OUT_OF_MEMORY|CUBLAS_STATUS_ALLOC_FAILED"
)
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_WANTED = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_FREE = re.compile(r"of which ([\d.]+) (bytes|KiB|MiB|GiB) is free")


@contextmanager
def typed_out_of_memory() -> Iterator[None]:
    """Inside, memory that the driver or a library could not get, for a kernel's code, a graph or a workspace, is an OutOfMemoryError
    like the allocator's: such calls fail for themselves alone, and the device goes on.

    Raises:
        OutOfMemoryError: in place of the RuntimeError that Triton, PyTorch or cuBLAS raised.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, OUT_OF_MEMORY) or not _DRIVER.search(str(error)):
            raise
        raise torch.OutOfMemoryError(str(error)) from error


def freed_but_pending(error: BaseException, device: Any) -> bool:
    """Whether what failed would have fitted into memory that was free already and only waited for another stream.

    The caching allocator waits for such frees before it gives up, and does not search its pool again afterwards, so that the
    same request succeeds when it is made again. **Source:** PyTorch #189504.
    """
    if torch.device(device).type != "cuda" or not isinstance(error, torch.OutOfMemoryError):
        return False
    stats = torch.cuda.memory_stats(device)
    # After the wait the frees are in the cache: whatever is cached and large enough was not looked at.
    cached = int(stats["reserved_bytes.all.current"]) - int(stats["allocated_bytes.all.current"])
    wanted = oom_report(error, "", device).requested_bytes
    return 0 < wanted <= cached


def oom_report(error: BaseException, during: str, device: Any) -> OomReport:
    """What ran out, in numbers, as far as the error has them; `during` is what was being done."""
    wanted, free = getattr(error, "wanted_bytes", None), getattr(error, "free_bytes", None)
    if wanted is None:  # torch's own, which has them in its message only
        wanted, free = _bytes(_WANTED.search(str(error))), _bytes(_FREE.search(str(error)))
    if free is None and torch.device(device).type == "cuda":
        free = int(torch.cuda.mem_get_info(device)[0])
    return OomReport(op=during, requested_bytes=wanted or 0, free_bytes=free or 0)


def _bytes(found: re.Match[str] | None) -> int | None:
    return None if found is None else round(float(found[1]) * _UNITS[found[2]])
