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
    holders = list(scheduler.holders())
    scheduler.pool.check((request.request_id, request.table.blocks) for request in holders)
    on_cpu = () if scheduler.cpu_server is None else (*scheduler.cpu_server.serving, *scheduler.cpu_server.leaving)
    scheduler.swapping.cpu_pool.check(
        (request.request_id, request.cpu_blocks) for request in (*scheduler.swapping.swapped, *on_cpu)
    )
    for order, request in scheduler.running.items():
        tokens = decode.computed(request)
        if draft is not None:
            share = draft.shares.get(order)
            tokens += share.num_tokens if share is not None else int(request.decoding and draft.decode)
        for group, table in zip(scheduler.config.groups, request.table.groups, strict=True):
            expected = blocks_for(tokens, group.block_size)
            if len(table) != expected:
                raise IntegrityError(
                    f"{request.request_id} has {len(table)} blocks for {tokens} tokens, which need {expected}"
                )
        if draft is not None and tokens > decode.computed(request) and not request.dropped_tokens:
            live = scheduler.config.blocks_at(decode.computed(request), tokens)
            if request.held_blocks != live:
                raise IntegrityError(
                    f"{request.request_id} holds {request.held_blocks} blocks while it computes its tokens "
                    f"{decode.computed(request)} to {tokens}, which need {live} outside skipped windows"
                )
    table_blocks = sum(request.held_blocks for request in holders)
    if scheduler.holdings.table_blocks != table_blocks:
        raise IntegrityError(f"{table_blocks} table entries exist, {scheduler.holdings.table_blocks} are counted")
    filled = sum(
        decode.slots_per_token * decode.computed(request)
        - decode.slots_per_block * (len(request.table) - request.held_blocks)
        for request in decode
    )
    if decode.filled_slots != filled:
        raise IntegrityError(f"the decode set has {filled} filled slots, {decode.filled_slots} are counted")
    in_system = (
        len(scheduler.running) + len(scheduler.waiting) + len(scheduler.swapping.swapped) + scheduler.families.num_held
    )
    in_system += len(on_cpu)
    if scheduler.offload is not None:
        scheduler.offload.tier.check()
        in_system += len(scheduler.offload.loads.waiting)
    if in_system != num_unfinished:
        raise IntegrityError(f"{num_unfinished} requests are in the system, but {in_system} are running or waiting")
