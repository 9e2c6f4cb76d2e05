"""Continuous batching: who computes how many tokens in the next step.

Running requests are served first, in admission order, one token each; then prompts still being computed; then, if nobody
had to give way, waiting requests are admitted while the token, sequence and block budgets last. The head of the queue is
never overtaken. When blocks run out, running requests give theirs up and are swapped back in, or recomputed, later.
Source: vLLM V1 `Scheduler.schedule` (engine-policies §1.1.2); for the other batchings see `policy.Batching`.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from .admission import FOREVER, Admission
from .batching import DECODE_STEPS, NO_LIMITS, check_batching, is_prompt, rest_prompts
from .config import EngineConfig
from .cpu_server import CpuServer
from .decode import DecodeSet
from .deferral import QueueWithAside
from .draft import Draft
from .families import Families
from .growth import Growth
from .holdings import Holdings
from .ladder import Knobs
from .meters import DrainMeter
from .offload import Offload
from .own_policies import own_queue
from .policy import Batching, Policy
from .request import Request, State
from .serving import Serving
from .shedding import BelowGuard
from .shortage import Shortage
from .sliding_growth import GroupGrowth
from .starts import Starts
from .swapping import Swapping
from .tables import BlockTables
from .view import EngineView


class Scheduler:
    """Holds the queue and the running requests, and drafts one step at a time."""

    def __init__(self, config: EngineConfig, tables: BlockTables, admission: Admission, policy: Policy) -> None:
        check_batching(policy.batching, policy.limits, config)
        self.config = config
        self.pool = tables.pool
        self._tables = tables
        self._admission = admission
        self._policy = policy
        self.limits = policy.limits if policy.limits != NO_LIMITS else None
        self.steps_done = 0
        """Steps committed."""
        self.cuts_first_only = policy.cuts_first_only
        self._decodes_until = 0
        """The number of the step from which on prompts may have one again, where they take turns with decodes."""
        self.num_admissions = 0
        """Admissions so far; the next one gets this as its order."""
        self.swapping = Swapping(self)
        """Saves requests in the CPU pool, and brings them back."""
        self.decode = DecodeSet(config.block_size, config.slots_per_block, config.slots_per_token)
        self.requests: dict[str, Request] = {}
        """Everybody in the system, by name; the engine keeps it."""
        self.running: dict[int, Request] = {}
        """Admitted requests by admission order; the oldest comes first."""
        self.catching_up: dict[int, Request] = {}
        """Those of them with more to compute than the decode set's one token, or that missed a step."""
        self.knobs = Knobs()
        """What the degradation ladder has turned."""
        self.departing: dict[int, Request] = {}
        """Asynchronous scheduling: who reached its length in the step before this one, by admission order. It computes nothing more and
        cannot give way; its slot, and its blocks, which the step under way may still read, come back when that step is done."""
        self.num_unseen = 0
        """By how much more requests wait than the queues show, because the next plan may not know of them."""
        self.looks_back_fs = 0
        """How long ago what is now being planned was decided."""
        self.holdings = Holdings(config, tables, self.knobs, self.holders)
        self.holdings.retention = policy.retention if policy.eviction == "retention" else None
        self.offload = Offload(config, self.holdings) if config.num_cpu_prefix_blocks else None
        """The CPU prefix tier, if there is one."""
        self.holdings.offload = self.offload
        self.cpu_server: CpuServer | None = None
        """The CPU executor, if there is one."""
        if policy.cpu_executor is not None:
            policy.cpu_executor.check(config)
            self.cpu_server = CpuServer(policy.cpu_executor, self)
        self.growth = (
            GroupGrowth(self.decode, self.holdings, tables)
            if config.kv_groups or config.sliding_window is not None
            else Growth(self.decode, self.holdings)
        )
        self.families = Families(self)
        """Sequences that share blocks by forks."""
        self.token_cap: int | None = None
        """Most tokens a step may compute after a step ran out of memory; None for no cap beyond the budget."""
        self.drain = DrainMeter()
        self.viewed_at_fs = 0
        """What the view says the time is."""
        self.view = EngineView(self)
        self.waiting = own_queue(policy.queue(self.view))
        self.aside: QueueWithAside | None = None
        """The queue once more, if the admission policy sets requests aside."""
        if admission.may_defer:
            self.waiting = self.aside = QueueWithAside(self.waiting, self.view)
        self.below_guard = BelowGuard() if policy.ladder is not None and policy.ladder.counts_below_guard else None
        """Who of the waiting may be shed, if the ladder does that."""
        self.serving = Serving(self, tables)
        """Gives the running what they need, while blocks last."""
        self.shortage = Shortage(self, tables, admission, policy)
        """Finds victims when blocks are short."""
        self.starts = Starts(self, tables, admission)
        """Brings the waiting in."""
        self._running_changes = 0
        self.backlog_tokens = 0
        """Prompt tokens of all requests that have not got their first token."""
        self.prefix_queried_tokens = 0
        self.prefix_hit_tokens = 0
        """Prompt tokens looked up, and found, at first admissions; what a request finds of its own after a preemption does not count."""

    def holders(self) -> Iterable[Request]:
        """All requests that hold blocks: the running, those who did until just now, and those whose prefix is loaded."""
        loading: Iterable[Request] = () if self.offload is None else self.offload.loads.waiting
        return chain(self.running.values(), self.departing.values(), loading)

    @property
    def version(self) -> int:
        """Changes whenever the running requests, or those of them that decode steadily, change."""
        return self.decode.version + self._running_changes

    @property
    def num_queued(self) -> int:
        """Requests that hold no blocks and do not run: queued, swapped, or to start as a copy of another one."""
        return len(self.waiting) + len(self.swapping.swapped) + self.families.num_held + self.num_unseen

    @property
    def num_waiting(self) -> int:
        """Requests in the system that do not run: those, and those whose prefix is loaded."""
        if self.offload is None or not self.offload.loads.waiting:
            return self.num_queued
        return self.num_queued + sum(request.ended_fs is None for request in self.offload.loads.waiting)

    @property
    def num_slots_taken(self) -> int:
        """Sequence slots that nobody else can have now."""
        return len(self.running) + len(self.departing)

    @property
    def steady(self) -> bool:
        """Whether a queue that stands still now stands still until somebody comes or goes, so that decode steps can be leapt over, if the
        admission policy allows (`steps_of_no`).
        """
        if not len(self.waiting) or len(self.running) >= self.config.max_num_seqs:
            return True
        if self._policy.eviction != "lru" and not self.config.reserve_full_prompt:
            return (
                False  # a chunk's need falls by more than one when the head of its cached prefix goes before the rest
            )
        if self.growth.slides and self.offload is not None:
            return False  # a window's cached blocks may go, and those of another place, that a tier has, cost it less
        if self.growth.slides and self._policy.eviction != "lru" and self.starts.blocked is not None:
            return False  # which of the cached blocks that a window's head would find go, and when, is not known before
        return self.waiting.steady

    @property
    def steps_of_no(self) -> int:
        """For how many steps, the drafted one included, the admission policy need not be asked about the head of the queue again."""
        if not len(self.waiting) or len(self.running) >= self.config.max_num_seqs:
            return FOREVER
        return self._admission.steps_of_no(self.view)

    @property
    def prompts_first(self) -> bool:
        """Whether the waiting are tried before the running take their blocks."""
        return self._policy.batching in (Batching.PREFILL_FIRST, Batching.DECODE_FIRST)

    def draft(self, now_fs: int) -> Draft:
        """Decide the next step. Blocks are allocated; nothing else moves until the step is committed."""
        self.view_at(now_fs)
        self.starts.blocked = None
        draft = Draft(budget=self.step_budget(), resting=self.families.undecided)
        if self.growth.slides:
            draft.released += self.growth.slide(0, 0, now_fs)
        if self.knobs.step_share < 1.0 and not self._must_start_whole:
            draft.budget_below_guard = max(1, int(draft.budget * self.knobs.step_share))
        batching, limits = self._policy.batching, self.limits
        if limits is not None:
            draft.prompt_budget = limits.max_prefill_tokens or draft.prompt_budget
            draft.prompts_left = limits.max_prefill_seqs or draft.prompts_left
        if self._decodes_until > self.steps_done and self._decodes_alone(draft, now_fs):
            return draft
        if batching in (Batching.PREFILL_FIRST, Batching.DECODE_FIRST):
            draft.decode = False
            self.serving.serve_prompts(draft, now_fs)
            self.starts.admit(draft, now_fs)
            if draft.shares:
                if batching is Batching.DECODE_FIRST:
                    turn = self._policy.limits.continuous_decode_steps or DECODE_STEPS
                    self._decodes_until = self.steps_done + 1 + turn
                return draft
            draft.decode = True
        batch_is_open = batching is Batching.MIXED or (batching is Batching.STATIC and not self.running)
        self.serving.serve_running(draft, now_fs)
        if batch_is_open and not draft.short:
            self.starts.admit(draft, now_fs)
        return draft

    def _decodes_alone(self, draft: Draft, now_fs: int) -> bool:
        """A step of the decodes' turn; False if there is none to compute or anything else to do in it."""
        rest_prompts(self, draft)
        self.serving.serve_running(draft, now_fs)
        if len(self.decode) or draft.shares or draft.changed_queue or draft.blocks_come:
            draft.turn_left = self._decodes_until - self.steps_done
            return True
        draft.resting = self.families.undecided
        return False

    def step_budget(self) -> int:
        """Tokens a step may compute: the configured budget, or less after a step that ran out of memory."""
        budget = self.config.max_num_batched_tokens
        return budget if self.token_cap is None or self._must_start_whole else min(budget, self.token_cap)

    @property
    def _must_start_whole(self) -> bool:
        """Whether a smaller step could only mean that nothing starts: nothing runs, and prompts are not computed in pieces."""
        return not self.running and not self.config.enable_chunked_prefill

    def allowed(self, request: Request, draft: Draft) -> int:
        """Tokens this request may still take in the step; the ladder shrinks the prompts of those below its guard."""
        allowed = draft.budget
        if request.decoding:
            return allowed
        if self.limits is not None and is_prompt(request):
            allowed = min(allowed, draft.prompt_budget if draft.prompts_left else 0)
        if self.knobs.spares(request.spec.priority):
            return allowed
        if draft.budget_below_guard < draft.budget:
            request.degrade("shrink_step")
        return min(allowed, draft.budget_below_guard)

    def take(self, request: Request, num_tokens: int, draft: Draft) -> None:
        """Count tokens that a request gets in the step against its budgets."""
        draft.budget -= num_tokens
        if self.limits is not None and not request.decoding and is_prompt(request):
            draft.prompt_budget -= num_tokens
            draft.prompts_left -= 1
        if not request.decoding and not self.knobs.spares(request.spec.priority):
            draft.budget_below_guard -= num_tokens

    # -- bookkeeping shared with the engine -------------------------------------------------------------------------

    def run(self, request: Request, now_fs: int) -> None:
        """Put a request that has blocks among the running."""
        request.order = self.num_admissions
        self.num_admissions += 1
        self._running_changes += 1
        request.state = State.RUNNING
        self.running[request.order] = self.catching_up[request.order] = request
        if request.scheduled_fs is None and request.ended_fs is None:
            request.scheduled_fs = now_fs

    def catch_up(self, request: Request) -> None:
        """A running request has left the decode set, or got other blocks: it is served by itself in the next step."""
        self._running_changes += 1
        self.catching_up[request.order] = request
        self.catching_up = dict(sorted(self.catching_up.items()))

    def view_at(self, now_fs: int) -> EngineView:
        """The view for policies, at this time; while a step is planned ahead, at the time when that was decided."""
        self.viewed_at_fs = now_fs - self.looks_back_fs
        return self.view

    def retire(self, request: Request) -> None:
        """Take a running request out of the running set for good; its blocks are released separately."""
        if request.decoding:
            self.decode.leave(request)
        self.remove(request)

    def departed(self) -> None:
        """Somebody of `departing` is gone."""
        self._running_changes += 1

    def remove(self, request: Request) -> None:
        """Take a request out of the running set, wherever it goes."""
        del self.running[request.order]
        self._running_changes += 1
        self.catching_up.pop(request.order, None)

    def enter(self, request: Request) -> bool:
        """Take in an arrival; True when it became the head of the queue."""
        if request.spec.forking is not None and self.families.join(request):
            return False
        return self.enqueue(request)

    def enqueue(self, request: Request) -> bool:
        """Queue a request that has never been queued; True when it became the head."""
        became_head = self.waiting.add(request)
        if self.below_guard is not None and not self.knobs.spares(request.spec.priority):
            self.below_guard.note(request, len(self.waiting))
        return became_head

    def take_back(self, draft: Draft, now_fs: int) -> None:
        """Undo the allocations of a step that computed nothing."""
        for order in draft.decode_blocks:
            request = self.running[order]
            self.holdings.shorten(request, self.decode.computed(request), now_fs)
        void: set[int] = set()
        for share in draft.shares.values():
            request, computed_blocks = share.request, share.context_tokens // self.config.block_size
            unwritten = self._tables.between(request.table, computed_blocks, request.num_registered)
            self.pool.forget(unwritten)
            void.update(unwritten)
        if self.offload is not None:
            self.offload.saves.undone(void)
        for share in draft.shares.values():
            request, tokens = share.request, share.context_tokens
            # It may have been to read what another request of the same step was to write.
            valid = self._tables.tokens_before(request.table, tokens, void)
            if valid < tokens:
                tokens = request.num_computed_tokens = valid
            request.num_registered = min(request.num_registered, tokens // self.config.block_size)
            self.holdings.shorten(request, tokens, now_fs)
