"""Looking ahead: what a step is made of, how often it repeats itself, and which tables its repetitions will see."""

from __future__ import annotations

from .batch_shape import BatchShape
from .draft import Draft
from .log import Decisions
from .plan import ScheduledRequest
from .scheduler import Scheduler


def shape_of(draft: Draft, scheduler: Scheduler, decisions: Decisions) -> BatchShape:
    """The sizes of a drafted step, with the copies and swaps of all drafts that led to it."""
    decode = scheduler.decode
    prefill: list[tuple[int, int]] = []
    seqs = sampled = len(decode) if draft.decode else 0
    context = decode.context_tokens if draft.decode else 0
    longest = decode.max_context_tokens if draft.decode else 0
    for share in draft.shares.values():
        sampled += share.samples
        if share.num_tokens == 1 and share.context_tokens and share.samples:
            seqs += 1
            read = share.context_tokens + 1 - share.request.dropped_tokens
            context += read
            longest = max(longest, read)
        else:
            prefill.append((share.num_tokens, share.context_tokens))
    return BatchShape(
        prefill=tuple(prefill),
        decode_seqs=seqs,
        decode_context_tokens=context,
        decode_max_context_tokens=longest,
        sampled_seqs=sampled,
        copied_blocks=len(decisions.copied),
        swapped_blocks=sum([len(pairs) for _, pairs in (*decisions.swapped_out, *decisions.swapped_in)]),
    )


def steps_alike(draft: Draft, scheduler: Scheduler, room: int, taken: int | None, max_steps: int | None) -> int:
    """How often a drafted step repeats itself before a decision could differ, if nothing arrives and nobody leaves.

    `room` is by how many blocks the pool may get fuller before something else than the pool would decide differently, and `taken` how many
    may be taken, whatever comes back meanwhile; None for any number. While members of the
    decode set only grow, the pool only gets fuller, so a request that cannot start now cannot start later in the stretch:
    evicting a cached block it would have found costs it a hit and saves it a revival. Where windows slide, the pool may also get
    emptier: the stretch ends before whoever waits has the blocks that it lacks, and before a block that it would find is taken (then it
    may find others, which cost it less). Where prompts go first, they are tried between what slides and what is taken.
    """
    stands_still = not scheduler.catching_up and scheduler.steady
    if draft.shares or draft.changed_queue or draft.decodes_rest or not (stands_still or draft.turn_left):
        return 1
    limit = scheduler.decode.steps_to_completion() or 1
    loaded = scheduler.offload is not None and bool(scheduler.offload.loads.ready)
    if draft.turn_left and (scheduler.catching_up or len(scheduler.waiting) or scheduler.swapping.swapped or loaded):
        limit = min(limit, draft.turn_left)  # then it is the turn of those
    if not draft.turn_left:
        limit = min(limit, scheduler.steps_of_no)
    if max_steps is not None:
        limit = min(limit, max_steps)
    if scheduler.families:
        limit = scheduler.families.steps_to_next(limit)
    if taken is not None:
        limit = 1 + scheduler.growth.steps_taking(taken, limit - 1)
    growth, pool, blocked = scheduler.growth, scheduler.pool, scheduler.starts.blocked
    spare = None
    if blocked is not None and growth.slides:
        if blocked.hits is None:
            return 1
        if blocked.hits:
            untouched = pool.untouched(blocked.hits, growth.most_taken(limit - 1))
            limit = 1 + growth.steps_taking(untouched, limit - 1)
        spare = max(blocked.need - pool.num_free - 1, 0)
    return 1 + growth.steps_that_fit(
        min(room, pool.num_free), limit - 1, emptier_by=spare, before_taking=scheduler.prompts_first
    )


def scheduled_in(ahead: int, draft: Draft, scheduler: Scheduler) -> tuple[ScheduledRequest, ...]:
    """The requests of step `ahead` of the plan that is out, in running order, with the tables they will have then."""
    decode = scheduler.decode
    tables_of = scheduler.growth.tables_in(ahead)
    scheduled = []
    for order, request in scheduler.running.items():
        if request.decoding and draft.decode:
            num_tokens, context, samples = 1, decode.computed(request) + ahead, True
        elif (share := draft.shares.get(order)) is not None:
            num_tokens, context, samples = share.num_tokens, share.context_tokens, share.samples
        else:
            continue
        tables = tables_of(request)
        scheduled.append(
            ScheduledRequest(
                request.request_id, num_tokens, context, tables[0], samples, tables if len(tables) > 1 else ()
            )
        )
    return tuple(scheduled)


def log_rows(draft: Draft, scheduler: Scheduler, grown: dict[int, list[int]]) -> list[tuple[str, int, list[int]]]:
    """`[request_id, num_tokens, new_block_ids]` of everybody in a step, in running order; `grown` are the decode set's new blocks."""
    rows = []
    for order, request in scheduler.running.items():
        if request.decoding and draft.decode:
            rows.append((request.request_id, 1, grown.get(order, [])))
        elif (share := draft.shares.get(order)) is not None:
            rows.append((request.request_id, share.num_tokens, share.new_blocks))
    return rows
