"""Continuous batching: who computes how many tokens in the next step.

Running requests are served first, in admission order, one token each; then prompts still being computed; then, if nobody
had to give way, waiting requests are admitted while the token, sequence and block budgets last. The head of the queue is
never overtaken. When blocks run out, running requests give theirs up and are swapped back in, or recomputed, later.
Source: vLLM V1 `Scheduler.schedule` (engine-policies §1.1.2); for the other batchings see `policy.Batching`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import chain

from .admission import Admission, Rejection
from .blocks import NO_BLOCK, BlockPool
from .config import EngineConfig
from .decode import DecodeSet
from .draft import Draft, Share
from .holdings import Holdings
from .ladder import Knobs
from .meters import DrainMeter
from .need import blocks_for, skipped_blocks
from .offload import Loading, Offload
from .policy import Batching, Policy
from .relief import cap_output, is_paused, shed
from .request import Request, State
from .tables import BlockTables
from .view import EngineView


class Scheduler:
    """Holds the queue and the running requests, and drafts one step at a time."""

    def __init__(self, config: EngineConfig, tables: BlockTables, admission: Admission, policy: Policy) -> None:
        self.config = config
        self.pool = tables.pool
        self._tables = tables
        self._admission = admission
        self._policy = policy
        self.num_admissions = 0
        """Admissions so far; the next one gets this as its order."""
        self.swapped: deque[Request] = deque()
        """Requests whose blocks are in the CPU pool; they go before anyone who waits."""
        self.cpu_pool = BlockPool(config.num_cpu_blocks)
        self.decode = DecodeSet(config.block_size)
        self.running: dict[int, Request] = {}
        """Admitted requests by admission order; the oldest comes first."""
        self.catching_up: dict[int, Request] = {}
        """Those of them with more to compute than the decode set's one token, or that missed a step."""
        self.knobs = Knobs()
        """What the degradation ladder has turned."""
        self.holdings = Holdings(config, tables, self.knobs, self.holders)
        self.offload = Offload(config, self.holdings) if config.num_cpu_prefix_blocks else None
        """The CPU prefix tier, if there is one."""
        self.holdings.offload = self.offload
        self.token_cap: int | None = None
        """Most tokens a step may compute after a step ran out of memory; None for no cap beyond the budget."""
        self.drain = DrainMeter()
        self.view = EngineView(self)
        self.waiting = policy.queue(self.view)
        self._running_changes = 0
        self.backlog_tokens = 0
        """Prompt tokens of all requests that have not got their first token."""
        self.prefix_queried_tokens = 0
        self.prefix_hit_tokens = 0
        """Prompt tokens looked up, and found, at first admissions; what a request finds of its own after a preemption does not count."""

    def holders(self) -> Iterable[Request]:
        """All requests that hold blocks: the running, and those whose prefix is loaded."""
        return self.running.values() if self.offload is None else chain(self.running.values(), self.offload.loading)

    @property
    def version(self) -> int:
        """Changes whenever the running requests, or those of them that decode steadily, change."""
        return self.decode.version + self._running_changes

    @property
    def steady(self) -> bool:
        """Whether a queue that stands still now stands still until somebody comes or goes, so that decode steps can be leapt over."""
        if not len(self.waiting) or len(self.running) >= self.config.max_num_seqs:
            return True
        if self._policy.eviction != "lru" and not self.config.reserve_full_prompt:
            return (
                False  # a chunk's need falls by more than one when the head of its cached prefix goes before the rest
            )
        return self._admission.steady and self.waiting.steady

    def draft(self, now_fs: int) -> Draft:
        """Decide the next step. Blocks are allocated; nothing else moves until the step is committed."""
        self.view_at(now_fs)
        draft = Draft(budget=self._step_budget())
        if self.knobs.step_share < 1.0 and not self._must_start_whole:
            draft.budget_below_guard = max(1, int(draft.budget * self.knobs.step_share))
        shed(self, draft, now_fs)
        if self._policy.batching is Batching.PREFILL_FIRST:
            draft.decode = False
            self._serve_prompts(draft, now_fs)
            self._admit(draft, now_fs)
            if draft.shares:
                return draft
            draft.decode = True
        batch_is_open = self._policy.batching is Batching.MIXED or not self.running
        if self._running_fits():
            self._serve_all(draft, now_fs)
        else:
            self._serve_in_order(draft, now_fs)
        if batch_is_open and self._policy.batching is not Batching.PREFILL_FIRST and not (
            draft.preempted or draft.waits
        ):
            self._admit(draft, now_fs)
        return draft

    def _step_budget(self) -> int:
        """Tokens a step may compute: the configured budget, or less after a step that ran out of memory."""
        budget = self.config.max_num_batched_tokens
        return budget if self.token_cap is None or self._must_start_whole else min(budget, self.token_cap)

    @property
    def _must_start_whole(self) -> bool:
        """Whether a smaller step could only mean that nothing starts: nothing runs, and prompts are not computed in pieces."""
        return not self.running and not self.config.enable_chunked_prefill

    def _allowed(self, request: Request, draft: Draft) -> int:
        """Tokens this request may still take in the step; the ladder shrinks the prompts of those below its guard."""
        if request.decoding or self.knobs.spares(request.spec.priority):
            return draft.budget
        if draft.budget_below_guard < draft.budget:
            request.degrade("shrink_step")
        return min(draft.budget, draft.budget_below_guard)

    def _take(self, request: Request, num_tokens: int, draft: Draft) -> None:
        draft.budget -= num_tokens
        if not request.decoding and not self.knobs.spares(request.spec.priority):
            draft.budget_below_guard -= num_tokens

    # -- running requests -----------------------------------------------------------------------------------------

    def _running_fits(self) -> bool:
        """Whether this step's need of all running requests is free."""
        need = self.decode.num_needing_block()
        budget = self._step_budget() - len(self.decode)
        if budget < 0:
            return False  # not everybody can be served: in order, then
        for request in self.catching_up.values():
            num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            if num_tokens <= 0:
                break
            need += self._tables.need(request.table, request.num_computed_tokens, num_tokens)
            budget -= num_tokens
        return need <= self.pool.num_free

    def _serve_prompts(self, draft: Draft, now_fs: int) -> None:
        """A step of prompts only: go on with those that were begun, as far as blocks are free."""
        for request in self.catching_up.values():
            begun = request.num_tokens - request.num_computed_tokens > 1 or not request.num_output_tokens
            if begun and draft.budget and self._serve(request, self._ask(request, draft), draft, now_fs) is None:
                break

    def _serve_all(self, draft: Draft, now_fs: int) -> None:
        """The usual step: everybody gets what they need."""
        draft.budget -= len(self.decode)
        draft.decode_blocks = self.grow_members(0, now_fs)
        for request in self.catching_up.values():
            if draft.budget:
                self._serve(request, self._ask(request, draft), draft, now_fs)

    def grow_members(self, ahead: int, now_fs: int) -> dict[int, list[int]]:
        """Give a block to each decode-set member that needs one in the step `ahead` steps from now; there must be enough."""
        needing = self.decode.needing_block(ahead)
        blocks = self.pool.allocate(len(needing))
        assert blocks is not None  # checked by whoever planned this step
        grown: dict[int, list[int]] = {}
        for request, block_id in zip(needing, blocks, strict=True):
            request.table.blocks.append(block_id)
            self.holdings.hold(request, 1, now_fs)
            grown[request.order] = [block_id]
        return grown

    def _serve_in_order(self, draft: Draft, now_fs: int) -> None:
        """A step in which blocks are short: serve in admission order, taking from victims when there is no other way."""
        order = list(self.running.values())
        served: dict[int, int] = {}
        position = 0
        while position < len(order) and draft.budget:
            request = order[position]
            if outgrown := self._outgrown(request, *self._next_need(request, draft.budget)):
                del order[position]
                self.retire(request)
                draft.unservable.append((request, outgrown))
                draft.released.append(
                    (request.request_id, self.holdings.release(request, "outgrew the pool", now_fs, reusable=False))
                )
                continue
            asked = self._ask(request, draft)  # settled before victims are looked for, as in vLLM
            while (num_tokens := self._serve(request, asked, draft, now_fs)) is None:
                if self._comes_back(request, asked):
                    draft.waits = True
                    break
                victim = self._policy.victim(self.running, self.decode.known)
                place = order.index(victim)
                del order[place]
                position -= place < position
                self._undo(victim, served, draft)
                self.give_way(victim, draft, now_fs)
                if victim is request:
                    break
            if num_tokens is None:
                break  # a request that had to give up its own blocks ends the pass, as in vLLM
            served[request.order] = num_tokens
            position += 1
        for request in [member for member in self.decode if member.order not in served]:
            self.decode.leave(request)
            self.catching_up[request.order] = request
        self.catching_up = dict(sorted(self.catching_up.items()))

    def _comes_back(self, request: Request, num_tokens: int) -> bool:
        """Whether the blocks that a request lacks are only being saved: then it waits, and nobody gives way (vLLM #49675)."""
        aside = self.pool.num_set_aside if self.offload is not None else 0
        if not aside:
            return False
        need = self._tables.need(request.table, self.decode.computed(request), num_tokens)
        return need <= self.pool.num_free + aside

    def _undo(self, victim: Request, served: dict[int, int], draft: Draft) -> None:
        """Take back what a victim was given earlier in this step; its blocks go with the rest of its table."""
        draft.budget += served.pop(victim.order, 0)
        draft.decode_blocks.pop(victim.order, None)
        share = draft.shares.pop(victim.order, None)
        if share is not None:
            taken_back = set(share.new_blocks)
            draft.copies = [
                copy for copy in draft.copies if copy[1] not in taken_back and copy[1] not in victim.table.blocks
            ]

    def _ask(self, request: Request, draft: Draft) -> int:
        """Tokens a running request wants from this step."""
        computed = self.decode.computed(request)
        wanted = min(self.decode.known(request) - computed, self._allowed(request, draft))
        return wanted if self.config.sliding_window is None else min(wanted, self.holdings.tokens_that_fit(computed))

    def _serve(self, request: Request, num_tokens: int, draft: Draft, now_fs: int) -> int | None:
        """Schedule a running request for `num_tokens`; None when its blocks are not free."""
        if not num_tokens:
            return 0
        computed = self.decode.computed(request)
        self.holdings.slide(request, computed, draft, now_fs)
        allocation = self._tables.grow(request.table, computed, num_tokens)
        if allocation is None:
            return None
        self.holdings.hold(request, len(allocation.new_blocks), now_fs)
        if allocation.copies:
            draft.copies += allocation.copies
            self.holdings.sharing.leave_some(request, [source for source, _ in allocation.copies], now_fs)
        self._take(request, num_tokens, draft)
        if request.decoding:
            draft.decode_blocks[request.order] = allocation.new_blocks
        else:
            draft.shares[request.order] = Share(request, num_tokens, computed, allocation.new_blocks)
            self.holdings.register(request, computed + num_tokens)
        return num_tokens

    def _outgrown(self, request: Request, tokens: int, blocks: int) -> str:
        """Why this request can never have `blocks` blocks for its `tokens` tokens, or an empty string if it can."""
        if blocks <= self.pool.num_blocks:
            return ""
        return f"grew to {tokens} tokens, which need {blocks} KV blocks of a pool of {self.pool.num_blocks}"

    def _next_need(self, request: Request, budget: int) -> tuple[int, int]:
        """Tokens of a running request after this step, and the blocks it must hold for them."""
        computed = self.decode.computed(request)
        tokens = min(self.decode.known(request), computed + budget)
        skipped = skipped_blocks(computed, self.config.block_size, self.config.sliding_window)
        return tokens, blocks_for(tokens, self.config.block_size) - skipped

    def give_way(self, victim: Request, draft: Draft, now_fs: int) -> None:
        """Take a running request's blocks, and put it where it can come back from: the CPU pool if allowed and free, else the queue."""
        if victim.decoding:
            self.decode.leave(victim)
        victim.computed_high = max(victim.computed_high, victim.num_computed_tokens)
        victim.num_preemptions += 1
        draft.preempted.append(victim)
        self.holdings.slide(victim, victim.num_computed_tokens, draft, now_fs)
        stop = blocks_for(victim.num_computed_tokens, self.config.block_size)
        kept = [block_id for block_id in victim.table.blocks[:stop] if block_id != NO_BLOCK]
        may_swap = self._policy.swap and kept and not victim.dropped_tokens
        cpu_blocks = self.cpu_pool.allocate(len(kept)) if may_swap else None
        if cpu_blocks is not None:
            draft.swap_outs.append((victim.request_id, list(zip(kept, cpu_blocks, strict=True))))
            victim.cpu_blocks = cpu_blocks
            victim.state = State.SWAPPED
            self.swapped.appendleft(victim)
        why = "preempted" if cpu_blocks is None else "swapped out"
        draft.released.append((victim.request_id, self.holdings.release(victim, why, now_fs, reusable=True)))
        self._remove(victim)
        if cpu_blocks is None:
            victim.num_computed_tokens = victim.dropped_tokens = 0
            victim.state = State.WAITING
            self.waiting.put_back(victim)
        self._admission.preempted(self.view_at(now_fs))

    # -- waiting requests -----------------------------------------------------------------------------------------

    def _admit(self, draft: Draft, now_fs: int) -> None:
        """Let the swapped back in, then start whoever is first in the queue, as long as the budgets last.

        Before both go those whose prefix has been loaded: they hold their blocks already.
        """
        while self.offload is not None and self.offload.ready:
            if not draft.budget or len(self.running) >= self.config.max_num_seqs:
                return
            if not self._start_loaded(self.offload.ready[0], draft, now_fs):
                return
        while self.swapped and not is_paused(self, self.swapped[0]):
            if not draft.budget or len(self.running) >= self.config.max_num_seqs or not self._resume(draft, now_fs):
                return  # nobody else may take what the swapped are waiting for
        while draft.budget and len(self.running) < self.config.max_num_seqs:
            request = self.waiting.head()
            if request is None or not self._try_start(request, draft, now_fs):
                return

    def _resume(self, draft: Draft, now_fs: int) -> bool:
        """Bring back the first of the swapped, if its blocks and those of its next tokens are free."""
        request = self.swapped[0]
        computed = request.num_computed_tokens
        num_tokens = min(request.num_tokens - computed, self._allowed(request, draft))
        if not num_tokens:
            return False
        if outgrown := self._outgrown(request, *self._next_need(request, draft.budget)):
            self.drop_swapped(request)
            draft.unservable.append((request, outgrown))
            return True
        passed = skipped_blocks(computed, self.config.block_size, self.config.sliding_window)
        request.table.blocks = [NO_BLOCK] * passed
        allocation = self._tables.grow(request.table, computed, num_tokens)
        if allocation is None:
            request.table.blocks = []
            return False
        self.swapped.popleft()
        draft.swap_ins.append((request.request_id, list(zip(request.cpu_blocks, allocation.new_blocks, strict=False))))
        self._free_cpu_blocks(request)
        self._run(request, now_fs)
        self.holdings.hold(request, len(allocation.new_blocks), now_fs)
        self._take(request, num_tokens, draft)
        draft.admitted.append(request)
        draft.shares[request.order] = Share(request, num_tokens, computed, allocation.new_blocks)
        return True

    def _try_start(self, request: Request, draft: Draft, now_fs: int) -> bool:
        """Start the head of the queue, or send it away; False leaves it where it is."""
        config, tables = self.config, self._tables
        if is_paused(self, request):
            request.degrade("pause_admission")
            return False
        if outgrown := self._outgrown(request, request.num_tokens, self.holdings.whole_blocks(request)):
            self.waiting.pop()  # preempted at a length at which it could not come back
            draft.unservable.append((request, outgrown))
            return True
        hits = self.holdings.find(request)
        if self.offload is not None and (said := self._load(self.offload, request, hits, draft, now_fs)) is not None:
            return said
        hit_tokens = len(hits) * config.block_size
        missing = request.num_tokens - hit_tokens
        allowed = self._allowed(request, draft)
        if not allowed or (missing > allowed and not config.enable_chunked_prefill):
            return False
        num_tokens = min(missing, allowed)
        if config.sliding_window is not None:
            num_tokens = min(num_tokens, self.holdings.tokens_that_fit(hit_tokens))
        need = tables.need(request.table, 0, num_tokens, hits)
        if config.reserve_full_prompt:
            need = max(need, self.holdings.prompt_blocks(request, hits))
        said = self._admission.may_start(request, need, self.view_at(now_fs))
        if isinstance(said, Rejection):
            self.waiting.pop()
            draft.turned_away.append((request, said))
            return True
        allocation = tables.grow(request.table, 0, num_tokens, hits) if said else None
        if allocation is None:
            return False
        self.waiting.pop()
        self._run(request, now_fs)
        request.num_computed_tokens = hit_tokens
        request.num_registered = len(hits)
        self._start_accounts(request, hit_tokens)
        self.holdings.hold(request, sum(1 for block_id in request.table.blocks if block_id != NO_BLOCK), now_fs)
        if hits:
            self.holdings.sharing.join(request, hits, now_fs)
            if self.offload is not None:
                self.offload.used(hits)
        self._take(request, num_tokens, draft)
        draft.admitted.append(request)
        draft.shares[request.order] = Share(request, num_tokens, hit_tokens, [*hits, *allocation.new_blocks])
        self.holdings.register(request, hit_tokens + num_tokens)
        return True

    def _start_accounts(self, request: Request, hit_tokens: int) -> None:
        """Cap a request that starts, if the ladder says so, and count what it found on the device at its first start."""
        cap = self.knobs.cap_new
        if cap is not None and not self.knobs.spares(request.spec.priority):
            cap_output(self, request, cap, "cap_new")
        if not request.num_preemptions:
            request.prefix_hit_tokens = hit_tokens
            self.prefix_queried_tokens += request.num_tokens
            self.prefix_hit_tokens += hit_tokens

    def _load(self, offload: Offload, request: Request, hits: list[int], draft: Draft, now_fs: int) -> bool | None:
        """Load the prefix of the head of the queue from the CPU tier; False: it must wait; None: there is nothing to load."""
        found = offload.find(request, len(hits))
        if not found:
            return False if found is None else None
        whole, need = offload.need(request, hits)
        said = self._admission.may_start(request, need, self.view_at(now_fs))
        if isinstance(said, Rejection):
            self.waiting.pop()
            draft.turned_away.append((request, said))
            return True
        if not said or need > self.pool.num_free:
            return False
        self.waiting.pop()
        self.num_admissions += 1
        offload.begin_load(request, hits, found, whole, now_fs)
        return True

    def _start_loaded(self, loading: Loading, draft: Draft, now_fs: int) -> bool:
        """Start a request whose load has ended, with what it could load; False leaves it where it is."""
        assert self.offload is not None
        request, computed = loading.request, loading.request.num_computed_tokens
        missing = request.num_tokens - computed
        num_tokens = min(missing, self._allowed(request, draft))
        if not num_tokens or (num_tokens < missing and not self.config.enable_chunked_prefill):
            return False
        self.offload.leave(loading, now_fs)
        spare = self._tables.truncate(request.table, computed + num_tokens, f"{request.request_id} (not needed yet)")
        self.holdings.hold(request, -len(spare), now_fs)
        self._run(request, now_fs)
        self._start_accounts(request, loading.hits * self.config.block_size)
        self._take(request, num_tokens, draft)
        draft.admitted.append(request)
        draft.shares[request.order] = Share(request, num_tokens, computed, request.table.blocks.copy())
        self.holdings.register(request, computed + num_tokens)
        return True

    def _run(self, request: Request, now_fs: int) -> None:
        request.order = self.num_admissions
        self.num_admissions += 1
        self._running_changes += 1
        request.state = State.RUNNING
        self.running[request.order] = self.catching_up[request.order] = request
        if request.scheduled_fs is None:
            request.scheduled_fs = now_fs

    # -- bookkeeping shared with the engine -------------------------------------------------------------------------

    def view_at(self, now_fs: int) -> EngineView:
        """The view for policies, at this time."""
        self.view.now_fs = now_fs
        return self.view

    def drop_swapped(self, request: Request) -> None:
        """Forget a swapped request that will not come back."""
        self.swapped.remove(request)
        self._free_cpu_blocks(request)

    def _free_cpu_blocks(self, request: Request) -> None:
        self.cpu_pool.release(request.cpu_blocks, request.request_id)
        request.cpu_blocks = []

    def retire(self, request: Request) -> None:
        """Take a running request out of the running set for good; its blocks are released separately."""
        if request.decoding:
            self.decode.leave(request)
        self._remove(request)

    def _remove(self, request: Request) -> None:
        del self.running[request.order]
        self._running_changes += 1
        self.catching_up.pop(request.order, None)

    def take_back(self, draft: Draft, now_fs: int) -> None:
        """Undo the allocations of a step that computed nothing."""
        for order in draft.decode_blocks:
            request = self.running[order]
            self.holdings.shorten(request, self.decode.computed(request), now_fs)
        void: set[int] = set()
        for share in draft.shares.values():
            request, computed_blocks = share.request, share.context_tokens // self.config.block_size
            unwritten = request.table.blocks[computed_blocks : request.num_registered]
            self.pool.forget(unwritten)
            void.update(unwritten)
        for share in draft.shares.values():
            request, tokens = share.request, share.context_tokens
            found = request.table.blocks[: tokens // self.config.block_size]
            if not void.isdisjoint(found):  # it was to read what another request of the same step was to write
                valid = next(index for index, block_id in enumerate(found) if block_id in void)
                tokens = request.num_computed_tokens = valid * self.config.block_size
            request.num_registered = min(request.num_registered, tokens // self.config.block_size)
            self.holdings.shorten(request, tokens, now_fs)
