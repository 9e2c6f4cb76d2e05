"""The audit: do the engine's books add up? Asked after every event of a checked run (I1 to I5)."""

from __future__ import annotations

from .blocks import IntegrityError
from .draft import Draft
from .need import blocks_for
from .scheduler import Scheduler


def check_books(scheduler: Scheduler, draft: Draft | None, num_unfinished: int) -> None:
    """Verify pools, tables and counts against each other; `draft` is the step under way, if any.

    Raises IntegrityError naming the blocks or requests that are wrong.
    """
    decode = scheduler.decode
    scheduler.pool.check((request.request_id, request.table.blocks) for request in scheduler.holders())
    scheduler.cpu_pool.check((request.request_id, request.cpu_blocks) for request in scheduler.swapped)
    for order, request in scheduler.running.items():
        tokens = decode.computed(request)
        if draft is not None:
            share = draft.shares.get(order)
            tokens += share.num_tokens if share is not None else int(request.decoding and draft.decode)
        expected = blocks_for(tokens, scheduler.config.block_size)
        if len(request.table) != expected:
            raise IntegrityError(
                f"{request.request_id} has {len(request.table)} blocks for {tokens} tokens, which need {expected}"
            )
    table_blocks = sum(request.held_blocks for request in scheduler.holders())
    if scheduler.holdings.table_blocks != table_blocks:
        raise IntegrityError(f"{table_blocks} table entries exist, {scheduler.holdings.table_blocks} are counted")
    computed = sum(decode.computed(request) - request.dropped_tokens for request in decode)
    if decode.computed_tokens != computed:
        raise IntegrityError(f"the decode set has {computed} tokens, {decode.computed_tokens} are counted")
    in_system = len(scheduler.running) + len(scheduler.waiting) + len(scheduler.swapped)
    if scheduler.offload is not None:
        scheduler.offload.tier.check()
        in_system += len(scheduler.offload.loading)
    if in_system != num_unfinished:
        raise IntegrityError(f"{num_unfinished} requests are in the system, but {in_system} are running or waiting")
