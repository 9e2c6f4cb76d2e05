"""Continuous batching: who computes how many tokens in the next step.

Running requests are served first, in admission order, one token each; then prompts still being computed; then, if nobody
had to give way, waiting requests are admitted while the token, sequence and block budgets last. The head of the queue is
never overtaken. When blocks run out, running requests give theirs up and are recomputed later.
Source: vLLM V1 `Scheduler.schedule` (engine-policies §1.1.2).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .admission import Admission, PoolView
from .blocks import NO_BLOCK
from .config import EngineConfig
from .decode import DecodeSet
from .need import admission_blocks, blocks_for, skipped_blocks
from .preemption import VictimPolicy
from .request import Request, State
from .tables import BlockTables
from .waiting import WaitingQueue


@dataclass(slots=True)
class Share:
    """What one request that is not in the decode set computes in this step."""

    request: Request
    num_tokens: int
    context_tokens: int
    new_blocks: list[int]
    """Blocks that joined its table for this step, prefix hits included."""

    @property
    def samples(self) -> bool:
        """Whether the request's last known token is computed."""
        return self.context_tokens + self.num_tokens == self.request.num_tokens


@dataclass(slots=True)
class Draft:
    """The decisions of one step while they are being made."""

    budget: int
    """Tokens that may still be scheduled."""
    decode: bool = True
    """Whether the decode set computes in this step."""
    decode_blocks: dict[int, list[int]] = field(default_factory=dict)
    """New blocks of decode-set members, by admission order."""
    shares: dict[int, Share] = field(default_factory=dict)
    """Everything else that is scheduled, by admission order."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    unservable: list[tuple[Request, str]] = field(default_factory=list)
    """Running requests that outgrew the whole pool, with the reason."""
    released: list[tuple[str, list[int]]] = field(default_factory=list)


class Scheduler:
    """Holds the queue and the running requests, and drafts one step at a time."""

    def __init__(
        self,
        config: EngineConfig,
        tables: BlockTables,
        waiting: WaitingQueue,
        admission: Admission,
        victim: VictimPolicy,
    ) -> None:
        self._config = config
        self._tables = tables
        self._pool = tables.pool
        self._admission = admission
        self._victim = victim
        self._next_order = 0
        self.waiting = waiting
        self.decode = DecodeSet(config.block_size)
        self.running: dict[int, Request] = {}
        """Admitted requests by admission order; the oldest comes first."""
        self.catching_up: dict[int, Request] = {}
        """Those of them with more to compute than the decode set's one token, or that missed a step."""
        self.table_blocks = 0
        """Entries in all block tables; a shared block counts once a holder."""
        self.prefix_queried_tokens = 0
        self.prefix_hit_tokens = 0
        """Prompt tokens looked up, and found, at first admissions; what a request finds of its own after a preemption does not count."""

    def draft(self, now_fs: int) -> Draft:
        """Decide the next step. Blocks are allocated; nothing else moves until the step is committed."""
        draft = Draft(budget=self._config.max_num_batched_tokens)
        if self._running_fits():
            self._serve_all(draft, now_fs)
        else:
            self._serve_in_order(draft, now_fs)
        if not draft.preempted:
            self._admit(draft, now_fs)
        return draft

    # -- running requests -----------------------------------------------------------------------------------------

    def _running_fits(self) -> bool:
        """Whether this step's need of all running requests is free."""
        need = self.decode.num_needing_block()
        budget = self._config.max_num_batched_tokens - len(self.decode)
        for request in self.catching_up.values():
            num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            need += self._tables.need(request.table, request.num_computed_tokens, num_tokens)
            budget -= num_tokens
        return need <= self._pool.num_free

    def _serve_all(self, draft: Draft, now_fs: int) -> None:
        """The usual step: everybody gets what they need."""
        draft.budget -= len(self.decode)
        draft.decode_blocks = self.grow_members(0, now_fs)
        for request in self.catching_up.values():
            if draft.budget:
                self._serve(request, draft, now_fs)

    def grow_members(self, ahead: int, now_fs: int) -> dict[int, list[int]]:
        """Give a block to each decode-set member that needs one in the step `ahead` steps from now; there must be enough."""
        needing = self.decode.needing_block(ahead)
        blocks = self._pool.allocate(len(needing))
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
            while (num_tokens := self._serve(request, draft, now_fs)) is None:
                victim = self._victim(self.running)
                place = order.index(victim)
                del order[place]
                position -= place < position
                self._undo(victim, served, draft)
                draft.preempted.append(victim)
                draft.released.append((victim.request_id, self._preempt(victim, now_fs)))
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

    def _serve(self, request: Request, draft: Draft, now_fs: int) -> int | None:
        """Schedule a running request for what it lacks, within the budget; None when its blocks are not free."""
        computed = self.decode.computed(request)
        num_tokens = min(self.decode.known(request) - computed, draft.budget)
        self._hold(request, -len(self._tables.slide(request.table, computed)), now_fs)
        allocation = self._tables.grow(request.table, computed, num_tokens)
        if allocation is None:
            return None
        self._hold(request, len(allocation.new_blocks), now_fs)
        draft.copies += allocation.copies
        draft.budget -= num_tokens
        if request.decoding:
            draft.decode_blocks[request.order] = allocation.new_blocks
        else:
            draft.shares[request.order] = Share(request, num_tokens, computed, allocation.new_blocks)
            self._register(request, computed + num_tokens)
        return num_tokens

    def _outgrown(self, request: Request, tokens: int, blocks: int) -> str:
        """Why this request can never have `blocks` blocks for its `tokens` tokens, or an empty string if it can."""
        if blocks <= self._pool.num_blocks:
            return ""
        return f"grew to {tokens} tokens, which need {blocks} KV blocks of a pool of {self._pool.num_blocks}"

    def _next_need(self, request: Request, budget: int) -> tuple[int, int]:
        """Tokens of a running request after this step, and the blocks it must hold for them."""
        computed = self.decode.computed(request)
        tokens = min(self.decode.known(request), computed + budget)
        skipped = skipped_blocks(computed, self._config.block_size, self._config.sliding_window)
        return tokens, blocks_for(tokens, self._config.block_size) - skipped

    def _preempt(self, request: Request, now_fs: int) -> list[int]:
        """Take a running request's blocks and put it back in the queue, to be recomputed; returns the blocks."""
        if request.decoding:
            self.decode.leave(request)
        request.computed_high = max(request.computed_high, request.num_computed_tokens)
        released = self.release(request, "preempted", now_fs, reusable=True)
        self._remove(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.state = State.WAITING
        self.waiting.put_back(request)
        return released

    # -- waiting requests -----------------------------------------------------------------------------------------

    def _admit(self, draft: Draft, now_fs: int) -> None:
        config, tables = self._config, self._tables
        while draft.budget and len(self.running) < config.max_num_seqs and (request := self.waiting.head()) is not None:
            if outgrown := self._outgrown(request, request.num_tokens, self._whole_blocks(request)):
                self.waiting.pop()  # preempted at a length at which it could not come back
                draft.unservable.append((request, outgrown))
                continue
            hits = self._find(request)
            hit_tokens = len(hits) * config.block_size
            missing = request.num_tokens - hit_tokens
            if missing > draft.budget and not config.enable_chunked_prefill:
                break
            num_tokens = min(missing, draft.budget)
            need = tables.need(request.table, 0, num_tokens, hits)
            if config.reserve_full_prompt:
                need = max(need, self._prompt_blocks(request, hits))
            if not self._admission.may_start(
                need, PoolView(self._pool.num_blocks, self._pool.num_free, len(self.running))
            ):
                break
            allocation = tables.grow(request.table, 0, num_tokens, hits)
            if allocation is None:
                break
            self._start(self.waiting.pop(), hit_tokens, now_fs)
            self._hold(request, sum(1 for block_id in request.table.blocks if block_id != NO_BLOCK), now_fs)
            draft.budget -= num_tokens
            draft.admitted.append(request)
            draft.shares[request.order] = Share(request, num_tokens, hit_tokens, [*hits, *allocation.new_blocks])
            self._register(request, hit_tokens + num_tokens)

    def _find(self, request: Request) -> list[int]:
        """Blocks with the longest cached prefix of a waiting request.

        The last token is always computed: something must be sampled from it.
        """
        if not self._config.enable_prefix_caching:
            return []
        stop = (request.num_tokens - 1) // self._config.block_size
        if not request.num_preemptions:
            stop = min(stop, request.keys.num_shared)  # its private blocks have never been computed
        hits = self._pool.find(request.keys.keys(0, stop))
        passed = skipped_blocks(
            len(hits) * self._config.block_size, self._config.block_size, self._config.sliding_window
        )
        return [NO_BLOCK] * passed + hits[passed:]

    def _prompt_blocks(self, request: Request, hits: list[int]) -> int:
        """Blocks that the whole of a waiting request takes from the free queue, beyond its hits."""
        return max(self._whole_blocks(request) - len(hits), 0) + self._pool.num_unreferenced(hits)

    def _whole_blocks(self, request: Request) -> int:
        """Blocks that all known tokens of a request come to hold at once."""
        config = self._config
        return admission_blocks(
            request.num_tokens,
            config.block_size,
            window=config.sliding_window,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
        )

    def _start(self, request: Request, hit_tokens: int, now_fs: int) -> None:
        request.order = self._next_order
        self._next_order += 1
        request.state = State.RUNNING
        request.num_computed_tokens = hit_tokens
        request.num_registered = hit_tokens // self._config.block_size
        self.running[request.order] = self.catching_up[request.order] = request
        if request.scheduled_fs is None:
            request.scheduled_fs = now_fs
            request.prefix_hit_tokens = hit_tokens
            self.prefix_queried_tokens += request.num_tokens
            self.prefix_hit_tokens += hit_tokens

    # -- bookkeeping shared with the engine -------------------------------------------------------------------------

    def release(self, request: Request, why: str, now_fs: int, *, reusable: bool) -> list[int]:
        """Give back all blocks of a running request that is not in the decode set.

        What others may share stays findable. Private blocks do only if `reusable`: nobody but the request itself could find them.
        """
        computed_blocks = request.num_computed_tokens // self._config.block_size
        blocks = request.table.blocks
        self._pool.forget(
            blocks[computed_blocks : request.num_registered]
        )  # registered for a step that will not be computed
        if self._config.enable_prefix_caching:
            self._register_upto(request, computed_blocks if reusable else min(computed_blocks, request.keys.num_shared))
        self._hold(request, -request.held_blocks, now_fs)
        request.num_registered = 0
        return self._tables.release(request.table, f"{request.request_id} ({why})")

    def retire(self, request: Request) -> None:
        """Take a running request out of the running set for good; its blocks are released separately."""
        if request.decoding:
            self.decode.leave(request)
        self._remove(request)

    def _hold(self, request: Request, change: int, now_fs: int) -> None:
        self.table_blocks += change
        request.hold(change, now_fs)

    def _remove(self, request: Request) -> None:
        del self.running[request.order]
        self.catching_up.pop(request.order, None)

    def _register(self, request: Request, computed_tokens: int) -> None:
        """Make blocks that will be full after this step findable at once: whoever finds them is computed after them."""
        if not self._config.enable_prefix_caching:
            return
        self._register_upto(request, min(computed_tokens // self._config.block_size, request.keys.num_shared))

    def _register_upto(self, request: Request, stop: int) -> None:
        start = request.num_registered
        if start < stop:
            self._pool.index.add(request.table.blocks[start:stop], request.keys.keys(start, stop))
            request.num_registered = stop
