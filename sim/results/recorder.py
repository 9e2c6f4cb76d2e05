"""The recorder: writes down what one replica did, in exact integers, while it happens.

Integrals over time are sums of (whole number) x (femtoseconds), so the order in which they are added does not matter and a
leap leaves the same record as the steps it stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sim.core.blocks import IntegrityError
from sim.core.clock import to_s
from sim.core.config import EngineConfig
from sim.core.durations import Segment
from sim.core.engine import EngineCore
from sim.core.facts import Arrived, Committed
from sim.core.plan import StepPlan, StepResult
from sim.core.request import Outcome, Request

from .memory_record import MemoryRecord, RowMemory


@dataclass(slots=True)
class Row:
    """An interval of steps with one composition of the batch: one row of the timeline."""

    start_fs: int
    end_fs: int
    steps: int
    running: int
    waiting: int
    used_blocks: int
    used_blocks_end: int
    cached_blocks: int
    free_blocks: int
    quarantined_blocks: int
    prefill_tokens: int
    decode_tokens: int
    decode_version: int | None
    """The engine's version when nothing but decodes was scheduled: equal versions of neighbours make one row."""
    open: bool = True
    """Whether a step of it is under way."""
    memory: RowMemory | None = None
    """What its steps needed, where the device is known."""


@dataclass(slots=True)
class Integrals:
    """Sums over time, in femtoseconds."""

    time_by_used_blocks: dict[int, int] = field(default_factory=dict)
    """How long exactly so many blocks were owned, while the engine worked."""
    table_slots: int = 0
    """Token slots in block tables (a shared block counts once a holder)."""
    unfilled_slots: int = 0
    """Those of them that hold no token yet."""
    worst_unfilled: float = 0.0
    """Largest share of unfilled slots in any step."""

    @property
    def block_fs(self) -> int:
        """Integral of owned blocks."""
        return sum(used * time_fs for used, time_fs in self.time_by_used_blocks.items())


