"""Starts: who of the waiting begins to run in the step that is drafted.

Those whose prefix has been loaded hold their blocks already and go first, then the swapped, then the head of the queue, as long as the
budgets last. The head is never overtaken, but by important requests while the ladder keeps it out.
Source: vLLM V1 `Scheduler.schedule`, waiting pass (engine-policies §1.1.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from .admission import Admission, Deferral, Rejection
from .batching import is_prompt
from .blocks import NO_BLOCK
from .config import ConfigError
from .draft import Draft, Share
from .loads import Loading
from .look import RequestLook
from .offload import Offload
from .relief import cap_output, is_paused
from .request import Request
from .tables import BlockTables

if TYPE_CHECKING:
    from .scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Blocked:
    """Why whoever is first cannot start in this step, in blocks."""

    need: int
    """Blocks without which it cannot start, whatever else changes; 0 if that is not known."""
    hits: Sequence[int] | None
    """What it found in the prefix cache; None if more than that matters."""


class Starts:
    """Takes requests out of the queues of a scheduler and gives them their first blocks."""

    def __init__(self, scheduler: Scheduler, tables: BlockTables, admission: Admission) -> None:
        self._scheduler = scheduler
        self._tables = tables
        self._admission = admission
        self.blocked: Blocked | None = None
        """Of the step that is drafted: who was tried last and lacks blocks. None if nobody does: then the next steps, in which budgets
        and slots are the same, try nobody either.
        """

    def admit(self, draft: Draft, now_fs: int) -> None:
        """Let the swapped back in, then start whoever is first in the queue, as long as the budgets last.

        Before both go those whose prefix has been loaded: they hold their blocks already.
        """
        scheduler = self._scheduler
        slots = scheduler.config.max_num_seqs - len(scheduler.departing)
        while scheduler.offload is not None and scheduler.offload.loads.ready:
            if not draft.budget or len(scheduler.running) >= slots:
                return
            if not self._start_loaded(scheduler.offload.loads.ready[0], draft, now_fs):
                return
        while (
            swapped := next((each for each in scheduler.swapping.swapped if not is_paused(scheduler, each)), None)
        ) is not None:
            if not draft.budget or len(scheduler.running) >= slots or not self._resume(swapped, draft, now_fs):
                return  # nobody else may take what the swapped are waiting for
        if scheduler.aside is not None and draft.budget and len(scheduler.running) < slots:
            scheduler.aside.begin_round()
        while draft.budget and len(scheduler.running) < slots:
            request = self._next()
            if request is None or not self._try_start(request, draft, now_fs):
                return

    def _next(self) -> Request | None:
        """Who is to be tried next. While the ladder keeps the unimportant out, those that stand before are passed over; the first of them
        hears of it.
        """
        waiting = self._scheduler.waiting
        request = waiting.head()
        if request is None or not is_paused(self._scheduler, request):
            return request
        request.degrade("pause_admission")
        return waiting.head(important=True)

    def _resume(self, request: Request, draft: Draft, now_fs: int) -> bool:
        """Bring back a swapped request, if its blocks and those of its next tokens are free; with it those that it moved with. They come
        back together, or, if there is not room for all of them though nothing runs, one by one.
        """
        scheduler = self._scheduler
        if outgrown := scheduler.serving.outgrown(request, *scheduler.serving.next_need(request, draft.budget)):
            scheduler.swapping.drop(request)
            draft.unservable.append((request, outgrown))
            return True
        group = scheduler.families.swapped_with(request)
        if len(group) > 1:
            room = scheduler.config.max_num_seqs - scheduler.num_slots_taken
            fits = len(group) <= min(room, scheduler.allowed(request, draft))
            fits = fits and sum(map(is_prompt, group)) <= draft.prompts_left
            if fits and scheduler.swapping.bring_back(group, [1] * len(group), draft, now_fs):
                return True
            if scheduler.running:
                self.blocked = Blocked(0, ())
                return False
        missing = request.num_tokens - request.num_computed_tokens
        num_tokens = min(missing, scheduler.allowed(request, draft))
        if not num_tokens:
            return False
        self.blocked = Blocked(0, ())
        return scheduler.swapping.bring_back([request], [num_tokens], draft, now_fs)

    def _try_start(self, request: Request, draft: Draft, now_fs: int) -> bool:
        """Start the head of the queue, or send it away; False leaves it where it is."""
        scheduler = self._scheduler
        config, tables = scheduler.config, self._tables
        if outgrown := scheduler.serving.outgrown(
            request, request.num_tokens, scheduler.holdings.whole_blocks(request)
        ):
            scheduler.waiting.pop(request)  # preempted at a length at which it could not come back
            draft.unservable.append((request, outgrown))
            return True
        hits = scheduler.holdings.find(request)
        if request.spec.forking is not None and scheduler.running and not self._fits_with_others(request):
            self.blocked = Blocked(0, None)
            return False
        if (
            scheduler.offload is not None
            and (tried := self._load(scheduler.offload, request, hits, draft, now_fs)) is not None
        ):
            return tried
        hit_tokens = tables.tokens_in(hits)
        missing = request.num_tokens - hit_tokens
        allowed = scheduler.allowed(request, draft)
        if not allowed or (missing > allowed and not self._may_cut(draft)):
            return False
        num_tokens = min(missing, allowed)
        if scheduler.holdings.windows:
            num_tokens = scheduler.holdings.fitting(hit_tokens, num_tokens)
            least = config.blocks_at(hit_tokens, hit_tokens + num_tokens)
            if outgrown := scheduler.serving.outgrown(request, hit_tokens + num_tokens, least):
                scheduler.waiting.pop(request)  # not even a token at a time
                draft.unservable.append((request, outgrown))
                return True
        first = need = tables.need(request.table, 0, num_tokens, hits)
        if config.reserve_full_prompt:
            need = max(need, scheduler.holdings.prompt_blocks(request, hits))
        may_start = self._may_start(request, need, draft, now_fs)
        if may_start is None:
            return True
        allocation = tables.grow(request.table, 0, num_tokens, hits) if may_start else None
        if allocation is None:
            self.blocked = Blocked(first if may_start else need, hits)
            return False
        scheduler.waiting.pop(request)
        scheduler.run(request, now_fs)
        request.num_computed_tokens = hit_tokens
        request.num_registered = hit_tokens // config.block_size
        taken = request.table.blocks
        scheduler.holdings.hold(request, len(taken) - taken.count(NO_BLOCK), now_fs)
        if hits:
            scheduler.holdings.sharing.join(request, tables.split(hits), now_fs)
            if scheduler.offload is not None:
                scheduler.offload.saves.used(hits)
        self._begin(request, num_tokens, hit_tokens, hit_tokens, draft)
        return True

    def _may_cut(self, draft: Draft) -> bool:
        """Whether a prompt that starts now may be computed in part."""
        scheduler = self._scheduler
        return scheduler.config.enable_chunked_prefill and not (scheduler.cuts_first_only and draft.shares)

    def _fits_with_others(self, request: Request) -> bool:
        """Whether there is room for all that gave way with a request, those that they will share counted once."""
        scheduler = self._scheduler
        group = scheduler.families.waiting_with(request)
        if len(group) < 2:
            return True
        need, taken = 0, set[int]()
        for each in group:
            hits = scheduler.holdings.find(each)
            need += scheduler.holdings.whole_blocks(each) - len(hits)
            taken.update(block_id for block_id in hits if block_id != NO_BLOCK and not scheduler.pool.ref_cnt(block_id))
        room = scheduler.config.max_num_seqs - scheduler.num_slots_taken
        return len(group) <= room and need + len(taken) <= scheduler.pool.num_free

    def _may_start(self, request: Request, need: int, draft: Draft, now_fs: int) -> bool | None:
        """What the admission policy says of the head of the queue; None if that took it out of the line, aside or away."""
        scheduler = self._scheduler
        said: bool | Rejection | Deferral | None = self._admission.may_start(
            RequestLook(request), need, scheduler.view_at(now_fs)
        )
        if isinstance(said, Deferral):
            if scheduler.aside is None:
                raise ConfigError(
                    f"the admission policy defers {request.request_id!r} ({said.reason}), but its may_defer is not True; set it"
                )
            said = scheduler.aside.set_aside(request, said, scheduler.view.now_fs)
        elif not isinstance(said, Rejection):
            return bool(said)
        if said is not None:
            scheduler.waiting.pop(request)
            draft.turned_away.append((request, said))
        return None

    def _begin(self, request: Request, num_tokens: int, computed: int, hit_tokens: int, draft: Draft) -> None:
        """Schedule the first tokens of a request after what is `computed` already; the first time, count what it hit on the device."""
        scheduler = self._scheduler
        cap = scheduler.knobs.cap_new
        if cap is not None and not scheduler.knobs.spares(request.spec.priority):
            cap_output(scheduler, request, cap, "cap_new")
        if not request.num_preemptions and not request.computed_high:
            request.prefix_hit_tokens = hit_tokens
            scheduler.prefix_queried_tokens += request.num_tokens
            scheduler.prefix_hit_tokens += hit_tokens
        scheduler.take(request, num_tokens, draft)
        draft.admitted.append(request)
        draft.shares[request.order] = Share(request, num_tokens, computed, request.table.blocks.copy())
        scheduler.holdings.register(request, computed + num_tokens)

    def _load(self, offload: Offload, request: Request, hits: list[int], draft: Draft, now_fs: int) -> bool | None:
        """Load the prefix of the head of the queue from the CPU tier; False: it must wait; None: there is nothing to load."""
        scheduler = self._scheduler
        loads = offload.loads
        reach = loads.find(request, hits)
        if reach is None or reach.moving:
            return None if reach is None else False
        needed = loads.need(request, reach)
        if needed is None:
            return None
        lengths, need = needed
        may_start = self._may_start(request, need, draft, now_fs)
        if may_start is None:
            return True
        if not may_start or need > scheduler.pool.num_free:
            return False
        scheduler.waiting.pop(request)
        scheduler.num_admissions += 1
        offload.saves.used(chain.from_iterable(reach.hits))
        loads.begin(request, reach, lengths, now_fs)
        return True

    def _start_loaded(self, loading: Loading, draft: Draft, now_fs: int) -> bool:
        """Start a request whose load has ended, with what it could load; False leaves it where it is."""
        scheduler = self._scheduler
        assert scheduler.offload is not None
        request, computed = loading.request, loading.request.num_computed_tokens
        missing = request.num_tokens - computed
        num_tokens = min(missing, scheduler.allowed(request, draft))
        if not num_tokens or (num_tokens < missing and not self._may_cut(draft)):
            return False
        scheduler.offload.loads.leave(loading, now_fs)
        spare = self._tables.truncate(request.table, computed + num_tokens, f"{request.request_id} (not needed yet)")
        scheduler.holdings.hold(request, -len(spare), now_fs)
        scheduler.run(request, now_fs)
        self._begin(request, num_tokens, computed, loading.reach.hit_tokens, draft)
        return True

    def admits_copy(self, request: Request, now_fs: int) -> bool:
        """Whether a request that would share another one's blocks, and need one of its own in each group next, may run now."""
        scheduler = self._scheduler
        if scheduler.num_slots_taken >= scheduler.config.max_num_seqs or is_paused(scheduler, request):
            return False
        groups = len(scheduler.config.groups)
        said = self._admission.may_start(RequestLook(request), groups, scheduler.view_at(now_fs))
        return bool(said) and not isinstance(said, Rejection | Deferral)
