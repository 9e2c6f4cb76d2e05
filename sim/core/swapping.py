"""Swapping: requests that give way are saved in the CPU pool, and come back from there.

Sequences that came from each other by forks move together: full blocks that several of them hold are saved once, and are the same block
for all of them when they are back. A block that is not full is saved for each, because each will write into it.
Source: vLLM V0 swaps a sequence group as a whole, and each of its blocks once (engine-policies §1.2).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .blocks import NO_BLOCK, BlockPool
from .cpu_server import cpu_move
from .draft import Draft, Share
from .need import blocks_for, skipped_blocks
from .request import Request, State

if TYPE_CHECKING:
    from .scheduler import Scheduler


class Swapping:
    """The CPU pool and the requests that are in it, and how blocks move between it and a scheduler's own pool."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.cpu_pool = BlockPool(scheduler.config.num_cpu_blocks)
        self.swapped: deque[Request] = deque()
        """Requests whose blocks are there; they go before anyone who waits."""
        self.from_cpu: set[Request] = set()
        """Those of them whom the CPU executor has served since they left the device."""
        self.ended_on_cpu: list[str] = []
        """As `StepPlan.ended_on_cpu`: those of whom no plan has told yet."""

    def take_ended(self) -> tuple[str, ...]:
        """Who has ended on the CPU since this was asked last."""
        ended, self.ended_on_cpu = tuple(self.ended_on_cpu), []
        return ended

    def drop(self, request: Request) -> None:
        """Forget a swapped request that will not come back."""
        if request in self.from_cpu:
            self.ended_on_cpu.append(request.request_id)
        self._leave(request)

    def _leave(self, request: Request) -> None:
        self.swapped.remove(request)
        self.from_cpu.discard(request)
        self.free(request)

    def free(self, request: Request) -> None:
        """Give back what a request holds of the CPU pool."""
        self.cpu_pool.release(request.cpu_blocks, request.request_id)
        request.cpu_blocks = []

    def most_blocks(self, group: Sequence[Request]) -> int:
        """Blocks of the CPU pool that saving these running requests takes, at most."""
        if len(group) == 1:
            return len(group[0].table)
        return len({block_id for request in group for block_id in request.table.blocks}) + len(group)

    def save(self, group: Sequence[Request], draft: Draft) -> bool:
        """Save what these running requests, which are not in the decode set, have computed; False, and nothing changed, if the CPU pool
        has no room or one of them has nothing to save. Who was to get a copy in this step has no copy yet: its source is saved.
        """
        cpu_pool, computed = self.cpu_pool, [self._computed_blocks(request) for request in group]
        if any(not blocks or request.dropped_tokens for request, blocks in zip(group, computed, strict=True)):
            return False
        full = {block_id for blocks in computed for block_id, is_full in blocks if is_full}
        new = cpu_pool.allocate(len(full) + sum(not is_full for blocks in computed for _, is_full in blocks))
        if new is None:
            return False
        left, saved = iter(new), dict[int, int]()
        for request, blocks in zip(group, computed, strict=True):
            pairs: list[tuple[int, int]] = []
            for block_id, is_full in blocks:
                if is_full and block_id in saved:
                    cpu_pool.acquire([saved[block_id]])
                    request.cpu_blocks.append(saved[block_id])
                    continue
                cpu_block = next(left)
                if is_full:
                    saved[block_id] = cpu_block
                request.cpu_blocks.append(cpu_block)
                pairs.append((draft.uncopied.get(block_id, block_id), cpu_block))
            draft.swap_outs.append((request.request_id, pairs))
            request.state = State.SWAPPED
        return True

    def bring_back(self, group: Sequence[Request], tokens: Sequence[int], draft: Draft, now_fs: int) -> bool:
        """Let swapped requests run again, with blocks for so many more tokens each; False, and nothing changed, if too few are free."""
        scheduler = self._scheduler
        pool = scheduler.pool
        new = pool.allocate(self._need(group, tokens))
        if new is None:
            return False
        left, back = iter(new), dict[int, int]()
        for request, num_tokens in zip(group, tokens, strict=True):
            saved, pairs, shared = iter(request.cpu_blocks), list[tuple[int, int]](), list[list[int]]()
            for kind, table in zip(scheduler.config.groups, request.table.groups, strict=True):
                first, full, stop, end = self._places(request, kind.block_size, kind.window, num_tokens)
                table.blocks = [NO_BLOCK] * first
                for index in range(first, stop):
                    cpu_block = next(saved)
                    if index < full and cpu_block in back:
                        pool.acquire([back[cpu_block]])
                        table.blocks.append(back[cpu_block])
                        continue
                    block_id = next(left)
                    if index < full:
                        back[cpu_block] = block_id
                    pairs.append((cpu_block, block_id))
                    table.blocks.append(block_id)
                shared.append(table.blocks[:full])
                table.blocks += [next(left) for _ in range(stop, end)]
            draft.swap_ins.append((request.request_id, pairs))
            if request in self.from_cpu:
                draft.from_cpu.append(cpu_move(request, scheduler.config))
            self._leave(request)
            scheduler.run(request, now_fs)
            blocks = [block_id for block_id in request.table.blocks if block_id != NO_BLOCK]
            scheduler.holdings.hold(request, len(blocks), now_fs)
            if len(group) > 1:
                scheduler.holdings.sharing.join(request, shared, now_fs)
            scheduler.take(request, num_tokens, draft)
            draft.admitted.append(request)
            draft.shares[request.order] = Share(request, num_tokens, request.num_computed_tokens, blocks)
        return True

    def _need(self, group: Sequence[Request], tokens: Sequence[int]) -> int:
        """Blocks that they take, those that several of them come to share counted once."""
        seen: set[int] = set()
        need = 0
        for request, num_tokens in zip(group, tokens, strict=True):
            saved = iter(request.cpu_blocks)
            for kind in self._scheduler.config.groups:
                first, full, stop, end = self._places(request, kind.block_size, kind.window, num_tokens)
                need += end - stop
                for index in range(first, stop):
                    cpu_block = next(saved)
                    need += index >= full or cpu_block not in seen
                    if index < full:
                        seen.add(cpu_block)
        return need

    @staticmethod
    def _places(request: Request, block_size: int, window: int | None, num_tokens: int) -> tuple[int, int, int, int]:
        """Places in a table of a swapped request: the first that is kept, the first that is not full, the end of what is saved, and the
        end once `num_tokens` more are computed.
        """
        computed = request.num_computed_tokens
        first = skipped_blocks(computed, block_size, window)
        return (
            first,
            computed // block_size,
            blocks_for(computed, block_size),
            blocks_for(computed + num_tokens, block_size),
        )

    def _computed_blocks(self, request: Request) -> list[tuple[int, bool]]:
        """The blocks with the KV of a request's computed tokens, in table order, group by group, and whether they are full."""
        computed, found = request.num_computed_tokens, list[tuple[int, bool]]()
        for kind, table in zip(self._scheduler.config.groups, request.table.groups, strict=True):
            stop, full = blocks_for(computed, kind.block_size), computed // kind.block_size
            found += [
                (block_id, index < full) for index, block_id in enumerate(table.blocks[:stop]) if block_id != NO_BLOCK
            ]
        return found
