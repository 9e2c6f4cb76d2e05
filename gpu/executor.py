"""TorchExecutor: carries out the core's plans for real, and says how long each step took.

The seam's other side: what `ModelExecutor` prices, this does. A plan's moves come first (`plan_moves`), then one forward pass
a step (`forward_pass`), sampling included. Output lengths are the core's affair, so an end-of-sequence token ends nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from sim.core.durations import Durations
from sim.core.plan import OomReport, ScheduledRequest, StepPlan, StepResult, Untold
from sim.core.tables import BlockTables

from .cpu_moves import CpuMoves
from .forward_pass import ForwardPass
from .op_timeline import OpTimeline
from .out_of_memory import OUT_OF_MEMORY, freed_but_pending, oom_report, typed_out_of_memory
from .plan_moves import PlanMoves
from .readings import MemoryReader, StepReading
from .timing import step_timer


class TorchExecutor:
    """Executes plans with a decoder over a paged pool on one device. An `Executor` for one engine core."""

    def __init__(
        self,
        forward: ForwardPass,
        *,
        cpu: CpuMoves | None = None,
        is_cached: Callable[[int], bool] = lambda block_id: False,
        tables: BlockTables | None = None,
        watch: AbstractContextManager[Any] | None = None,
        on_step: Callable[[StepReading], None] | None = None,
        memory: MemoryReader | None = None,
        timeline: OpTimeline | None = None,
        clock: str = "wall",
    ) -> None:
        """`cpu` moves blocks to and from the CPU, where plans do. `is_cached` says whether the core's prefix cache may find a block,
        `tables` are such as the core's; `watch` is entered around every step (a meter with a byte limit, for instance); `on_step` gets
        a reading a step, with what `memory` reads; `timeline` follows one step; `clock` is one of `gpu.timing.CLOCKS`.
        """
        self.forward = forward
        self.model, self.pool, self.workspace = forward.model, forward.pool, forward.workspace
        cpu = CpuMoves(forward.pool, forward.model.ops) if cpu is None else cpu
        self._moves = PlanMoves(forward.pool, forward.model.ops, cpu, is_cached=is_cached, tables=tables)
        self._watch = nullcontext() if watch is None else watch
        self._on_step, self._memory = on_step, memory
        self.timeline = timeline
        self._timer = step_timer(forward.pool.device, clock)
        self._kv_tokens: dict[str, int] = {}
        self.steps = self.oom_events = self.computed_tokens = self.sampled_tokens = 0
        """Steps run, those of them that ran out of memory, and what the others computed."""
        self.split_steps = self.retried_steps = 0
        """Steps in several passes, and steps that the allocator failed once without need."""

    @property
    def moves(self) -> PlanMoves:
        """What was copied and swapped so far."""
        return self._moves

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the plan's steps; of a stretch, those that stay inside the blocks its first step has.

        The world may cut a stretch after the fact. Steps that were run and do not count have written only behind the
        contexts of requests that hold the block; a block of a later step may still be somebody's cached prefix, so the
        stretch ends before it is needed, and the core plans again. For the same reason what slides out of a window meanwhile
        stays in the tables, unread, until the next plan says that it did; readings do not count it.

        Raises:
            PoisonedReadError, ForeignReadError, DoubleFreeError, FenceError, IntegrityError: the plan, or this device, is at fault.
        """
        durations: list[int] = []
        sampled: dict[str, list[int]] = {}
        report: OomReport | None = None
        self._fork_tokens(plan.forks)
        if not plan.shape.num_tokens:
            return self._only_moves(plan)
        first = plan.scheduled(0)
        for ahead in range(min(plan.repeat, self._steps_inside(first))):
            scheduled = tuple(replace(request, context_tokens=request.context_tokens + ahead) for request in first)
            report = self._step(plan, ahead, scheduled, durations, sampled)
            if report is not None:
                break
        return StepResult(
            durations=Durations.measured(durations),
            tokens=sampled,
            workspace_share=self.workspace.step_high_water_bytes / self.workspace.num_bytes,
            oom=report,
        )

    def close(self, untold: Untold) -> None:
        """The run is over, and this is what became of blocks and sequences after its latest plan. Afterwards `leaked_blocks` is 0, or
        something leaked.

        Raises:
            IntegrityError: a buffer of the host or the device was not given back.
        """
        self._fork_tokens(untold.forks)
        self._moves.close(untold)
        self.model.ops.staging.check_returned("the end of the run")

    @property
    def leaked_blocks(self) -> int:
        """Blocks that the device's book says somebody holds or waits for; to be asked when nobody should."""
        counters = self.pool.counters()
        return counters.allocated_blocks + counters.quarantined_blocks

    def report(self) -> dict[str, Any]:
        """What ran, as JSON values: device, kernels and fallbacks, graphs, counts, bytes by ledger line."""
        counters, graphs = self.pool.counters(), self.forward.graphs
        buffers, staging = self.forward.buffers.held_bytes
        return {
            **self.model.ops.report(),
            "graphs": None if graphs is None else graphs.report(),
            "steps": self.steps,
            "oom_steps": self.oom_events,
            "split_steps": self.split_steps,
            "retried_steps": self.retried_steps,
            "computed_tokens": self.computed_tokens,
            "sampled_tokens": self.sampled_tokens,
            "copied_blocks": self._moves.copied_blocks,
            **self._moves.cpu.report(),
            "bytes": {
                "weights": self.model.weights.num_bytes,
                "kv_cache": counters.reserved_bytes,
                "workspace": self.workspace.num_bytes,
                "workspace_high_water": self.workspace.high_water_bytes,
                "buffers": buffers,
                "staging": staging,
            },
            "blocks": {"allocated": counters.allocated_blocks, "quarantined": counters.quarantined_blocks, "free": counters.free_blocks},
        }  # fmt: skip

    def _fork_tokens(self, forks: Sequence[tuple[str, str, tuple[int, ...]]]) -> None:
        for child, source, _ in forks:
            self.forward.tokens.fork(child, source)

    def _steps_inside(self, scheduled: Sequence[ScheduledRequest]) -> int:
        """How many steps of a stretch of decodes there are before somebody's next token lies in a block that it does not have yet."""
        size = self.pool.layout.block_size
        return min(size - (request.context_tokens + request.num_tokens - 1) % size for request in scheduled)

    def _only_moves(self, plan: StepPlan) -> StepResult:
        """A plan that computes nothing and begins copies; it takes no time."""
        report: OomReport | None = None
        self.pool.begin_step(plan.step)
        try:
            with typed_out_of_memory():
                self._moves.begin(plan)
        except OUT_OF_MEMORY as error:
            report = oom_report(error, self._moves.during, self.pool.device)
        self.pool.end_step()
        self._moves.cpu.catch_up()
        return StepResult(durations=Durations.one(0), oom=report)

    # -- one step -------------------------------------------------------------------------------------------------

    def _step(
        self,
        plan: StepPlan,
        ahead: int,
        scheduled: tuple[ScheduledRequest, ...],
        durations: list[int],
        sampled: dict[str, list[int]],
    ) -> OomReport | None:
        """Run one step; adds its duration and its tokens. Returns a report, and no tokens, if it ran out of memory."""
        step, report = plan.step + ahead, None
        followed = self.timeline is not None and self.timeline.step == step
        self.pool.begin_step(step)
        self.workspace.reset()
        self._timer.start()
        drawn: dict[str, int] = {}
        try:
            with typed_out_of_memory(), self._watch:
                if ahead == 0:
                    self._moves.begin(plan)
                for request in scheduled:
                    self._moves.hold(request)
                if followed and self.timeline is not None:
                    with self.timeline.follow(plan.shape.later(ahead), self.model.ops, self.workspace):
                        drawn = self.forward.run(scheduled, eager=True)
                else:
                    drawn = self._forward(scheduled, plan.shape.passes)
        except OUT_OF_MEMORY as error:
            report = oom_report(error, self._moves.during or "forward pass", self.pool.device)
        start_fs = plan.start_fs + sum(durations)
        durations.append(self._timer.stop_fs())
        self.pool.end_step()
        self._moves.cpu.catch_up()
        if self.pool.checked:
            self.model.ops.staging.check_returned(f"the end of step {step}")
        self.steps += 1
        self.split_steps += self.forward.num_passes > 1
        if report is not None:
            self.oom_events += 1
            if ahead == 0:
                self._moves.take_back(scheduled)
        else:
            self._moves.settle()
            self._record(scheduled, drawn, sampled)
        if self._on_step is not None:
            self._on_step(self._reading(step, start_fs, durations[-1], scheduled, report is not None))
        return report

    def _forward(self, scheduled: tuple[ScheduledRequest, ...], parts: int) -> dict[str, int]:
        """The forward pass; made again, once, when the allocator failed beside memory that had just become free. The second time
        it writes the same KV into the same slots.
        """
        try:
            return self.forward.run(scheduled, parts)
        except OUT_OF_MEMORY as error:
            if not freed_but_pending(error, self.pool.device):
                raise
        self.retried_steps += 1
        self.workspace.rewind()
        return self.forward.run(scheduled, parts)

    def _record(
        self, scheduled: tuple[ScheduledRequest, ...], drawn: dict[str, int], sampled: dict[str, list[int]]
    ) -> None:
        tokens = self.forward.tokens
        for request in scheduled:
            name, end = request.request_id, request.context_tokens + request.num_tokens
            self.computed_tokens += request.num_tokens
            self._kv_tokens[name] = end
            if request.samples:
                tokens.record(name, end, drawn[name])
                sampled.setdefault(name, []).append(drawn[name])
        self.sampled_tokens += len(drawn)

    def _reading(
        self, step: int, start_fs: int, duration_fs: int, scheduled: tuple[ScheduledRequest, ...], oom: bool
    ) -> StepReading:
        prefills = sum(request.num_tokens > 1 for request in scheduled)
        holders = self._moves.holders
        for name in [name for name in self._kv_tokens if name not in holders]:
            del self._kv_tokens[name]
        return StepReading(
            step=step,
            start_fs=start_fs,
            duration_fs=duration_fs,
            phase="decode" if not prefills else "prefill" if prefills == len(scheduled) else "mixed",
            num_tokens=sum(request.num_tokens for request in scheduled),
            num_seqs=len(scheduled),
            decode_seqs=len(scheduled) - prefills,
            kv_tokens=sum(self._kv_tokens.values()),
            allocated_blocks=self.pool.tags.num_held - self._moves.num_passed(scheduled),
            workspace_bytes=self.workspace.step_high_water_bytes,
            served_by=self.forward.served_by,
            oom=oom,
            memory=None if self._memory is None else self._memory.read(),
        )
