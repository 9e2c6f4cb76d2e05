"""Continuous batching: who computes how many tokens in the next step.

Running requests are served first, in admission order, one token each; then prompts still being computed; then, if nobody
had to give way, waiting requests are admitted while the token, sequence and block budgets last. The head of the queue is
never overtaken. When blocks run out, running requests give theirs up and are swapped back in, or recomputed, later.
Source: vLLM V1 `Scheduler.schedule` (engine-policies §1.1.2); for the other batchings see `policy.Batching`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from .admission import Admission, Rejection
from .blocks import NO_BLOCK, BlockPool
from .clock import to_s
from .config import EngineConfig
from .decode import DecodeSet
from .draft import Draft, Share
from .ladder import Knobs
from .meters import DrainMeter
from .need import admission_blocks, blocks_for, new_blocks_for_whole, skipped_blocks
from .policy import Batching, Policy
from .preemption import worst_priority
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
        self._next_order = 0
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
        self.token_cap: int | None = None
        """Most tokens a step may compute after a step ran out of memory; None for no cap beyond the budget."""
        self.drain = DrainMeter()
        self.view = EngineView(self)
        self.waiting = policy.queue(self.view)
        self._running_changes = 0
        self.backlog_tokens = 0
        """Prompt tokens of all requests that have not got their first token."""
        self.table_blocks = 0
        """Entries in all block tables; a shared block counts once a holder."""
        self.prefix_queried_tokens = 0
        self.prefix_hit_tokens = 0
        """Prompt tokens looked up, and found, at first admissions; what a request finds of its own after a preemption does not count."""

    @property
    def version(self) -> int:
        """Changes whenever the running requests, or those of them that decode steadily, change."""
        return self.decode.version + self._running_changes

    @property
    def steady(self) -> bool:
        """Whether a queue that stands still now stands still until somebody comes or goes, so that decode steps can be leapt over."""
        if not len(self.waiting) or len(self.running) >= self.config.max_num_seqs:
            return True
        return self._admission.steady and self.waiting.steady

    def draft(self, now_fs: int) -> Draft:
        """Decide the next step. Blocks are allocated; nothing else moves until the step is committed."""
        self.view_at(now_fs)
        draft = Draft(budget=self._step_budget())
        if self.knobs.step_share < 1.0:
            draft.budget_below_guard = max(1, int(draft.budget * self.knobs.step_share))
        self._shed(draft, now_fs)
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
        if batch_is_open and self._policy.batching is not Batching.PREFILL_FIRST and not draft.preempted:
            self._admit(draft, now_fs)
        return draft

    def _step_budget(self) -> int:
        """Tokens a step may compute: the configured budget, or less after a step that ran out of memory."""
        budget = self.config.max_num_batched_tokens
        return budget if self.token_cap is None else min(budget, self.token_cap)

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
            self._hold(request, 1, now_fs)
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
                    (request.request_id, self.release(request, "outgrew the pool", now_fs, reusable=False))
                )
                continue
            asked = self._ask(request, draft)  # settled before victims are looked for, as in vLLM
            while (num_tokens := self._serve(request, asked, draft, now_fs)) is None:
                victim = self._policy.victim(self.running, self.decode.known)
                place = order.index(victim)
                del order[place]
                position -= place < position
                self._undo(victim, served, draft)
                self._give_way(victim, draft, now_fs)
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
        return wanted if self.config.sliding_window is None else min(wanted, self._tokens_that_fit(computed))

    def _tokens_that_fit(self, computed_tokens: int) -> int:
        """Most tokens that a request with a sliding window could compute at once if the whole pool were free (at least 1)."""
        block_size = self.config.block_size
        skipped = skipped_blocks(computed_tokens, block_size, self.config.sliding_window)
        return max((self.pool.num_blocks + skipped) * block_size - computed_tokens, 1)

    def _serve(self, request: Request, num_tokens: int, draft: Draft, now_fs: int) -> int | None:
        """Schedule a running request for `num_tokens`; None when its blocks are not free."""
        if not num_tokens:
            return 0
        computed = self.decode.computed(request)
        self._slide(request, computed, draft, now_fs)
        allocation = self._tables.grow(request.table, computed, num_tokens)
        if allocation is None:
            return None
        self._hold(request, len(allocation.new_blocks), now_fs)
        draft.copies += allocation.copies
        self._take(request, num_tokens, draft)
        if request.decoding:
            draft.decode_blocks[request.order] = allocation.new_blocks
        else:
            draft.shares[request.order] = Share(request, num_tokens, computed, allocation.new_blocks)
            self._register(request, computed + num_tokens)
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

    def _give_way(self, victim: Request, draft: Draft, now_fs: int) -> None:
        """Take a running request's blocks, and put it where it can come back from: the CPU pool if allowed and free, else the queue."""
        if victim.decoding:
            self.decode.leave(victim)
        victim.computed_high = max(victim.computed_high, victim.num_computed_tokens)
        victim.num_preemptions += 1
        draft.preempted.append(victim)
        self._slide(victim, victim.num_computed_tokens, draft, now_fs)
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
        draft.released.append((victim.request_id, self.release(victim, why, now_fs, reusable=True)))
        self._remove(victim)
        if cpu_blocks is None:
            victim.num_computed_tokens = victim.dropped_tokens = 0
            victim.state = State.WAITING
            self.waiting.put_back(victim)
        self._admission.preempted(self.view_at(now_fs))

    # -- waiting requests -----------------------------------------------------------------------------------------

    def _admit(self, draft: Draft, now_fs: int) -> None:
        """Let the swapped back in, then start whoever is first in the queue, as long as the budgets last."""
        while self.swapped and not self._is_paused(self.swapped[0]):
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
        self._hold(request, len(allocation.new_blocks), now_fs)
        self._take(request, num_tokens, draft)
        draft.admitted.append(request)
        draft.shares[request.order] = Share(request, num_tokens, computed, allocation.new_blocks)
        return True

    def _try_start(self, request: Request, draft: Draft, now_fs: int) -> bool:
        """Start the head of the queue, or send it away; False leaves it where it is."""
        config, tables = self.config, self._tables
        if self._is_paused(request):
            request.degrade("pause_admission")
            return False
        if outgrown := self._outgrown(request, request.num_tokens, self._whole_blocks(request)):
            self.waiting.pop()  # preempted at a length at which it could not come back
            draft.unservable.append((request, outgrown))
            return True
        hits = self._find(request)
        hit_tokens = len(hits) * config.block_size
        missing = request.num_tokens - hit_tokens
        allowed = self._allowed(request, draft)
        if not allowed or (missing > allowed and not config.enable_chunked_prefill):
            return False
        num_tokens = min(missing, allowed)
        if config.sliding_window is not None:
            num_tokens = min(num_tokens, self._tokens_that_fit(hit_tokens))
        need = tables.need(request.table, 0, num_tokens, hits)
        if config.reserve_full_prompt:
            need = max(need, self._prompt_blocks(request, hits))
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
        cap = self.knobs.cap_new
        if cap is not None and not self.knobs.spares(request.spec.priority):
            self.cap_output(request, cap, "cap_new")
        if not request.num_preemptions:
            request.prefix_hit_tokens = hit_tokens
            self.prefix_queried_tokens += request.num_tokens
            self.prefix_hit_tokens += hit_tokens
        self._hold(request, sum(1 for block_id in request.table.blocks if block_id != NO_BLOCK), now_fs)
        self._take(request, num_tokens, draft)
        draft.admitted.append(request)
        draft.shares[request.order] = Share(request, num_tokens, hit_tokens, [*hits, *allocation.new_blocks])
        self._register(request, hit_tokens + num_tokens)
        return True

    def _is_paused(self, request: Request) -> bool:
        """Whether the ladder keeps this request out; never when nothing runs, or it would be kept out for ever."""
        return bool(self.running) and not self.knobs.admit_below_guard and not self.knobs.spares(request.spec.priority)

    def _shed(self, draft: Draft, now_fs: int) -> None:
        """Send away queued requests that the ladder has given up on, as long as one of them is first."""
        limit_s = self.knobs.shed_after_s
        while limit_s is not None and (request := self.waiting.head()) is not None:
            waited_s = to_s(now_fs - request.arrival_fs)
            if self.knobs.spares(request.spec.priority) or waited_s < limit_s or request.num_preemptions:
                return
            self.waiting.pop()
            request.degrade("shed")
            ahead, rate = len(self.waiting), self.drain.requests_per_s(now_fs)
            retry_s = None if rate is None else (ahead + 1) / rate
            again = (
                ""
                if retry_s is None
                else f"; {ahead} are ahead and {rate:.3g} leave a second, so try again in {retry_s:.1f} s"
            )
            draft.turned_away.append(
                (
                    request,
                    Rejection(
                        code="shed",
                        http_status=503,
                        reason=f"the server is busy: waited {waited_s:.1f} s at priority {request.spec.priority}{again}",
                        retry_after_s=retry_s,
                    ),
                )
            )

    def cap_output(self, request: Request, output_tokens: int, action: str) -> None:
        """Let a request finish after `output_tokens` tokens, or its next one, if that is sooner than it would."""
        target = max(request.spec.input_tokens + output_tokens, self.decode.known(request) + 1)
        if target < request.target_tokens:
            request.degrade(action)
            if request.decoding:
                self.decode.retarget(request, target)
            else:
                request.target_tokens = target

    def truncate_context(self, request: Request, keep_tokens: int, now_fs: int) -> list[int]:
        """Give up a running request's blocks between its first and its last `keep_tokens` tokens; returns them.

        What is left is an attention sink and a window (StreamingLLM, Xiao et al. 2024); the answer changes, and the request says so.
        """
        block_size = self.config.block_size
        keep_from = max(self.decode.computed(request) - keep_tokens, 0) // block_size
        middle = [block_id for block_id in request.table.blocks[1:keep_from] if block_id != NO_BLOCK]
        if not middle:
            return []
        self.pool.release(middle, f"{request.request_id} (truncated)")
        request.table.blocks[1:keep_from] = [NO_BLOCK] * (keep_from - 1)
        self._hold(request, -len(middle), now_fs)
        request.degrade("truncate")
        if request.decoding:
            self.decode.drop(request, len(middle) * block_size)
        else:
            request.dropped_tokens += len(middle) * block_size
        return middle

    def pause_running(self, usage: float, action: str, draft: Draft, now_fs: int) -> None:
        """Take the blocks of running requests below the guard, least important first, until at most `usage` of the pool is owned."""
        while self.pool.num_owned > usage * self.pool.num_blocks:
            below = {o: r for o, r in self.running.items() if not self.knobs.spares(r.spec.priority)}
            if not below or len(self.running) == 1:
                return
            victim = worst_priority(below, self.decode.known)
            if action == "swap_out" and self.cpu_pool.num_free < len(victim.table):
                return
            victim.degrade(action)
            self._give_way(victim, draft, now_fs)

    def _find(self, request: Request) -> list[int]:
        """Blocks with the longest cached prefix of a waiting request.

        The last token is always computed: something must be sampled from it.
        """
        if not self._reuses(request):
            return []
        stop = (request.num_tokens - 1) // self.config.block_size
        if not request.num_preemptions:
            stop = min(stop, request.keys.num_shared)  # its private blocks have never been computed
        hits = self.pool.find(request.keys.keys(0, stop))
        passed = skipped_blocks(len(hits) * self.config.block_size, self.config.block_size, self.config.sliding_window)
        return [NO_BLOCK] * passed + hits[passed:]

    def _reuses(self, request: Request) -> bool:
        """Whether a request takes part in the prefix cache."""
        if not self.config.enable_prefix_caching:
            return False
        if self.knobs.reuse or self.knobs.spares(request.spec.priority):
            return True
        request.degrade("no_reuse")
        return False

    def _prompt_blocks(self, request: Request, hits: list[int]) -> int:
        """Blocks that the whole of a waiting request takes from the free queue, beyond its hits."""
        return new_blocks_for_whole(self._whole_blocks(request), len(hits), self.pool.num_unreferenced(hits))

    def _whole_blocks(self, request: Request) -> int:
        """Blocks that all known tokens of a request come to hold at once, at most.

        With a window that is an upper bound: it does not speak against a request that has run in this pool before.
        """
        config = self.config
        whole = admission_blocks(
            request.num_tokens,
            config.block_size,
            window=config.sliding_window,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
        )
        if config.sliding_window is not None and request.num_preemptions:
            return min(whole, self.pool.num_blocks)
        return whole

    def _run(self, request: Request, now_fs: int) -> None:
        request.order = self._next_order
        self._next_order += 1
        self._running_changes += 1
        request.state = State.RUNNING
        self.running[request.order] = self.catching_up[request.order] = request
        if request.scheduled_fs is None:
            request.scheduled_fs = now_fs

    # -- bookkeeping shared with the engine -------------------------------------------------------------------------

    def release(self, request: Request, why: str, now_fs: int, *, reusable: bool) -> list[int]:
        """Give back all blocks of a running request that is not in the decode set.

        What others may share stays findable. Private blocks do only if `reusable`: nobody but the request itself could find them.
        """
        computed_blocks = request.num_computed_tokens // self.config.block_size
        blocks = request.table.blocks
        self.pool.forget(
            blocks[computed_blocks : request.num_registered]
        )  # registered for a step that will not be computed
        if self._reuses(request) and not request.dropped_tokens:
            self._register_upto(request, computed_blocks if reusable else min(computed_blocks, request.keys.num_shared))
        self._hold(request, -request.held_blocks, now_fs)
        request.num_registered = 0
        return self._tables.release(request.table, f"{request.request_id} ({why})")

    def forget_private(self, request: Request) -> None:
        """A request that was preempted has ended: what it left in the prefix index for itself, nobody will ever look for."""
        if request.num_preemptions:
            stop = request.computed_high // self.config.block_size
            private = request.keys.keys(min(request.keys.num_shared, stop), stop)
            self.pool.forget(block_id for key in private for block_id in self.pool.index.find([key]))

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

    def take_back(self, draft: Draft, now_fs: int) -> None:
        """Undo the allocations of a step that computed nothing."""
        self.take_back_members(draft.decode_blocks, 0, now_fs)
        for share in draft.shares.values():
            computed_blocks = share.context_tokens // self.config.block_size
            self.pool.forget(share.request.table.blocks[computed_blocks : share.request.num_registered])
            share.request.num_registered = min(share.request.num_registered, computed_blocks)
            self._shorten(share.request, share.context_tokens, now_fs)

    def take_back_members(self, grown: Iterable[int], ahead: int, now_fs: int) -> None:
        """Undo the allocations of decode-set members, by admission order, for the step `ahead` steps from now."""
        for order in grown:
            request = self.running[order]
            self._shorten(request, self.decode.computed(request) + ahead, now_fs)

    def _shorten(self, request: Request, tokens: int, now_fs: int) -> None:
        dropped = self._tables.truncate(request.table, tokens, f"{request.request_id} (step ran out of memory)")
        self._hold(request, -sum(1 for block_id in dropped if block_id != NO_BLOCK), now_fs)

    def retire(self, request: Request) -> None:
        """Take a running request out of the running set for good; its blocks are released separately."""
        if request.decoding:
            self.decode.leave(request)
        self._remove(request)

    def _slide(self, request: Request, computed_tokens: int, draft: Draft, now_fs: int) -> None:
        """Give back the blocks that left the attention window."""
        slid = self._tables.slide(request.table, computed_tokens)
        if slid:
            self._hold(request, -len(slid), now_fs)
            draft.released.append((request.request_id, slid))

    def _hold(self, request: Request, change: int, now_fs: int) -> None:
        self.table_blocks += change
        request.hold(change, now_fs)

    def _remove(self, request: Request) -> None:
        del self.running[request.order]
        self._running_changes += 1
        self.catching_up.pop(request.order, None)

    def _register(self, request: Request, computed_tokens: int) -> None:
        """Make blocks that will be full after this step findable at once: whoever finds them is computed after them."""
        if not self._reuses(request):
            return
        self._register_upto(request, min(computed_tokens // self.config.block_size, request.keys.num_shared))

    def _register_upto(self, request: Request, stop: int) -> None:
        start = request.num_registered
        if start < stop:
            self.pool.index.add(request.table.blocks[start:stop], request.keys.keys(start, stop))
            request.num_registered = stop
