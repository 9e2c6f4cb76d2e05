"""How long it takes to make what is measured: random weights and a filled KV pool, estimated before either is made.

A few numbers are drawn where and as the weights will be, and timed. Weights read from files are not in it: how fast a disk is, is not
known before it is asked.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from sim.catalog.shape import ModelShape

from .design import Limits
from .errors import CalibrationError

PROBE = 1 << 22
"""Numbers that are drawn to see how fast that goes, `TIMES` times: on a machine that others use too, as slowly as it will go on."""
TIMES = 5
MOST_MAKING = 0.5
"""Share of a budget that making may take: the rest must do for a first pass."""
SLOWNESS = 2.0
"""Making takes more than drawing: memory is taken, numbers change their format, tensors are put together. 1.7 on the CPU device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Making:
    """What has to be made."""

    model: str
    weights: int
    """Numbers drawn for weights; 0 where they are read from files."""
    pool: int
    """Numbers drawn for the KV pool."""

    @classmethod
    def of(cls, shape: ModelShape, limits: Limits, *, drawn: bool, cache_bytes: int, block_bytes: int) -> Making:
        """Of a model under limits; `cache_bytes` are bytes a number in the cache takes, 1 of which is not filled."""
        pool = limits.num_gpu_blocks * block_bytes // cache_bytes if cache_bytes > 1 else 0
        return cls(model=shape.name, weights=shape.num_parameters if drawn else 0, pool=pool)

    def seconds(self, rate_per_s: float) -> float:
        """At so many numbers a second."""
        return SLOWNESS * (self.weights + self.pool) / rate_per_s

    def check(self, seconds: float, budget_s: float) -> None:
        """Raise CalibrationError where it leaves too little of a budget."""
        if seconds <= MOST_MAKING * budget_s:
            return
        numbers = f"{self.weights / 1e9:.2f} billion weights and {self.pool / 1e9:.2f} billion numbers of KV cache"
        raise CalibrationError(
            f"making {self.model} here ({numbers}) takes about {seconds:.0f} s, more than {MOST_MAKING:.0%} of the {budget_s:g} s that are "
            f"left of the budget, which counts it; give --budget {seconds / MOST_MAKING:.0f}s or more, a smaller --model, or smaller "
            "--max-num-seqs and --max-model-len"
        )


def drawing_rate(device: str) -> float:
    """Numbers that are drawn a second on a device, as weights are."""
    import torch

    place = torch.device(device)
    tensor = torch.empty(PROBE, dtype=torch.float32, device=place)
    generator = torch.Generator(device=place).manual_seed(0)
    tensor.normal_(generator=generator)  # the first time loads the kernel
    _settle(place)
    started = time.perf_counter()
    for _ in range(TIMES):
        tensor.normal_(generator=generator)
    _settle(place)
    return PROBE * TIMES / (time.perf_counter() - started)


def _settle(place: Any) -> None:
    """Wait until a GPU has done what it was asked."""
    if place.type == "cuda":
        import torch

        torch.cuda.synchronize(place)
