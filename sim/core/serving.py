"""Serving: running requests get tokens, and blocks for them, from a step in which there is enough for all (else: `shortage`).

Source: vLLM V1 `Scheduler.schedule`, running pass (engine-policies §1.1.2).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .batching import is_prompt, rest_decodes
from .draft import Draft, Share
from .request import Request
from .tables import BlockTables

if TYPE_CHECKING:
    from .scheduler import Scheduler


class Serving:
    """Serves the running requests of a scheduler."""

    def __init__(self, scheduler: Scheduler, tables: BlockTables) -> None:
        self._scheduler = scheduler
        self._tables = tables

    def serve_running(self, draft: Draft, now_fs: int) -> None:
        """Everybody who runs, and does not rest, in the way that the blocks allow."""
        scheduler = self._scheduler
        if scheduler.limits is not None and scheduler.limits.max_decode_seqs is not None:
            rest_decodes(scheduler, draft, scheduler.limits.max_decode_seqs)
        if self._running_fits(draft):
            self._serve_all(draft, now_fs)
        else:
            scheduler.shortage.serve_in_order(draft, now_fs)

    def _awake(self, draft: Draft) -> Iterable[Request]:
        """Those who catch up and take part in the step."""
        scheduler = self._scheduler
        if not draft.resting:
            return scheduler.catching_up.values()
        return [request for order, request in scheduler.catching_up.items() if order not in draft.resting]

    def _running_fits(self, draft: Draft) -> bool:
        """Whether this step's need of all running requests is free."""
        scheduler = self._scheduler
        need = scheduler.growth.num_needed()
        budget = scheduler.step_budget() - len(scheduler.decode)
        if budget < 0:
            return False  # not everybody can be served: in order, then
        for request in self._awake(draft):
            num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            if num_tokens <= 0:
                break
            num_tokens = scheduler.holdings.fitting(request.num_computed_tokens, num_tokens)
            need += self._tables.need(request.table, request.num_computed_tokens, num_tokens)
            budget -= num_tokens
        return need <= scheduler.pool.num_free

    def serve_prompts(self, draft: Draft, now_fs: int) -> None:
        """A step of prompts only: go on with those that were begun, as far as blocks are free."""
        for request in self._awake(draft):
            if (
                is_prompt(request)
                and draft.budget
                and self.serve(request, self.ask(request, draft), draft, now_fs) is None
            ):
                break

    def _serve_all(self, draft: Draft, now_fs: int) -> None:
        """The usual step: everybody gets what they need."""
        scheduler = self._scheduler
        draft.budget -= len(scheduler.decode)
        draft.decode_blocks = scheduler.growth.grow(0, now_fs)
        for request in self._awake(draft):
            if draft.budget:
                self.serve(request, self.ask(request, draft), draft, now_fs)

    def ask(self, request: Request, draft: Draft) -> int:
        """Tokens a running request wants from this step."""
        scheduler = self._scheduler
        computed = scheduler.decode.computed(request)
        wanted = min(scheduler.decode.known(request) - computed, scheduler.allowed(request, draft))
        return scheduler.holdings.fitting(computed, wanted)

    def serve(self, request: Request, num_tokens: int, draft: Draft, now_fs: int) -> int | None:
        """Schedule a running request for `num_tokens`; None when its blocks are not free."""
        scheduler = self._scheduler
        if not num_tokens:
            return 0
        computed = scheduler.decode.computed(request)
        scheduler.holdings.slide(request, computed, draft, now_fs)
        allocation = self._tables.grow(request.table, computed, num_tokens)
        if allocation is None:
            return None
        scheduler.holdings.hold(request, len(allocation.new_blocks), now_fs)
        if allocation.copies:
            draft.copies += allocation.copies
            scheduler.holdings.sharing.leave_some(request, [source for source, _ in allocation.copies], now_fs)
        scheduler.take(request, num_tokens, draft)
        if request.decoding:
            draft.decode_blocks[request.order] = allocation.new_blocks
        else:
            draft.shares[request.order] = Share(request, num_tokens, computed, allocation.new_blocks)
            scheduler.holdings.register(request, computed + num_tokens)
        return num_tokens

    def outgrown(self, request: Request, tokens: int, blocks: int) -> str:
        """Why this request can never have `blocks` blocks for its `tokens` tokens, or an empty string if it can."""
        scheduler = self._scheduler
        if blocks <= scheduler.pool.num_blocks:
            return ""
        return f"grew to {tokens} tokens, which need {blocks} KV blocks of a pool of {scheduler.pool.num_blocks}"

    def next_need(self, request: Request, budget: int) -> tuple[int, int]:
        """Tokens of a running request after this step, and the blocks it must hold for them."""
        scheduler = self._scheduler
        computed = scheduler.decode.computed(request)
        wanted = min(scheduler.decode.known(request) - computed, budget)
        tokens = computed + scheduler.holdings.fitting(computed, wanted)
        return tokens, scheduler.config.blocks_at(computed, tokens)
