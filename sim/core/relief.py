"""What the degradation ladder does to requests, once a rung is on. Each effect is noted on the request it touches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .blocks import NO_BLOCK
from .draft import Draft
from .preemption import worst_priority
from .request import Request

if TYPE_CHECKING:
    from .scheduler import Scheduler


def is_paused(scheduler: Scheduler, request: Request) -> bool:
    """Whether the ladder keeps this request out; never when nothing runs, or it would be kept out for ever."""
    return (
        bool(scheduler.running)
        and not scheduler.knobs.admit_below_guard
        and not scheduler.knobs.spares(request.spec.priority)
    )


def cap_output(scheduler: Scheduler, request: Request, output_tokens: int, action: str) -> None:
    """Let a request finish after `output_tokens` tokens, or its next one, if that is sooner than it would."""
    target = max(request.spec.input_tokens + output_tokens, scheduler.decode.known(request) + 1)
    if target < request.target_tokens:
        request.degrade(action)
        if request.decoding:
            scheduler.decode.retarget(request, target)
        else:
            request.target_tokens = target


def truncate_context(scheduler: Scheduler, request: Request, keep_tokens: int, now_fs: int) -> list[int]:
    """Give up a running request's blocks between its first and its last `keep_tokens` tokens; returns them.

    What is left is an attention sink and a window (StreamingLLM, Xiao et al. 2024); the answer changes, and the request says so.
    """
    keep_from_token = max(scheduler.decode.computed(request) - keep_tokens, 0)
    middle: list[int] = []
    tokens = 0
    for group, table in zip(scheduler.config.groups, request.table.groups, strict=True):
        keep_from = keep_from_token // group.block_size
        inside = [block_id for block_id in table.blocks[1:keep_from] if block_id != NO_BLOCK]
        if inside:
            middle += inside
            tokens = max(tokens, len(inside) * group.block_size)
            table.blocks[1:keep_from] = [NO_BLOCK] * (keep_from - 1)
    if not middle:
        return []
    scheduler.pool.release(middle, f"{request.request_id} (truncated)")
    scheduler.holdings.gave_back(request, middle, now_fs)
    request.degrade("truncate")
    if request.decoding:
        scheduler.decode.drop(request, tokens, len(middle))
    else:
        request.dropped_tokens += tokens
    return middle


def pause_running(scheduler: Scheduler, usage: float, action: str, draft: Draft, now_fs: int) -> None:
    """Take the blocks of running requests below the guard, least important first, until at most `usage` of the pool is owned."""
    while scheduler.pool.num_owned > usage * scheduler.pool.num_blocks:
        below = {o: r for o, r in scheduler.running.items() if not scheduler.knobs.spares(r.spec.priority)}
        if not below or len(scheduler.running) == 1:
            return
        group = scheduler.families.moving_with(worst_priority(below, scheduler.decode.known))
        if action == "swap_out" and scheduler.swapping.cpu_pool.num_free < scheduler.swapping.most_blocks(group):
            return
        for victim in group:
            victim.degrade(action)
        scheduler.shortage.give_way(group, draft, now_fs)
