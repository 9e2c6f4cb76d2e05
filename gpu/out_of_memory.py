"""From the errors that mean "no memory" to the report that the core answers."""

from __future__ import annotations

import re
from typing import Any

import torch

from sim.core.plan import OomReport

from .workspace import WorkspaceFullError

OUT_OF_MEMORY = (torch.OutOfMemoryError, WorkspaceFullError)
"""Errors after which a step can be taken back and tried smaller."""

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_WANTED = re.compile(r"(?:Tried to allocate|needs) ([\d.]+) (bytes|KiB|MiB|GiB)")
_FREE = re.compile(r"(?:of which|but) ([\d.]+) ?(bytes|KiB|MiB|GiB)? ?(?:is free|of the workspace)")


def oom_report(error: BaseException, during: str, device: Any) -> OomReport:
    """What ran out, in numbers, as far as the error has them; `during` is what was being done."""
    text = str(error)
    wanted = getattr(error, "wanted_bytes", None)
    if wanted is None:
        wanted = _bytes(_WANTED.search(text))
    limit, live = getattr(error, "limit_bytes", None), getattr(error, "live_bytes", None)
    free = max(limit - live, 0) if limit is not None and live is not None else _bytes(_FREE.search(text))
    if free is None and torch.device(device).type == "cuda":
        free = int(torch.cuda.mem_get_info(device)[0])
    return OomReport(op=during, requested_bytes=wanted or 0, free_bytes=free or 0)


def _bytes(found: re.Match[str] | None) -> int | None:
    return None if found is None else round(float(found[1]) * _UNITS[found[2] or "bytes"])
