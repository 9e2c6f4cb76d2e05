"""TorchExecutor: carries out the core's plans for real, and says how long each step took.

The seam's other side: what `ModelExecutor` prices, this does. A plan's moves come first (`plan_moves`), then one forward pass
a step, then sampling. Output lengths are the core's affair, so an end-of-sequence token ends nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from sim.core.plan import Durations, OomReport, ScheduledRequest, StepPlan, StepResult

from .batch import BatchBuffers, Sampling, StepBatch, Work
from .kernels.sampling import BrokenLogitsError, check_tokens
from .model import Decoder
from .out_of_memory import OUT_OF_MEMORY, oom_report
from .plan_moves import PlanMoves
from .pool import PagedKVPool, PoisonedReadError
from .swap import BlockMover
from .timing import step_timer
from .tokens import TokenBook
from .workspace import Workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReading:
    """What one step did and held, for whoever records it."""

    step: int
    duration_fs: int
    phase: str
    """`prefill`, `decode` or `mixed`."""
    num_tokens: int
    num_seqs: int
    allocated_blocks: int
    """Blocks of the pool that requests hold, by the device's own book."""
    workspace_bytes: int
    """High-water mark of the step."""
    oom: bool


class TorchExecutor:
    """Executes plans with a decoder over a paged pool on one device. An `Executor` for one engine core."""

    def __init__(
        self,
        model: Decoder,
        pool: PagedKVPool,
        workspace: Workspace,
        buffers: BatchBuffers,
        tokens: TokenBook,
        *,
        mover: BlockMover | None = None,
        is_cached: Callable[[int], bool] = lambda block_id: False,
        sampling: Sampling | None = None,
        watch: AbstractContextManager[Any] | None = None,
        on_step: Callable[[StepReading], None] | None = None,
    ) -> None:
        """`is_cached` says whether the core's prefix cache may find a block; `watch` is entered around every step (a meter
        with a byte limit, for instance); `on_step` gets a reading a step.
        """
        self.model, self.pool, self.workspace, self.tokens = model, pool, workspace, tokens
        self._buffers = buffers
        self._moves = PlanMoves(pool, model.ops, mover, is_cached=is_cached)
        self._sampling = Sampling() if sampling is None else sampling
        self._watch = nullcontext() if watch is None else watch
        self._on_step = on_step
        self._timer = step_timer(pool.device)
        self.steps = self.oom_events = self.computed_tokens = self.sampled_tokens = 0
        """Steps run, those of them that ran out of memory, and what the others computed."""

    @property
    def moves(self) -> PlanMoves:
        """What was copied and swapped so far."""
        return self._moves

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the plan's steps; of a stretch, those that stay inside the blocks its first step has.

        The world may cut a stretch after the fact. Steps that were run and do not count have written only behind the
        contexts of requests that hold the block; a block of a later step may still be somebody's cached prefix, so the
        stretch ends before it is needed, and the core plans again.

        Raises:
            PoisonedReadError, ForeignReadError, DoubleFreeError, FenceError, IntegrityError: the plan, or this device, is at fault.
        """
        durations: list[int] = []
        sampled: dict[str, list[int]] = {}
        report: OomReport | None = None
        for child, source, _ in plan.forks:
            self.tokens.fork(child, source)
        first = plan.scheduled(0)
        tables = [len(request.block_table) for request in first]
        for ahead in range(plan.repeat):
            scheduled = first if ahead == 0 else plan.scheduled(ahead)
            if [len(request.block_table) for request in scheduled] != tables:
                break
            report = self._step(plan, ahead, scheduled, durations, sampled)
            if report is not None:
                break
        return StepResult(durations=Durations.measured(durations), tokens=sampled, oom=report)

    def close(self, releases: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        """The run is over: `releases` are those that no plan has told. Afterwards `leaked_blocks` is 0, or something leaked."""
        self._moves.close(releases)

    @property
    def leaked_blocks(self) -> int:
        """Blocks that the device's book says somebody holds or waits for; to be asked when nobody should."""
        counters = self.pool.counters()
        return counters.allocated_blocks + counters.quarantined_blocks

    def report(self) -> dict[str, Any]:
        """What ran, as JSON values: device, kernels and fallbacks, counts, bytes by ledger line."""
        counters = self.pool.counters()
        return {
            **self.model.ops.report(),
            "steps": self.steps,
            "oom_steps": self.oom_events,
            "computed_tokens": self.computed_tokens,
            "sampled_tokens": self.sampled_tokens,
            "copied_blocks": self._moves.copied_blocks,
            "swapped_out_blocks": self._moves.swapped_out_blocks,
            "swapped_in_blocks": self._moves.swapped_in_blocks,
            "bytes": {
                "weights": self.model.weights.num_bytes,
                "kv_cache": counters.reserved_bytes,
                "workspace": self.workspace.num_bytes,
                "workspace_high_water": self.workspace.high_water_bytes,
            },
            "blocks": {"allocated": counters.allocated_blocks, "quarantined": counters.quarantined_blocks, "free": counters.free_blocks},
        }  # fmt: skip

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
        self.pool.begin_step(step)
        self.workspace.reset()
        self._timer.start()
        drawn: dict[str, int] = {}
        try:
            with self._watch:
                if ahead == 0:
                    self._moves.begin(plan)
                for request in scheduled:
                    self._moves.hold(request)
                drawn = self._compute(scheduled)
        except OUT_OF_MEMORY as error:
            report = oom_report(error, self._moves.during or "forward pass", self.pool.device)
        durations.append(self._timer.stop_fs())
        self.pool.end_step()
        self.steps += 1
        if report is not None:
            self.oom_events += 1
            if ahead == 0:
                for request in scheduled:
                    self._moves.take_back(request)
        else:
            self._moves.settle()
            for request in scheduled:
                self.computed_tokens += request.num_tokens
                if request.samples:
                    token = drawn[request.request_id]
                    self.tokens.record(request.request_id, request.context_tokens + request.num_tokens, token)
                    sampled.setdefault(request.request_id, []).append(token)
            self.sampled_tokens += len(drawn)
        self._tell(step, durations[-1], scheduled, report is not None)
        return report

    def _compute(self, scheduled: tuple[ScheduledRequest, ...]) -> dict[str, int]:
        """The forward pass and sampling; the sampled token of each request that gets one."""
        work = [self._work(request) for request in scheduled]
        uniform: list[float] = []
        if self._sampling.temperature > 0:
            uniform = [
                self.tokens.uniform(item.name, item.context_tokens + item.num_tokens) for item in work if item.samples
            ]
        batch = self._buffers.fill(work, self.pool.layout.block_size, self._sampling, uniform)
        if self.pool.checked:
            for item in work:
                self.pool.check_read(item.name, item.block_table)
        logits = self.model.forward(batch, self.pool, self.workspace)
        if self.pool.checked:
            self._check_written(work)
        if not batch.sampled:
            return {}
        return dict(zip(batch.sampled, self._tokens_of(batch, logits, work), strict=True))

    def _work(self, request: ScheduledRequest) -> Work:
        start = request.context_tokens
        return Work(
            name=request.request_id,
            token_ids=self.tokens.tokens(request.request_id, start, start + request.num_tokens),
            context_tokens=start,
            block_table=request.block_table,
            samples=request.samples,
        )

    def _tokens_of(self, batch: StepBatch, logits: Any, work: list[Work]) -> list[int]:
        """The sampled tokens, on the host.

        Raises:
            PoisonedReadError: a request read a block that holds nothing; BrokenLogitsError: logits broke for another reason.
        """
        try:
            return check_tokens(self.model.sample(batch, logits), list(batch.sampled))
        except BrokenLogitsError:
            self._name_culprit(work)
            raise

    def _check_written(self, work: list[Work]) -> None:
        """Verify that the step stored the KV of all its tokens where their tables say. A chunk that samples nothing would
        otherwise hide a lost write until somebody reads it.
        """
        try:
            for item in work:
                last = item.context_tokens + item.num_tokens
                self.pool.check_content(item.name, item.block_table, last, item.context_tokens)
        except PoisonedReadError:
            self._name_culprit(
                work
            )  # NaN that was read is passed on: the first that is found need not be the first that was
            raise

    def _name_culprit(self, work: list[Work]) -> None:
        """Find the block that a request should not have read."""
        size, windows = self.pool.layout.block_size, [kind.window for kind in self.model.config.shape.attention]
        for item in work:
            last = item.context_tokens + item.num_tokens
            first = 0
            if None not in windows:
                first = max(item.context_tokens - max(window for window in windows if window is not None) + 1, 0)
            for index in range(first // size, -(-last // size)):
                if item.block_table[index]:
                    low, high = max(first, index * size), min(last, (index + 1) * size)
                    self.pool.check_content(item.name, item.block_table, high, low)

    def _tell(self, step: int, duration_fs: int, scheduled: tuple[ScheduledRequest, ...], oom: bool) -> None:
        if self._on_step is None:
            return
        prefills = sum(request.num_tokens > 1 for request in scheduled)
        self._on_step(
            StepReading(
                step=step,
                duration_fs=duration_fs,
                phase="decode" if not prefills else "prefill" if prefills == len(scheduled) else "mixed",
                num_tokens=sum(request.num_tokens for request in scheduled),
                num_seqs=len(scheduled),
                allocated_blocks=self.pool.tags.num_held,
                workspace_bytes=self.workspace.step_high_water_bytes,
                oom=oom,
            )
        )
