"""Sampling: greedy, temperature, top-k and top-p, over chunks of the vocabulary, without a copy or a sort of the logits.

With `w_i = exp((x_i - max x) / temperature)` the token is drawn from the kept i in proportion to `w_i`, where i is kept if

    fewer than top_k logits are greater than x_i, and
    the w of the greater ones kept by that sum to less than top_p of all that are kept by it.

So tokens of equal logits are kept or dropped together. Both conditions say that x_i reaches a threshold, which is found
digit by digit: floats compare like integers once negative ones are turned round, and each pass over the row settles the
next two bits. The draw inverts the distribution function in vocabulary order at `uniform`, one number a row that the
caller draws, so that a request's tokens do not depend on its neighbours in the batch.

A row is read about 20 times from the L2 cache (16-bit logits); what it needs beside the logits is a few registers.

**Sources:** radix select (Alabi et al., 2012) as in vLLM's Triton top-k / top-p; top-p: Holtzman et al. (arXiv:1904.09751).
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from .launch import Launch, next_power_of_2
from .paged import LOG2E
from .sampling import SampleCall, key_bits

NONE = tl.constexpr(2147483647)
"""Larger than any index."""


@triton.jit
def sortable(x):
    """float32 to uint32 in the same order; +0 and -0 are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def chunk_of(row_ptr, start, vocab_size, BLOCK: tl.constexpr):
    """(indices, logits in float32) of one chunk; beyond the vocabulary -inf."""
    index = start + tl.arange(0, BLOCK)
    return index, tl.load(row_ptr + index, mask=index < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def mass(row_ptr, vocab_size, floor, maximum, rate, BLOCK: tl.constexpr):
    """Sum of the weights of all logits whose key is at least `floor`."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        _, x = chunk_of(row_ptr, start, vocab_size, BLOCK)
        total += tl.where(sortable(x) >= floor, tl.exp2((x - maximum) * rate), 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def threshold(row_ptr, vocab_size, floor, target, maximum, rate,
              WEIGHTED: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The largest key t for which the logits of keys >= max(t, floor) count (or weigh, with WEIGHTED) at least `target`."""
    found = floor & 0
    for step in range(BITS // 2):
        unit = (found & 0) + 1
        unit = unit << (30 - 2 * step)
        sum1 = tl.zeros([BLOCK], tl.float32)
        sum2 = tl.zeros([BLOCK], tl.float32)
        sum3 = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab_size, BLOCK):
            index, x = chunk_of(row_ptr, start, vocab_size, BLOCK)
            key = sortable(x)
            if WEIGHTED:
                amount = tl.exp2((x - maximum) * rate)
            else:
                amount = tl.where(index < vocab_size, 1.0, 0.0)
            amount = tl.where(key >= floor, amount, 0.0)
            sum1 += tl.where(key >= found + unit, amount, 0.0)
            sum2 += tl.where(key >= found + 2 * unit, amount, 0.0)
            sum3 += tl.where(key >= found + 3 * unit, amount, 0.0)
        reached = (tl.sum(sum1, axis=0) >= target).to(tl.uint32)
        reached += (tl.sum(sum2, axis=0) >= target).to(tl.uint32)
        reached += (tl.sum(sum3, axis=0) >= target).to(tl.uint32)
        found += reached * unit
    return found


@triton.jit
def sample_kernel(
    logits_ptr,  # [num_rows, vocab_size]
    temperature_ptr,  # [num_rows] float32; 0 for greedy
    top_k_ptr,  # [num_rows] int32; 0 for all
    top_p_ptr,  # [num_rows] float32; 1 for all
    uniform_ptr,  # [num_rows] float32 in [0, 1)
    token_ptr,  # [num_rows] int64; written
    vocab_size,
    logits_stride,  # elements from a row to the next
    BITS: tl.constexpr,  # leading bits of a logit's float32 form that can differ from 0
    BLOCK: tl.constexpr,  # logits of a chunk
):
    """One program draws one token."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    temperature = tl.load(temperature_ptr + row)

    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_index = tl.full([BLOCK], NONE, tl.int32)
    broken = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        index, x = chunk_of(row_ptr, start, vocab_size, BLOCK)
        better = (x > best) | ((best_index == NONE) & (index < vocab_size))
        best_index = tl.where(better, index, best_index)
        best = tl.where(better, x, best)
        broken |= (x != x).to(tl.int32)
    maximum = tl.max(best, axis=0)
    token = tl.min(tl.where(best == maximum, best_index, NONE), axis=0)

    if temperature > 0.0:
        rate = LOG2E / temperature
        floor = (tl.zeros([1], tl.uint32)).sum()
        top_k = tl.load(top_k_ptr + row)
        if (top_k > 0) & (top_k < vocab_size):
            target = top_k.to(tl.float32)
            floor = threshold(row_ptr, vocab_size, floor, target, maximum, rate, False, BITS, BLOCK)
        top_p = tl.load(top_p_ptr + row)
        total = mass(row_ptr, vocab_size, floor, maximum, rate, BLOCK)
        if top_p < 1.0:
            target = tl.maximum(top_p * total, 1e-30)
            floor = threshold(row_ptr, vocab_size, floor, target, maximum, rate, True, BITS, BLOCK)
            total = mass(row_ptr, vocab_size, floor, maximum, rate, BLOCK)
        goal = tl.load(uniform_ptr + row) * total
        done = 0.0
        drawn = tl.full([BLOCK], NONE, tl.int32)
        last = tl.full([BLOCK], -1, tl.int32)
        for start in range(0, vocab_size, BLOCK):
            index, x = chunk_of(row_ptr, start, vocab_size, BLOCK)
            kept = (sortable(x) >= floor) & (x > float("-inf"))
            weight = tl.where(kept, tl.exp2((x - maximum) * rate), 0.0)
            reached = (done + tl.cumsum(weight, axis=0) > goal) & kept
            drawn = tl.minimum(drawn, tl.where(reached, index, NONE))
            last = tl.maximum(last, tl.where(kept, index, -1))
            done += tl.sum(weight, axis=0)
        # Rounding can leave the goal just above the last sum: then it is the last kept token.
        token = tl.min(drawn, axis=0)
        token = tl.where(token == NONE, tl.max(last, axis=0), token)
    finite = (maximum - maximum == 0.0) & (tl.max(broken, axis=0) == 0)
    token = tl.where(finite, token, -1)
    tl.store(token_ptr + row, token.to(tl.int64))


def sample_launch(call: SampleCall) -> Launch | None:
    """The launch that `sample` runs; None for no rows."""
    num_rows, vocab_size = call.logits.shape
    if num_rows == 0:
        return None
    return Launch(
        kernel=sample_kernel,
        grid=(num_rows,),
        arguments=(
            call.logits,
            call.temperature,
            call.top_k,
            call.top_p,
            call.uniform,
            call.tokens,
            vocab_size,
            call.logits.stride(0),
        ),
        constants={
            "BITS": key_bits(call.logits.dtype),
            "BLOCK": min(8192 // call.logits.element_size(), max(32, next_power_of_2(vocab_size))),
        },
        num_warps=8 if vocab_size >= 2048 else 4,
    )


def sample(call: SampleCall) -> Any:
    """Draw one token a row. Writes `call.tokens` only."""
    launch = sample_launch(call)
    if launch is not None:
        launch.run()
    return call.tokens
