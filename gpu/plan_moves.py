"""PlanMoves: what a plan does to blocks before anything is computed, and the device's book of who holds them.

Order, for one plan: what slid out of windows, saves, forks, swap-outs, releases, copies, swap-ins, loads. What slid out in the stretch
before, the core may have given to anybody since; forks share blocks that the releases give back, swap-outs read them, releases make
room that copies, swap-ins and loads fill. A move that ran out of memory stays in the
journal with all that follow, and is done before the next plan's: the core has taken the step back, so nobody has written in
between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial

from sim.core.blocks import NO_BLOCK, BlockPool, IntegrityError
from sim.core.need import blocks_for, skipped_blocks
from sim.core.plan import CpuMove, ScheduledRequest, StepPlan, Untold
from sim.core.tables import BlockTables

from .copy_order import independent
from .cpu_moves import CpuMoves, Pairs
from .ops import Ops
from .out_of_memory import OUT_OF_MEMORY
from .pool import PagedKVPool
from .staging import MAX_IDS

Tables = tuple[tuple[int, ...], ...]
"""The block tables of one request, one an attention group."""

Given = tuple[str, tuple[int, ...]]
"""A request, and blocks that it gives back."""


class PlanMoves:
    """Moves blocks of one device pool as plans say."""

    def __init__(
        self,
        pool: PagedKVPool,
        ops: Ops,
        cpu: CpuMoves,
        *,
        is_cached: Callable[[int], bool],
        tables: BlockTables | None = None,
    ) -> None:
        """`tables` are such as the core's, for what follows from them; by default those of a model with one group and no window."""
        self._pool, self._ops = pool, ops
        self._tables = BlockTables(BlockPool(pool.num_blocks), pool.layout.block_size) if tables is None else tables
        self.cpu = cpu
        """Moves between the device and the CPU."""
        self._is_cached = is_cached
        """Whether a prefix cache may still find what a block holds: then it is not poisoned."""
        self._journal: deque[tuple[str, Callable[[], None]]] = deque()
        self._held: dict[str, Tables] = {}
        self._copied_away: set[int] = set()  # sources of copies since a step was last computed: not to be poisoned
        self._replaces: dict[
            int, int
        ] = {}  # target to source of copies, until the request that has the source is seen with the target
        self._unsettled: set[str] = set()  # in a step that was taken back before the device held their blocks
        self._loading: set[str] = set()  # hold blocks that were brought for them, and have not been in a step with them
        self._preempted: set[str] = (
            set()
        )  # in this plan; they may come back in it, to blocks that the prefix cache kept
        self.during = ""
        """The move in progress, for reports."""
        self.copied_blocks = 0
        """Blocks that were copied for copy-on-write."""

    @property
    def holders(self) -> Collection[str]:
        """Requests that hold blocks here."""
        return self._held.keys()

    def num_passed(self, scheduled: Sequence[ScheduledRequest]) -> int:
        """Blocks that slid out of the windows of all who hold them by the step that is scheduled so, and that the next plan will give back:
        in a later step of a stretch the core does not count them any more.
        """
        passed: dict[int, set[str]] = {}
        for request in scheduled:
            for own, table in zip(self._tables.groups, _tables(request), strict=True):
                for block in table[: skipped_blocks(request.context_tokens, own.block_size, own.window)]:
                    if block != NO_BLOCK:
                        passed.setdefault(block, set()).add(request.request_id)
        return sum(names == set(self._pool.tags.holders(block)) for block, names in passed.items())

    # -- plans ----------------------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """Do what `plan` asks of blocks, and what an earlier plan left undone.

        Raises:
            OutOfMemoryError: a move had no memory; it and the rest are done by the next call.
            DoubleFreeError: a release by somebody who does not hold the block.
        """
        self._copied_away.update(source for source, _ in plan.copies)
        self._replaces.update((target, source) for source, target in plan.copies)
        self._preempted = set(plan.preempted)
        never_used = self._unsettled | self._loading | self._preempted
        self._put_slid(plan.slid, never_used)
        for _, pairs in plan.saves:
            self._put("save to the prefix tier", partial(self.cpu.save, pairs))
        releases = self._put_forks(plan.forks, plan.releases)
        leaving, coming = ({move.request_id: move for move in moves} for moves in (plan.to_cpu, plan.from_cpu))
        for request_id, pairs in plan.swap_outs:
            if request_id in leaving:
                self._put(f"move to the CPU of {request_id}", partial(self.cpu.to_cpu, leaving[request_id]))
            else:
                self._put(f"swap-out of {request_id}", partial(self.cpu.swap_out, request_id, pairs))
        for request_id, blocks in releases:
            strict = request_id not in never_used
            release = partial(self._release, request_id, blocks, strict=strict, whole=request_id in plan.preempted)
            self._put(f"release by {request_id}", release)
        for batch in independent(plan.copies):
            self._put("copy-on-write", partial(self._copy, batch))
        for request_id, pairs in plan.swap_ins:
            if request_id in coming:
                self._put(f"move from the CPU of {request_id}", partial(self._from_cpu, coming[request_id]))
            else:
                self._put(f"swap-in of {request_id}", partial(self.cpu.swap_in, request_id, pairs))
        for request_id in plan.ended_on_cpu:
            self._put(f"end of {request_id} on the CPU", partial(self.cpu.end_on_cpu, request_id))
        for request_id, _, pairs in plan.loads:
            self._put(f"load for {request_id}", partial(self._load, request_id, pairs))
        self._drain()

    def hold(self, scheduled: ScheduledRequest) -> None:
        """The step that begins uses this request's table: book it, and poison what is new and unwritten.

        Raises:
            IntegrityError: a block left the table that nobody released and no copy replaced, or one is used on that its owner gave back
                (checked mode).
            FenceError: a block's last reader is not done (checked mode).
        """
        name, tables = scheduled.request_id, _tables(scheduled)
        before = self._held.get(name, ())
        if self._pool.checked and tables != before and name not in self._preempted:
            written = blocks_for(scheduled.context_tokens, self._pool.layout.block_size)
            had = before if before and name not in self._loading else ((),) * len(tables)
            for held, table in zip(had, tables, strict=True):
                known = (b if self._is_cached(b) and b not in self._replaces else NO_BLOCK for b in table[:written])
                self._pool.tags.check_kept(name, held, known, self._pool.clock.step)
        self._unsettled.discard(name)
        self._loading.discard(name)
        if tables == before:
            return
        was, now = _blocks(before), _blocks(tables)
        replaced = {self._replaces.pop(block) for block in now - was if block in self._replaces}
        gone = was - now
        if gone:
            unexplained = gone - replaced
            if self._pool.checked and unexplained:
                raise IntegrityError(
                    f"{name} no longer uses blocks {sorted(unexplained)} at step {self._pool.clock.step}, and no plan released them"
                )
            self._give_back(name, sorted(gone))
        self._held[name] = tables  # first: should poisoning fail, the step is taken back with the blocks
        for table in tables:
            self._pool.assign(name, table, scheduled.context_tokens)

    def settle(self) -> None:
        """The first step of the plan was computed: its copies are part of the tables now."""
        self._copied_away.clear()

    def take_back(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """The first step of a plan computed nothing: the core has cut the tables of its requests to what is written. That may be less
        than a request's context: the rest it was to read from blocks that another one was to write in this step. If the plan's moves
        are not all done, nobody holds anything of it yet.
        """
        size = self._pool.layout.block_size
        void: set[int] = set()
        for request in scheduled:
            for table in _tables(request):
                void.update(table[request.context_tokens // size :])
        for request in scheduled:
            name, tables = request.request_id, self._held.get(request.request_id)
            if tables is None or self._journal or name in self._loading:
                self._unsettled.add(name)
                continue
            core = self._tables.new(name)
            for own, blocks in zip(core.groups, tables, strict=True):
                own.blocks = list(blocks)
            keep = blocks_for(self._tables.tokens_before(core, request.context_tokens, void), size)
            self._give_back(name, [block for table in tables for block in table[keep:]])
            self._held[name] = tuple(table[:keep] for table in tables)

    def close(self, untold: Untold) -> None:
        """The run is over: do what no plan has told."""
        never_used = self._unsettled | self._loading
        self._put_slid(untold.slid, never_used)
        for request_id, blocks in self._put_forks(untold.forks, untold.releases):
            release = partial(self._release, request_id, blocks, strict=request_id not in never_used)
            self._put(f"release by {request_id}", release)
        while self._journal:
            with suppress(*OUT_OF_MEMORY):  # nobody will read what a move that fails now would have brought
                self._journal.popleft()[1]()

    def _put_slid(self, slid: Sequence[Given], never_used: Collection[str]) -> None:
        for request_id, blocks in slid:
            slide = partial(self._release, request_id, blocks, strict=request_id not in never_used)
            self._put(f"what slid out of the window of {request_id}", slide)

    def _put_forks(self, forks: Sequence[tuple[str, str, tuple[int, ...]]], releases: Sequence[Given]) -> list[Given]:
        """Forks, each after its child has given back what it held before; what is left of the releases."""
        left = list(releases)
        for child, source, table in forks:
            # One that the device knows gives back first; the release by one that it does not know is that of its end, after the fork.
            known = child in self._held or child in self._unsettled
            had = next((given for given in left if given[0] == child), None) if known else None
            if had is not None:
                left.remove(had)
                self._put(f"release by {child}", partial(self._release, *had, strict=child not in self._unsettled))
            if table:
                self._put(f"fork of {source}", partial(self._fork, child, table))
        return left

    # -- single moves ---------------------------------------------------------------------------------------------

    def _put(self, what: str, move: Callable[[], None]) -> None:
        self._journal.append((what, move))

    def _drain(self) -> None:
        while self._journal:
            self.during, move = self._journal[0]
            move()
            self._journal.popleft()
        self.during = ""

    def _release(self, name: str, blocks: Sequence[int], *, strict: bool, whole: bool = False) -> None:
        """Not `strict`: somebody gives back, with the rest, blocks that it got in the same plan and never used. A victim gives back the
        `whole` of what it held, also a block that a copy was to replace in this plan, and has not. For a block that a copy was to
        give it, in a step that was taken back, it gives back the one that it has instead.
        """
        tables = self._held.get(name, ())
        held = _blocks(tables)
        if whole:
            blocks = sorted(held)
        missed = {block for block in blocks if block not in held and self._replaces.get(block) in held}
        blocks = [self._replaces.pop(block) if block in missed else block for block in blocks]
        self._give_back(name, blocks if strict else [block for block in blocks if block in held])
        given = set(blocks)
        rest = tuple(tuple(NO_BLOCK if block in given else block for block in table) for table in tables)
        if any(map(any, rest)):
            self._held[name] = rest
        else:
            self._held.pop(name, None)

    def _give_back(self, name: str, blocks: Sequence[int]) -> None:
        """Release blocks; those that are still to be copied from, or that a prefix cache may find, stay as they are."""
        given = [block for block in blocks if block != NO_BLOCK]
        kept = {block for block in given if block in self._copied_away or self._is_cached(block)}
        self._pool.release(name, [block for block in given if block in kept], keep_content=True)
        self._pool.release(name, [block for block in given if block not in kept])

    def _fork(self, name: str, blocks: tuple[int, ...]) -> None:
        """`name` holds blocks that its source holds too, group by group: nothing is fresh, all is written."""
        self._pool.assign(name, blocks, len(blocks) * self._pool.layout.block_size)
        # Tables of one request are equally long: blocks hold equally many tokens.
        length = len(blocks) // len(self._tables.new(name).groups)
        self._held[name] = tuple(blocks[start : start + length] for start in range(0, len(blocks), length))

    def _copy(self, copies: Pairs) -> None:
        ids, rows = self._ops.staging.ids, self._pool.rows
        for start in range(0, len(copies), MAX_IDS):
            sources, targets = zip(*copies[start : start + MAX_IDS], strict=True)
            with ids("blocks to copy", sources) as from_ids, ids("copies of blocks", targets) as to_ids:
                self._ops.move_blocks(rows, rows, from_ids, to_ids)
        self.copied_blocks += len(copies)

    def _from_cpu(self, move: CpuMove) -> None:
        """The blocks are the request's from here on, as those that are loaded."""
        self.cpu.from_cpu(move)
        self._held[move.request_id] = move.group_tables
        self._loading.add(move.request_id)

    def _load(self, name: str, pairs: Pairs) -> None:
        """The blocks are the request's from here on, though no step has them in a table yet."""
        targets = tuple(block for _, block in pairs)
        self._pool.assign(name, targets, len(targets) * self._pool.layout.block_size)
        self._held[name] = (targets,)  # of all groups; in which tables they are, its first step says
        self._loading.add(name)
        self.cpu.load(name, pairs)


def _tables(scheduled: ScheduledRequest) -> Tables:
    return scheduled.group_tables or (scheduled.block_table,)


def _blocks(tables: Tables) -> set[int]:
    """The blocks in all tables of a request."""
    return {block for table in tables for block in table} - {NO_BLOCK}
