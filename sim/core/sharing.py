"""Who shares which blocks, and for how long: what a fair bill for the KV pool needs to know.

A block with c holders costs each of them 1/c. Most blocks have one holder and need no books. Blocks that come to be shared are kept
in runs: blocks with the same holders since the same moment, as the stretches between the forks of a prefix tree are. So a request
that joins or leaves touches a few runs, however many blocks they have, and time is only ever added up as (holders -> whole
femtoseconds), which makes every share an exact fraction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from .blocks import NO_BLOCK, BlockPool
from .chains import common_prefix
from .request import Request


class Run:
    """Blocks that the same requests have held since the same moment."""

    __slots__ = ("blocks", "holders", "since_fs", "time_fs")

    def __init__(self, blocks: list[int], since_fs: int) -> None:
        self.blocks = blocks
        self.since_fs = since_fs
        """Up to when `time_fs` has been counted."""
        self.time_fs: dict[int, int] = {}
        """For how long there were so many holders, since the run began."""
        self.holders: dict[Request, dict[int, int]] = {}
        """Each holder, and `time_fs` as it was when it joined."""

    def count(self, now_fs: int) -> None:
        """Add the time since the last change."""
        if now_fs > self.since_fs:
            holders = len(self.holders)
            self.time_fs[holders] = self.time_fs.get(holders, 0) + now_fs - self.since_fs
            self.since_fs = now_fs


class SharingMeter:
    """Keeps the runs of one pool. A request's own times are in `Request.shared_fs`."""

    def __init__(self, pool: BlockPool, running: Callable[[], Iterable[Request]]) -> None:
        self._pool = pool
        self._running = running
        self._run_of: dict[int, Run] = {}
        """By block, for blocks with at least two holders."""

    def join(self, request: Request, hits_by_group: Sequence[Sequence[int]], now_fs: int) -> None:
        """A request has taken the leading blocks of its tables, one an attention group, from the prefix index."""
        for group, hits in enumerate(hits_by_group):
            self._join(request, group, hits, now_fs)

    def _join(self, request: Request, group: int, hits: Sequence[int], now_fs: int) -> None:
        ref_cnt = self._pool.ref_cnt
        at = 0
        while at < len(hits):
            block_id = hits[at]
            if block_id == NO_BLOCK or ref_cnt(block_id) < 2:
                at += 1
                continue
            run = self._run_of.get(block_id)
            if run is None:
                run = self._begin(request, group, hits, at, now_fs)
            else:
                if run.blocks[0] != block_id:
                    run = self._split(run, run.blocks.index(block_id))
                alike = common_prefix(run.blocks, list(hits[at : at + len(run.blocks)]))
                if alike < len(run.blocks):
                    self._split(run, alike)
                run.count(now_fs)
                self._hold(run, request)
            at += len(run.blocks)

    def leave(self, request: Request, now_fs: int) -> None:
        """A request gives everything back."""
        for run in request.shared_runs:
            self._leave(run, request, now_fs)
        request.shared_runs = []

    def leave_some(self, request: Request, blocks: Sequence[int], now_fs: int) -> None:
        """A request gives some of its blocks back."""
        if not request.shared_runs:
            return
        given = set(blocks)
        for run in [run for run in request.shared_runs if not given.isdisjoint(run.blocks)]:
            inside = [block_id in given for block_id in run.blocks]
            parts, part = [], run
            for index in range(len(inside) - 1, 0, -1):  # from the back, so that what is in front stays `run`
                if inside[index] != inside[index - 1]:
                    parts.append(self._split(run, index))
            parts.append(run)
            for part in parts:
                if part.blocks[0] in given:
                    request.shared_runs.remove(part)
                    self._leave(part, request, now_fs)

    def _begin(self, request: Request, group: int, hits: Sequence[int], at: int, now_fs: int) -> Run:
        """A new run from `hits[at]` on: the blocks that one other request holds, and nobody else."""
        owner = self._owner(request, group, hits[at], at)
        theirs, stop = owner.table.groups[group].blocks, at + 1
        while (
            stop < min(len(hits), len(theirs))
            and hits[stop] == theirs[stop]
            and self._pool.ref_cnt(hits[stop]) == 2
            and hits[stop] not in self._run_of
        ):
            stop += 1
        run = Run(list(hits[at:stop]), now_fs)
        self._run_of.update(dict.fromkeys(run.blocks, run))
        self._hold(run, owner)
        self._hold(run, request)
        return run

    def _owner(self, request: Request, group: int, block_id: int, at: int) -> Request:
        """The one other request that holds a block; content at place `at` of a sequence is at place `at` of every table."""
        for other in self._running():
            blocks = other.table.groups[group].blocks
            if other is not request and at < len(blocks) and blocks[at] == block_id:
                return other
        raise LookupError(f"block {block_id} has {self._pool.ref_cnt(block_id)} holders, and no running request has it")

    def _hold(self, run: Run, request: Request) -> None:
        run.holders[request] = run.time_fs.copy()
        request.shared_runs.append(run)

    def _split(self, run: Run, index: int) -> Run:
        """Cut a run before its block `index`; returns the second part."""
        second = Run(run.blocks[index:], run.since_fs)
        del run.blocks[index:]
        second.time_fs = run.time_fs.copy()
        for request, joined in run.holders.items():
            second.holders[request] = joined
            request.shared_runs.append(second)
        self._run_of.update(dict.fromkeys(second.blocks, second))
        return second

    def _leave(self, run: Run, request: Request, now_fs: int) -> None:
        run.count(now_fs)
        self._credit(run, request)
        if len(run.holders) == 1:  # nobody to share with is left
            (last,) = run.holders
            self._credit(run, last)
            last.shared_runs.remove(run)
            for block_id in run.blocks:
                del self._run_of[block_id]

    def _credit(self, run: Run, request: Request) -> None:
        """Add to a request's books the time it was in a run."""
        joined, shared = run.holders.pop(request), request.shared_fs
        for holders, time_fs in run.time_fs.items():
            spent_fs = time_fs - joined.get(holders, 0)
            if spent_fs:
                shared[holders] = shared.get(holders, 0) + spent_fs * len(run.blocks)
