"""Fixes that are a change of behaviour rather than a number, by cause."""

from __future__ import annotations

from collections.abc import Mapping

from .diagnosis import Cause, Fix

TEXTS: Mapping[Cause, tuple[Fix, ...]] = {
    Cause.KERNEL_FALLBACK: (
        Fix(
            change="an attention backend that never holds [heads, S, S] (--attention-backend FLASH_ATTN; in PyTorch: no "
            "dense mask, no enable_gqa with a mask)",
            basis="the scores then take no memory that grows with the square",
        ),
        Fix(
            change="--enable-chunked-prefill with a smaller --max-num-batched-tokens",
            basis="scores grow with chunk x length instead of length squared",
        ),
    ),
    Cause.LEAK: (
        Fix(
            change="release on every path (finish, cancel, time-out, error), and check the books when idle",
            basis="slots or tensors stay behind",
        ),
    ),
    Cause.DOUBLE_RELEASE: (
        Fix(
            change="release once: the second release must be refused and name the first",
            basis="a slot given back twice is given out twice",
        ),
    ),
    Cause.RESERVED_ONLY: (
        Fix(
            change="torch.cuda.empty_cache() when idle, or PYTORCH_ALLOC_CONF=expandable_segments:True",
            basis="cached segments go back to the device; no tensor is in them",
        ),
    ),
    Cause.KV_DUPLICATION: (
        Fix(
            change="share the KV instead of copying it (prefix caching; copy-on-write for beams and n > 1)",
            basis="copies beyond the first are given back",
        ),
    ),
    Cause.LATE_RELEASE: (
        Fix(
            change="release blocks when a request ends or is cancelled, not at the next batch or time-out",
            basis="memory then falls with the load",
        ),
    ),
    Cause.BLOCK_USE: (
        Fix(
            change="a paged pool with small blocks (--block-size 16) instead of a reservation a sequence",
            basis="waste is then at most a block a sequence",
        ),
    ),
    Cause.RESERVATION: (
        Fix(
            change="set max_tokens in requests, or a policy that does not reserve the longest output "
            "(TensorRT-LLM: MAX_UTILIZATION)",
            basis="reservation-bound, not memory-bound",
        ),
    ),
    Cause.BLOCKED: (
        Fix(
            change="reject requests that can never fit (--max-model-len at most the pool's tokens), "
            "and give waiting states a deadline",
            basis="nothing runs while something waits",
        ),
    ),
    Cause.KERNEL_LIMIT: (
        Fix(
            change="a smaller tile or fewer stages for that kernel, or another attention backend",
            basis="no GPU memory is missing",
        ),
    ),
    Cause.HOST_MEMORY: (
        Fix(change="less swap or offload space, fewer workers, or more host memory", basis="the GPU is not involved"),
    ),
}
"""In the order in which to try them."""
