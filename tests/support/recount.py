"""A second, naive accounting of small random runs, token by token."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from hypothesis import strategies as st

from sim.core.config import EngineConfig
from sim.core.plan import ScheduledRequest, StepPlan, StepResult
from sim.core.policy import Batching, scheduling_policy
from sim.core.request import Outcome, RequestSpec
from sim.costs.constant import FixedCost
from sim.costs.protocol import CostModel
from sim.results.recorder import RunRecord
from sim.world import run_world
from sim.world.executors import ModelExecutor
from tests.support.roomy import TICK_S, engine, request


@dataclass(frozen=True)
class Run:
    """One engine and its load."""

    config: EngineConfig
    cost: FixedCost
    requests: tuple[RequestSpec, ...]
    batching: Batching = Batching.MIXED

    def go(self, **hooks: object) -> RunRecord:
        policy = replace(scheduling_policy(self.config), batching=self.batching)
        return run_world(self.config, self.cost, self.requests, check=True, policy=policy, **hooks)


@st.composite
def runs(
    draw: st.DrawFn,
    *,
    windows: Sequence[int | None] = (None,),
    aborts: bool = True,
    shared: bool = True,
    growing: bool | None = None,
) -> Run:
    """Small engines, mostly short of blocks, with arrivals on a grid of 1/1024 s."""
    growing = draw(
        st.booleans() if growing is None else st.just(growing)
    )  # short prompts and long answers: everybody is let in, and then there is not enough
    max_num_seqs = draw(st.sampled_from([3, 5] if growing else [1, 2, 5]))
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    config = engine(
        num_gpu_blocks=draw(st.sampled_from([64, 48] if growing else [40, 96, 300])) // block_size,
        block_size=block_size,
        max_model_len=128,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.sampled_from([60, 12, 4, 0])),
        enable_prefix_caching=draw(st.sampled_from([True, True, False])),
        scheduling_policy=draw(st.sampled_from(["fcfs", "priority"])),
        reserve_full_prompt=draw(st.booleans()),
        sliding_window=draw(st.sampled_from(windows)),
        watermark=draw(st.sampled_from([0.0, 0.2])),
    )
    cost = draw(
        st.sampled_from(
            [
                FixedCost(8 * TICK_S),
                FixedCost(8 * TICK_S, per_context_token_s=TICK_S),
                FixedCost(4 * TICK_S, per_token_s=TICK_S, per_seq_s=2 * TICK_S),
            ]
        )
    )
    span, arrival_ticks, made = draw(st.sampled_from([4, 2, 8])), 0, []
    for number in range(draw(st.integers(1, 8))):
        arrival_ticks += draw(st.sampled_from([0, 3, 8] if growing else [0, 8, 16, 50]))
        ids = draw(st.sampled_from(["", "xxxx", "xx", "xxxxxx", "xxy", "y"])) if shared else ""
        patience = draw(st.sampled_from([None] * 6 + [9, 24, 64])) if aborts else None
        made.append(
            request(
                number,
                arrival_ticks * TICK_S,
                draw(st.integers(1, 10 if growing else 40)),
                draw(st.integers(15, 40) if growing else st.integers(1, 30)),
                priority=draw(st.integers(0, 2)),
                content_ids=tuple(ids),
                content_block_tokens=span if ids else 0,
                cancel_after_s=None if patience is None else patience * TICK_S,
            )
        )
    return Run(config, cost, tuple(made), draw(st.sampled_from([Batching.MIXED, *Batching])))


@dataclass
class StepTimes:
    """An executor that writes down when every single step began and how long it took."""

    cost: CostModel
    steps: list[tuple[int, int, tuple[ScheduledRequest, ...]]] = field(default_factory=list)

    def execute(self, plan: StepPlan) -> StepResult:
        result = ModelExecutor(self.cost).execute(plan)
        assert plan.repeat == 1
        self.steps.append((plan.start_fs, result.durations.total_fs, plan.scheduled(0)))
        return result


class Recount:
    """A second accounting: replays the decision log of a stepping run with the times of its steps, token by token.

    It knows how an engine works (a request whose known tokens are all computed gets a new one at the end of the step; a prefix hit
    is a block of a new table that no token is computed for) and nothing of how the simulator keeps its books.
    """

    def __init__(self, run: Run) -> None:
        log: list[dict[str, object]] = []
        times = StepTimes(run.cost)
        self.run = run
        self.record = run.go(stepping=True, decision_log=log.append, executor=lambda core: times)
        self.known = {spec.request_id: spec.input_tokens for spec in run.requests}
        self.computed: Counter[str] = Counter()
        self.tables: dict[str, list[int]] = defaultdict(list)
        self.token_times_fs: dict[str, list[int]] = defaultdict(list)
        self.scheduled_tokens: Counter[str] = Counter()
        self.scheduled_fs: dict[str, int] = {}
        self.first_hits: dict[str, int] = {}
        self.preemptions: Counter[str] = Counter()
        self.held_fs: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.time_by_owned_fs: Counter[int] = Counter()
        self.slots_fs = self.unfilled_fs = self.running_fs = 0
        self.worst_unfilled = 0.0
        steps = [entry for entry in log if entry["scheduled"]]
        for entry, (start_fs, duration_fs, shares) in zip(steps, times.steps, strict=True):
            self._step(entry, start_fs, duration_fs)
            self._compare_tables(shares)

    def _step(self, entry: dict[str, object], start_fs: int, duration_fs: int) -> None:
        size = self.run.config.block_size
        scheduled = {name for name, _, _ in entry["scheduled"]}
        for name, blocks in entry["released"]:
            kept = [0 if block in blocks else block for block in self.tables[name]]
            self.tables[name] = kept if name in scheduled or any(kept) else []
        for name in entry["preempted"]:
            self.tables[name] = []
            self.preemptions[name] += 1
        for name, tokens, blocks in entry["scheduled"]:
            if name in entry["admitted"]:
                self.tables[name] = []
                hits = len(blocks) - math.ceil(tokens / size)
                self.computed[name] = hits * size
                self.first_hits.setdefault(name, hits * size)
                self.scheduled_fs.setdefault(name, start_fs)
            else:
                self._slide(name)
                assert not set(blocks) & self._owned(), "a block is handed out while somebody holds it"
            self.tables[name] = [*self.tables[name], *blocks]
            self.computed[name] += tokens
            self.scheduled_tokens[name] += tokens
            if self.computed[name] == self.known[name]:
                self.known[name] += 1
                self.token_times_fs[name].append(start_fs + duration_fs)
        self._integrate(duration_fs)

    def _integrate(self, duration_fs: int) -> None:
        size = self.run.config.block_size
        slots = unfilled = 0
        for name, table in self.tables.items():
            if table:
                held = len(table) - table.count(0)
                slots += held * size
                unfilled += len(table) * size - self.computed[name]  # slots of blocks that slid away held tokens
                self.held_fs[name] += held * duration_fs
                self.peak[name] = max(self.peak[name], held)
                self.running_fs += duration_fs
        self.time_by_owned_fs[len(self._owned())] += duration_fs
        self.slots_fs += slots * duration_fs
        self.unfilled_fs += unfilled * duration_fs
        self.worst_unfilled = max(self.worst_unfilled, unfilled / slots)

    def _slide(self, name: str) -> None:
        window, size, table = self.run.config.sliding_window, self.run.config.block_size, self.tables[name]
        if window is not None:
            seen_from = self.computed[name] - window + 1  # the oldest token that the next one attends to
            self.tables[name] = [0 if (i + 1) * size <= seen_from else block for i, block in enumerate(table)]

    def _owned(self) -> set[int]:
        return {block for table in self.tables.values() for block in table if block}

    def _compare_tables(self, shares: tuple[ScheduledRequest, ...]) -> None:
        for share in shares:
            assert list(share.block_table) == self.tables[share.request_id]
            assert share.context_tokens + share.num_tokens == self.computed[share.request_id]

    def gaps_fs(self) -> list[int]:
        """Every inter-token gap of every finished request."""
        finished = [r.request_id for r in self.record.requests if r.outcome is Outcome.FINISHED]
        return [b - a for name in finished for a, b in pairwise(self.token_times_fs[name])]


every_run = runs(windows=(None, None, 4, 9))