class Recorder:
    """Listens to one replica."""

    def __init__(self, replica: int, core: EngineCore, memory: MemoryRecord | None = None) -> None:
        self.replica = replica
        self.core = core
        self.memory = memory
        """The record of the device's memory, where the device is known."""
        self.rows: list[Row] = []
        self.ended_requests: list[Request] = []
        self.marks: list[tuple[int, str, str]] = []
        """`(time, kind, request_id)` of preemptions, rejections and failures."""
        self.gap_segments: list[Segment] = []
        """For each step of the decode set, in order, the time since its step before."""
        self.integrals = Integrals()
        self.num_events = 0
        """Arrivals, admissions, preemptions and endings: what happened, however many steps were leapt over."""
        self._row: Row | None = None
        self._in_system = 0
        self._in_system_since_fs = 0
        self._in_system_fs = 0
        self._sojourn_fs = 0

    def arrived(self, arrived: Arrived, core: EngineCore) -> None:
        """A request was sent to this replica. It counts as waiting once a decision has left, or will leave, it in the queue."""
        self.num_events += 1
        self._count_in_system(core.num_unfinished, arrived.request.arrival_fs)
        if self._row is not None and self._row.open and (self._row.waiting or not arrived.may_start):
            self._row.waiting = max(self._row.waiting, core.num_waiting)

    def planned(self, plan: StepPlan, core: EngineCore) -> None:
        """A plan starts. One that only begins copies takes no time and has no row."""
        self.num_events += len(plan.admitted) + len(plan.preempted)
        self.marks += [(plan.start_fs, "preempted", request_id) for request_id in plan.preempted]
        if not plan.shape.computes:
            self._row = None
            return
        pool, waiting = core.pool, core.num_waiting
        version = core.version if plan.shape.decode_seqs and not plan.shape.prefill else None
        self._row = self._row if self._row and version is not None and self._continues(plan.start_fs, version) else None
        if self._row is None:
            used = pool.num_owned
            self._row = Row(
                start_fs=plan.start_fs,
                end_fs=plan.start_fs,
                steps=0,
                running=core.num_running,
                waiting=waiting,
                used_blocks=used,
                used_blocks_end=used,
                cached_blocks=pool.num_cached,
                free_blocks=pool.num_free - pool.num_cached,
                quarantined_blocks=pool.num_quarantined,
                prefill_tokens=0,
                decode_tokens=0,
                decode_version=version,
            )
            self.rows.append(self._row)
        self._row.open = True
        self._row.waiting = max(self._row.waiting, waiting)

    def committed(self, plan: StepPlan, result: StepResult, committed: Committed, core: EngineCore) -> None:
        """The steps of a plan, or those of them that were done, are over."""
        row = self._row
        if row is None:
            self._count_in_system(core.num_unfinished, plan.start_fs)
            return
        row.open = False
        row.end_fs = plan.start_fs + result.durations.total_fs
        row.steps += result.steps
        row.used_blocks_end = committed.usage[-1][1]
        row.prefill_tokens += plan.shape.prefill_tokens if committed.computed else 0
        row.decode_tokens += plan.shape.decode_seqs * committed.computed
        if result.oom is not None:
            self.marks.append((row.end_fs, "oom", result.oom.op))
        if self.memory is not None:
            row.memory = self.memory.committed(row.memory, plan, result, committed)
        if committed.first_gap_fs is not None:
            self.gap_segments.append(Segment(1, committed.first_gap_fs))
            if committed.computed > 1:
                self.gap_segments += result.durations.prefix(committed.computed).without_first().segments
        self._integrate(result, committed)
        self._count_in_system(core.num_unfinished, row.end_fs)

    def idled(self, span_fs: int, used: int, slots: int, written: int) -> None:
        """For so long nothing was computed, while requests held so many blocks, with so many token slots, and tokens in them."""
        integrals = self.integrals
        integrals.time_by_used_blocks[used] = integrals.time_by_used_blocks.get(used, 0) + span_fs
        integrals.table_slots += slots * span_fs
        integrals.unfilled_slots += (slots - written) * span_fs

    def ended(self, request: Request, now_fs: int, core: EngineCore) -> None:
        """A request left this replica, `now`; it may have ended, for its client, a little earlier."""
        self.num_events += 1
        self._count_in_system(core.num_unfinished, now_fs)
        self._sojourn_fs += now_fs - request.arrival_fs
        self.ended_requests.append(request)
        if request.outcome is not Outcome.FINISHED:
            assert request.outcome is not None
            assert request.ended_fs is not None
            self.marks.append((request.ended_fs, request.outcome.value, request.request_id))

    def check_littles_law(self) -> None:
        """The integral of requests in the system equals the sum of their times in it (I12).

        Raises IntegrityError with both.
        """
        if self._in_system_fs != self._sojourn_fs:
            raise IntegrityError(
                f"Little's law fails: {to_s(self._in_system_fs)} request-seconds in the system, "
                f"{to_s(self._sojourn_fs)} seconds spent in it"
            )

    def _continues(self, start_fs: int, version: int) -> bool:
        last = self.rows[-1]
        return last.decode_version == version and last.end_fs == start_fs

    def _count_in_system(self, now_in_system: int, now_fs: int) -> None:
        self._in_system_fs += self._in_system * (now_fs - self._in_system_since_fs)
        self._in_system, self._in_system_since_fs = now_in_system, now_fs

    def _integrate(self, result: StepResult, committed: Committed) -> None:
        integrals, durations, more = self.integrals, result.durations, committed.written_per_step
        # A step that ran out of memory writes nothing: it has the tokens of the step before it.
        failed = result.steps - 1 if result.oom is not None and committed.computed else None
        time_by_used, worst = integrals.time_by_used_blocks, integrals.worst_unfilled
        slots_fs = emptied_fs = 0
        starts_fs = [durations.before_fs(step) for step, _ in committed.usage]
        ends_fs = [*starts_fs[1:], durations.total_fs]
        spans = zip(committed.usage, committed.table_slots, committed.emptied_slots, starts_fs, ends_fs, strict=True)
        for (step, used), slots, emptied, start_fs, end_fs in spans:
            span_fs = end_fs - start_fs
            time_by_used[used] = time_by_used.get(used, 0) + span_fs
            slots_fs += slots * span_fs
            emptied_fs += emptied * span_fs
            written = committed.written_tokens - emptied + more * (step - (step == failed))
            unfilled = (slots - written) / slots
            if unfilled > worst:
                worst = unfilled
        moment_fs = durations.moment_fs(result.steps) if more else 0
        if failed is not None:
            moment_fs -= durations.total_fs - durations.before_fs(failed)
        written_fs = committed.written_tokens * durations.total_fs - emptied_fs + more * moment_fs
        integrals.table_slots += slots_fs
        integrals.unfilled_slots += slots_fs - written_fs
        integrals.worst_unfilled = worst


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Everything a run left behind, of all its replicas."""

    config: EngineConfig
    recorders: tuple[Recorder, ...]
    requests: tuple[Request, ...]
    """Every request of the workload, in its order, ended; `replica_of` says where."""
    replica_of: dict[str, int]
    core_time_s: float
    """Wall-clock time of the simulation proper."""

    @classmethod
    def merge(
        cls, recorders: Sequence[Recorder], config: EngineConfig, order: Sequence[str], core_time_s: float
    ) -> RunRecord:
        """Close the records of all replicas. Raises IntegrityError if a request is missing or the books disagree (I12)."""
        by_id = {request.request_id: request for recorder in recorders for request in recorder.ended_requests}
        if len(by_id) != len(order) or any(request_id not in by_id for request_id in order):
            missing = [request_id for request_id in order if request_id not in by_id]
            raise IntegrityError(f"{len(order)} requests were sent and {len(by_id)} ended; missing: {missing[:10]}")
        for recorder in recorders:
            recorder.check_littles_law()
        return cls(
            config=config,
            recorders=tuple(recorders),
            requests=tuple(by_id[request_id] for request_id in order),
            replica_of={
                request.request_id: recorder.replica for recorder in recorders for request in recorder.ended_requests
            },
            core_time_s=core_time_s,
        )
