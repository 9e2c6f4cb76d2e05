"""The torch twin of `sample`: the same definition, by sorting. One row at a time, so no float32 copy of all logits either.

Kernel and twin agree on which tokens are kept exactly; the draw can differ where `uniform` falls within float32 rounding of
a boundary of the distribution function (relative 2^-20 at 128k tokens).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .sampling import SampleCall
from .scratch import Allocating, Scratch


def sample_twin(call: SampleCall, scratch: Scratch | None = None) -> Any:
    """Draw one token a row. Writes `call.tokens` only."""
    work = Allocating(call.logits.device) if scratch is None else scratch
    settings = zip(
        call.temperature.tolist(), call.top_k.tolist(), call.top_p.tolist(), call.uniform.tolist(), strict=True
    )
    for row, (temperature, top_k, top_p, uniform) in enumerate(settings):
        with work.scope():
            call.tokens[row].fill_(_draw(call.logits[row], temperature, top_k, top_p, uniform, work))
    return call.tokens


def _draw(logits: Any, temperature: float, top_k: int, top_p: float, uniform: float, work: Scratch) -> int:
    size = int(logits.shape[0])
    x = work.take("logits", (size,), torch.float32)
    x.copy_(logits)
    place = work.take("argmax", (1,), torch.int64)
    maximum = float(torch.amax(x, 0, keepdim=True, out=work.take("max", (1,), torch.float32)))
    if not math.isfinite(maximum):  # amax passes NaN on
        return -1
    torch.argmax(x, 0, keepdim=True, out=place)
    if temperature <= 0:
        return int(place)
    kept = x.numel()
    ordered = work.take("sorted", (size,), torch.float32)
    torch.sort(x, descending=True, out=(ordered, work.take("order", (size,), torch.int64)))
    if 0 < top_k < size:
        kept = _count_at_least(ordered, float(ordered[top_k - 1]))
    weights = work.take("weights", (size,), torch.float32)
    sums = work.take("sums", (size,), torch.float32)
    if top_p < 1:
        torch.sub(ordered[:kept], maximum, out=weights[:kept]).div_(temperature).exp_()
        torch.cumsum(weights[:kept], 0, out=sums[:kept])
        goal = top_p * float(sums[kept - 1])
        reached = min(
            _first_at_least(sums[:kept], goal), kept - 1
        )  # first whose own sum reaches the share: the last kept
        kept = min(_count_at_least(ordered, float(ordered[reached])), kept)
    # Keys below the threshold weigh nothing; then the distribution function in vocabulary order.
    lowest = float(ordered[kept - 1])
    mask = work.take("mask", (size,), torch.bool)
    torch.lt(x, lowest, out=mask)
    torch.sub(x, maximum, out=weights).div_(temperature).exp_().masked_fill_(mask, 0.0)
    torch.cumsum(weights, 0, out=sums)
    return _first_above(sums, weights, uniform * float(sums[-1]))


def _count_at_least(descending: Any, value: float) -> int:
    """How many of the descending numbers are at least `value`."""
    low, high = 0, int(descending.shape[0])
    while low < high:
        middle = (low + high) // 2
        if float(descending[middle]) >= value:
            low = middle + 1
        else:
            high = middle
    return low


def _first_at_least(ascending: Any, value: float) -> int:
    """Index of the first of the ascending numbers that is at least `value`; their number if there is none."""
    low, high = 0, int(ascending.shape[0])
    while low < high:
        middle = (low + high) // 2
        if float(ascending[middle]) < value:
            low = middle + 1
        else:
            high = middle
    return low


def _first_above(sums: Any, weights: Any, goal: float) -> int:
    """The first token at which the distribution function exceeds `goal`; the last one with a weight if rounding hides it."""
    low, high = 0, int(sums.shape[0])
    while low < high:
        middle = (low + high) // 2
        if float(sums[middle]) > goal:
            high = middle
        else:
            low = middle + 1
    if low == sums.shape[0]:
        low -= 1
        while low > 0 and float(weights[low]) == 0.0:
            low -= 1
    return low
