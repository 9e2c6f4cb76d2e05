"""Progress: what the steps that were done have brought the requests outside the decode set, which counts its own; and who has reached
its end.
"""

from __future__ import annotations

from .draft import Draft
from .plan import StepResult
from .request import Request, State
from .scheduler import Scheduler


def charge_slots(scheduler: Scheduler, draft: Draft, computed: bool, total_fs: int) -> int:
    """Charge those outside the decode set for the slots that they fill while the steps take `total_fs`; returns those slots."""
    filled = 0
    for order, request in scheduler.catching_up.items():
        share = draft.shares.get(order)
        tokens = request.num_computed_tokens + (share.num_tokens if share and computed else 0)
        slots = scheduler.decode.slots_filled(request, tokens)
        request.token_fs += slots * total_fs
        filled += slots
    for request in scheduler.departing.values():
        slots = scheduler.decode.slots_filled(request, request.num_computed_tokens)
        request.token_fs += slots * total_fs
        filled += slots
    if scheduler.offload is not None:
        filled += sum(loading.filled_slots for loading in scheduler.offload.loads.waiting.values())
    return filled


def reached_end(scheduler: Scheduler, result: StepResult) -> dict[int, Request]:
    """Who has all its tokens, by admission order. Raises ValueError for a result that stops somebody who got no token."""
    decode = scheduler.decode
    finished = {request.order: request for request in decode.completed()}
    finished |= {
        r.order: r for r in scheduler.catching_up.values() if r.num_tokens >= r.target_tokens and r.ended_fs is None
    }
    for request_id in result.stopped:
        if (stopped := scheduler.requests.get(request_id)) is None:
            continue  # its client left during the step: this output comes too late
        if stopped.state is not State.RUNNING or decode.known(stopped) <= stopped.spec.input_tokens:
            raise ValueError(f"the result says that {request_id!r} stopped, but it got no token in this plan")
        finished[stopped.order] = stopped
    return finished


def count_shares(scheduler: Scheduler, draft: Draft, now_fs: int) -> None:
    """Count what was computed outside the decode set, and the tokens that were sampled from it."""
    for share in draft.shares.values():
        request, samples = share.request, share.samples
        share.count()
        if not samples:
            continue
        request.num_tokens += 1
        if request.first_token_fs is None:
            request.first_token_fs = now_fs
            scheduler.backlog_tokens -= request.spec.input_tokens
            scheduler.drain.prompt_done(now_fs, request.arrival_fs, request.spec.input_tokens)
        elif request.last_token_fs is not None:
            request.other_gaps_fs.append(now_fs - request.last_token_fs)
        request.last_token_fs = now_fs
        if request.spec.forking is not None and scheduler.families.got_token(request):
            continue  # it goes on when it is known which of its family do
        if request.num_tokens < request.target_tokens:
            del scheduler.catching_up[request.order]
            scheduler.decode.join(request)
