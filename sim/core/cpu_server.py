"""The CPU executor: a second, slow server for requests that the degradation ladder moves off the device (`run_on_cpu`).

A request that has its first token leaves the device's pool: its KV is saved to the CPU pool, where it has room for all tokens that it may
still produce, and it goes on there at a fixed time a token, which is the executor's own cost and the same however many it serves at
once (up to its slots) and however long their contexts are. When the rung goes off again, what is left comes back like a swapped request.

Where layers have windows it takes along what is in them, in each attention group. Nothing slides out of them on the CPU: all that is
computed there is kept until the request goes, and of that comes back what is in the windows then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .clock import to_fs
from .config import ConfigError, EngineConfig
from .draft import Draft
from .need import blocks_for, skipped_blocks, slots_needed
from .plan import CpuMove
from .preemption import worst_priority
from .request import Request, State

if TYPE_CHECKING:
    from .scheduler import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuExecutor:
    """What the CPU can do beside the device."""

    token_s: float
    """Seconds a token of one request takes."""
    max_num_seqs: int = 8
    """Most requests at once."""

    def __post_init__(self) -> None:
        if not 0 < self.token_s < float("inf"):
            raise ConfigError(f"cpu_token_s is {self.token_s:g}; a token on the CPU takes a time above 0 s")
        if self.max_num_seqs < 1:
            raise ConfigError(f"cpu_max_num_seqs is {self.max_num_seqs}; it must be at least 1")

    def check(self, config: EngineConfig) -> None:
        """Refuse an engine that could not use it. Raises ConfigError with the reason."""
        if not config.num_cpu_blocks:
            raise ConfigError("the CPU executor needs room for the KV of its requests: set num_cpu_blocks")


def cpu_move(request: Request, config: EngineConfig, most_tokens: int = 0) -> CpuMove:
    """The move of a request that is not in the decode set, with what it has computed, to a place where it has room for `most_tokens`."""
    computed = request.num_computed_tokens
    kinds = zip(config.groups, request.table.groups, strict=True)
    return CpuMove(
        request_id=request.request_id,
        computed_tokens=computed,
        most_tokens=max(most_tokens, computed),
        group_tables=tuple(tuple(table.blocks[: blocks_for(computed, kind.block_size)]) for kind, table in kinds),
    )


class CpuServer:
    """The requests that one engine's CPU executor serves."""

    def __init__(self, executor: CpuExecutor, scheduler: Scheduler) -> None:
        self.executor = executor
        self._scheduler = scheduler
        self._token_fs = to_fs(executor.token_s)
        self.serving: dict[Request, int] = {}
        """By request, in the order in which they came: up to when its tokens are counted."""
        self._rooms: dict[Request, list[range]] = {}
        """By request that is served, for each attention group: the places in its table for which it has CPU blocks, in that order."""
        self.leaving: dict[Request, None] = {}
        """Those who have ended here, or whose client has left, and whose slot and room the scheduler does not know to be free yet."""
        self.tokens = 0
        """Tokens produced here so far."""

    @property
    def next_end_fs(self) -> int | None:
        """When the next of them has all its tokens."""
        ends = [since + self._left(request) * self._token_fs for request, since in self.serving.items()]
        return min(ends, default=None)

    def relieve(self, usage: float, draft: Draft, now_fs: int) -> None:
        """Take running requests below the guard, least important first, until at most `usage` of the pool is owned; never the last."""
        scheduler = self._scheduler
        pool = scheduler.pool
        while pool.num_owned > usage * pool.num_blocks and len(scheduler.running) > 1:
            movable = {order: request for order, request in scheduler.running.items() if self._may_take(request)}
            if not movable or not self._take(worst_priority(movable, scheduler.decode.known), draft, now_fs):
                return

    def finished(self, now_fs: int) -> list[Request]:
        """Those who have all their tokens by now; they are served no more."""
        done = [r for r, since in self.serving.items() if since + self._left(r) * self._token_fs <= now_fs]
        for request in done:
            self.stop(request, now_fs)
        return done

    def stop(self, request: Request, now_fs: int) -> None:
        """A request is served no more, and its tokens are counted; `free` gives its slot and its room to others."""
        self._count(request, now_fs)
        del self.serving[request], self._rooms[request]
        self.leaving[request] = None

    def free(self, request: Request) -> None:
        """One that was stopped is gone."""
        del self.leaving[request]
        self._scheduler.swapping.ended_on_cpu.append(request.request_id)
        self._scheduler.swapping.free(request)

    @property
    def num_slots_taken(self) -> int:
        """Requests that have a slot."""
        return len(self.serving) + len(self.leaving)

    def give_back(self, now_fs: int) -> None:
        """The rung is off: everybody goes back to the device, as a swapped request, when its blocks are free there."""
        scheduler = self._scheduler
        for request in list(self.serving):
            self._count(request, now_fs)
            del self.serving[request]
            self._shrink(request)
            request.state = State.SWAPPED
            scheduler.swapping.swapped.append(request)
            scheduler.swapping.from_cpu.add(request)

    def _shrink(self, request: Request) -> None:
        """A request keeps, of its CPU blocks, those with the KV that it will need on the device."""
        kept: list[int] = []
        spare: list[int] = []
        left = iter(request.cpu_blocks)
        for room, needed in zip(self._rooms.pop(request), self._places(request.num_computed_tokens), strict=True):
            for place in room:
                (kept if place in needed else spare).append(next(left))
        request.cpu_blocks = kept
        self._scheduler.swapping.cpu_pool.release(spare, request.request_id)

    def _places(self, computed_tokens: int, total_tokens: int = 0) -> list[range]:
        """For each attention group the places in a table that tokens up to `total_tokens` need, when `computed_tokens` are computed."""
        total = max(total_tokens, computed_tokens)
        return [
            range(skipped_blocks(computed_tokens, kind.block_size, kind.window), blocks_for(total, kind.block_size))
            for kind in self._scheduler.config.groups
        ]

    def _may_take(self, request: Request) -> bool:
        """Also one who has ended, if the scheduler does not know: it would go on to decode."""
        left = request.num_tokens - request.num_computed_tokens
        return (
            not self._scheduler.knobs.spares(request.spec.priority)
            and request.first_token_fs is not None
            and (request.decoding or (request.ended_fs is not None and left == 1))
            and not request.dropped_tokens
            and request.spec.forking is None
        )

    def _take(self, request: Request, draft: Draft, now_fs: int) -> bool:
        """Move a request here; False, and nothing changed, if there is no slot or no room."""
        scheduler = self._scheduler
        most_tokens = slots_needed(request.spec.input_tokens, scheduler.view.output_cap(request.spec))
        rooms = self._places(scheduler.decode.computed(request), most_tokens)
        cpu_blocks = (
            scheduler.swapping.cpu_pool.allocate(sum(map(len, rooms)))
            if self.num_slots_taken < self.executor.max_num_seqs
            else None
        )
        if cpu_blocks is None:
            return False
        scheduler.retire(request)
        scheduler.holdings.slide(request, request.num_computed_tokens, draft, now_fs)
        move = cpu_move(request, scheduler.config, most_tokens)
        pairs: list[tuple[int, int]] = []
        left = iter(cpu_blocks)
        for table, room in zip(move.group_tables, rooms, strict=True):
            own = [next(left) for _ in room]
            pairs += zip(table[room.start :], own, strict=False)
        draft.swap_outs.append((request.request_id, pairs))
        draft.to_cpu.append(move)
        draft.released.append(
            (request.request_id, scheduler.holdings.release(request, "goes on on the CPU", now_fs, reusable=True))
        )
        request.cpu_blocks = cpu_blocks
        request.state = State.ON_CPU
        if request.ended_fs is None:
            request.degrade("run_on_cpu")
            self.serving[request] = now_fs
            self._rooms[request] = rooms
        else:
            self.leaving[request] = None
        return True

    def _left(self, request: Request) -> int:
        return max(request.target_tokens - request.num_tokens, 0)

    def _count(self, request: Request, now_fs: int) -> None:
        """Give a request the tokens that were produced until now."""
        since_fs = self.serving[request]
        produced = min((now_fs - since_fs) // self._token_fs, self._left(request))
        if not produced:
            return
        assert request.last_token_fs is not None  # it has its first
        request.other_gaps_fs.append(since_fs + self._token_fs - request.last_token_fs)
        request.other_gaps_fs += [self._token_fs] * (produced - 1)
        self.serving[request] = request.last_token_fs = since_fs + produced * self._token_fs
        request.num_tokens += produced
        request.num_computed_tokens = request.num_tokens - 1
        request.computed_high = max(request.computed_high, request.num_computed_tokens)
        self.tokens += produced
