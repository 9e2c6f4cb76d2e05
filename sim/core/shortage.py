"""Shortage: a step in which the running requests need more blocks than are free, or more tokens than the budget has.

Source: vLLM V1 `Scheduler.schedule`, running pass and preemption (engine-policies §1.1.2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .admission import Admission
from .batching import is_prompt
from .config import ConfigError
from .draft import Draft
from .own_policies import own_victim
from .policy import Policy
from .request import Request, State
from .tables import BlockTables

if TYPE_CHECKING:
    from .scheduler import Scheduler


class Shortage:
    """Serves the running requests of a scheduler one by one, and takes blocks from victims."""

    def __init__(self, scheduler: Scheduler, tables: BlockTables, admission: Admission, policy: Policy) -> None:
        self._scheduler = scheduler
        self._tables = tables
        self._admission = admission
        self._victim = own_victim(policy.victim)
        self._swap = policy.swap

    def serve_in_order(self, draft: Draft, now_fs: int) -> None:
        """A step in which blocks are short: serve in admission order, taking from victims when there is no other way.

        As in vLLM's running pass that goes for prompt chunks too: an older one comes before a younger decode.
        """
        scheduler = self._scheduler
        order = [request for request in scheduler.running.values() if request.order not in draft.resting]
        served: dict[int, int] = {}
        position = 0
        while position < len(order) and draft.budget:
            request = order[position]
            if outgrown := scheduler.serving.outgrown(request, *scheduler.serving.next_need(request, draft.budget)):
                del order[position]
                scheduler.retire(request)
                draft.unservable.append((request, outgrown))
                draft.released.append(
                    (
                        request.request_id,
                        scheduler.holdings.release(request, "outgrew the pool", now_fs, reusable=False),
                    )
                )
                continue
            asked = scheduler.serving.ask(request, draft)  # settled before victims are looked for, as in vLLM
            if (scheduler.departing or scheduler.pool.num_set_aside) and self._comes_soon(request, asked):
                draft.blocks_come = True
                position += 1
                continue
            while (num_tokens := scheduler.serving.serve(request, asked, draft, now_fs)) is None:
                victim: object = self._victim(scheduler.running, scheduler.decode.known)
                if not isinstance(victim, Request) or scheduler.running.get(victim.order) is not victim:
                    raise ConfigError(
                        f"the policy's victim is {victim!r}; it must be one of the {len(scheduler.running)} running requests"
                    )
                group = scheduler.families.moving_with(victim)
                for member in group:
                    if member.order not in draft.resting:
                        place = order.index(member)
                        del order[place]
                        position -= place < position
                    self._undo(member, served, draft)
                self.give_way(group, draft, now_fs)
                if request in group:
                    break
            if num_tokens is None:
                break  # a request that had to give up its own blocks ends the pass, as in vLLM
            served[request.order] = num_tokens
            position += 1
        for request in [member for member in scheduler.decode if member.order not in served]:
            scheduler.decode.leave(request)
            scheduler.catching_up[request.order] = request
        scheduler.catching_up = dict(sorted(scheduler.catching_up.items()))

    def _comes_soon(self, request: Request, num_tokens: int) -> bool:
        """Whether a running request lacks blocks that come back with the step under way, or when they are saved: it waits, and nobody
        gives way (vLLM #49675).
        """
        scheduler = self._scheduler
        lacks = (
            self._tables.need(request.table, scheduler.decode.computed(request), num_tokens) - scheduler.pool.num_free
        )
        if lacks <= 0:
            return False
        lacks -= scheduler.pool.num_set_aside
        held = Counter(block_id for gone in scheduler.departing.values() for block_id in gone.table.blocks if block_id)
        return lacks <= sum(scheduler.pool.ref_cnt(block_id) == holders for block_id, holders in held.items())

    def _undo(self, victim: Request, served: dict[int, int], draft: Draft) -> None:
        """Take back what a victim was given earlier in this step; its blocks go with the rest of its table."""
        scheduler = self._scheduler
        draft.budget += served.pop(victim.order, 0)
        draft.decode_blocks.pop(victim.order, None)
        share = draft.shares.pop(victim.order, None)
        if share is not None and scheduler.limits is not None and is_prompt(victim):
            draft.prompt_budget += share.num_tokens
            draft.prompts_left += 1
        taken_back = set(victim.table.blocks)
        draft.uncopied.update((target, source) for source, target in draft.copies if target in taken_back)
        draft.copies = [copy for copy in draft.copies if copy[1] not in taken_back]

    def give_way(self, group: Sequence[Request], draft: Draft, now_fs: int) -> None:
        """Take the blocks of running requests that move together (`Families.moving_with`), and put them where they can come back from:
        the CPU pool if allowed and free, else the queue.
        """
        scheduler = self._scheduler
        for victim in group:
            if victim.decoding:
                scheduler.decode.leave(victim)
            victim.computed_high = max(victim.computed_high, victim.num_computed_tokens)
            victim.num_preemptions += 1
            scheduler.holdings.slide(victim, victim.num_computed_tokens, draft, now_fs)
        swapped = self._swap and scheduler.swapping.save(group, draft)
        why = "swapped out" if swapped else "preempted"
        for victim in reversed(group):
            draft.preempted.append(victim)
            draft.released.append((victim.request_id, scheduler.holdings.release(victim, why, now_fs, reusable=True)))
            scheduler.remove(victim)
            if swapped:
                scheduler.swapping.swapped.appendleft(victim)
            else:
                victim.num_computed_tokens = victim.dropped_tokens = 0
                victim.state = State.WAITING
                scheduler.waiting.put_back(victim)
            self._admission.preempted(scheduler.view_at(now_fs))
