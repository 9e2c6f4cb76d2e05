"""Moving a running request from one device to another: its KV block by block, its tokens by the book that both share.

A request that is taken off a GPU under pressure and goes on beside it, on the CPU, must go on exactly where it was. Both pools
keep the same bytes a block; where they lie in an arena may differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sim.core.blocks import NO_BLOCK

from .pool import PagedKVPool


class HandoverError(ValueError):
    """Two pools between which a block's bytes mean something else, or tables that do not match. Says what differs."""


def hand_over(
    owner: str,
    source: PagedKVPool,
    source_table: Sequence[int],
    target: PagedKVPool,
    target_table: Sequence[int],
    context_tokens: int,
    *,
    release: bool = True,
) -> None:
    """Copy the first `context_tokens` tokens' KV of `owner` into blocks of another pool, and give the source's blocks back (without
    `release`, somebody else does).

    The target's blocks are held by `owner` from here on. NO_BLOCK in the source's table must stand at the same places in the target's.
    The copy is complete on return, whatever the devices.

    Raises:
        HandoverError: the pools' layouts, or the tables, do not match; nothing is changed.
        ForeignReadError: `owner` does not hold the source's blocks.
        FenceError: a block of the target has a reader that is not done (checked mode).
    """
    _check(source, source_table, target, target_table, context_tokens)
    source.check_read(owner, source_table)
    target.assign(owner, target_table, context_tokens)
    written = -(-context_tokens // source.layout.block_size)
    pairs = [pair for pair in zip(source_table[:written], target_table[:written], strict=True) if pair[0] != NO_BLOCK]
    if pairs:
        sources, targets = (torch.tensor(ids) for ids in zip(*pairs, strict=True))
        taken = source.rows.strided[sources.to(source.device)].to(target.device)
        target.rows.strided[targets.to(target.device)] = taken
        for pool in (source, target):
            if pool.device.type == "cuda":
                torch.cuda.synchronize(pool.device)
    if release:
        source.release(owner, [block for block in source_table if block != NO_BLOCK])


def _check(
    source: PagedKVPool,
    source_table: Sequence[int],
    target: PagedKVPool,
    target_table: Sequence[int],
    context_tokens: int,
) -> None:
    for name in ("num_layers", "num_kv_heads", "head_dim", "block_size", "storage"):
        here, there = getattr(source.layout, name), getattr(target.layout, name)
        if here != there:
            raise HandoverError(f"{name} is {here} in the pool a request leaves and {there} in the one it comes to")
    written = -(-context_tokens // source.layout.block_size)
    if min(len(source_table), len(target_table)) < written or any(
        (here == NO_BLOCK) != (there == NO_BLOCK)
        for here, there in zip(source_table[:written], target_table[:written], strict=True)
    ):
        raise HandoverError(
            f"{context_tokens} tokens are {written} blocks, but the tables are {list(source_table)} and {list(target_table)}"
        )
