"""Forks: how a sequence becomes a copy of another one of its request.

One that runs shares the other's blocks from then on; what it held before it gives back. One that does not run leaves the content where it
can be found (the prefix cache), and finds it when it comes back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .blocks import NO_BLOCK
from .family import Fork
from .relief import cap_output
from .request import Request, State
from .rungs import LOSSY

if TYPE_CHECKING:
    from .scheduler import Scheduler


class Forks:
    """Makes forks in one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def start(self, child: Request, source: Request, now_fs: int) -> Fork:
        """A held sequence starts as a copy of the one that has just computed their prompt, or waits for room."""
        scheduler = self._scheduler
        child.first_token_fs = child.last_token_fs = now_fs
        if child.ended_fs is None:  # else it starts in vain: its client left when this was planned
            scheduler.backlog_tokens -= child.spec.input_tokens
        self._copy_content(child, source)
        scheduler.waiting.started(child)
        if child.num_tokens < child.target_tokens and not scheduler.starts.admits_copy(child, now_fs):
            scheduler.holdings.publish(source, scheduler.decode.computed(source))
            scheduler.waiting.put_back(child)
            return Fork(child, source)
        child.scheduled_fs = source.scheduled_fs
        scheduler.run(child, now_fs)
        self._share(child, source, now_fs)
        cap = scheduler.knobs.cap_new
        if cap is not None and not scheduler.knobs.spares(child.spec.priority):
            cap_output(scheduler, child, cap, "cap_new")
        return Fork(child, source, started=True, shared=tuple(child.table.blocks))

    def follow(self, child: Request, source: Request, now_fs: int) -> Fork:
        """A sequence goes on as a copy of another one."""
        scheduler, released = self._scheduler, None
        if child.state is State.RUNNING:
            if child.decoding:
                scheduler.decode.leave(child)
            why = f"goes on as a copy of {source.request_id}"
            released = scheduler.holdings.release(child, why, now_fs, reusable=False)
            self._copy_content(child, source)
            self._share(child, source, now_fs)
            scheduler.catch_up(child)
        else:
            if child.state is State.SWAPPED:
                scheduler.swapping.drop(child)
                child.state, child.num_computed_tokens = State.WAITING, 0
                scheduler.waiting.put_back(child)
            scheduler.holdings.publish(source, scheduler.decode.computed(source))
            self._copy_content(child, source)
        if child.last_token_fs is not None and child.last_token_fs < now_fs:
            child.other_gaps_fs.append(now_fs - child.last_token_fs)
        child.last_token_fs = now_fs
        shared = () if released is None else tuple(child.table.blocks)
        return Fork(child, source, shared=shared, released=released)

    def _copy_content(self, child: Request, source: Request) -> None:
        """The child is made of the source's tokens now, and of what has changed them; its own keys begin with the block that they part
        in.
        """
        scheduler = self._scheduler
        for action in source.degraded:
            if action in LOSSY:
                child.degrade(action)
        computed = scheduler.decode.computed(source)
        child.num_tokens = scheduler.decode.known(source)
        child.computed_high = max(child.computed_high, computed)
        child.keys.follow(source.keys, computed // scheduler.config.block_size)

    def _share(self, child: Request, source: Request, now_fs: int) -> None:
        scheduler = self._scheduler
        child.table = scheduler.holdings.tables.fork(source.table, child.request_id)
        child.num_computed_tokens = scheduler.decode.computed(source)
        child.num_registered = source.num_registered
        child.dropped_tokens = source.dropped_tokens
        blocks = child.table.blocks
        scheduler.holdings.hold(child, sum(1 for block_id in blocks if block_id != NO_BLOCK), now_fs)
        scheduler.holdings.sharing.join(child, [table.blocks for table in child.table.groups], now_fs)
