"""Engines that are mostly too small for what is asked of them, and an executor that follows who runs in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from sim.core.config import AttentionGroup, EngineConfig
from sim.core.engine import EngineCore
from sim.core.plan import StepPlan, StepResult
from sim.core.policy import Policy
from sim.core.request import Namespace, RequestSpec
from sim.costs.constant import FixedCost
from sim.results.recorder import RunRecord
from sim.world import run_world
from sim.world.executors import ModelExecutor
from tests.support.roomy import TICK_S, engine, request

COST = FixedCost(8 * TICK_S, per_context_token_s=TICK_S / 8)
STEP = FixedCost(TICK_S)


@dataclass(frozen=True)
class Load:
    """An engine and what is asked of it."""

    config: EngineConfig
    requests: tuple[RequestSpec, ...]
    policy: Policy | None = None

    def run(self, **hooks: object) -> RunRecord:
        return run_world(self.config, COST, self.requests, check=True, policy=self.policy, **hooks)


@st.composite
def loads(
    draw: st.DrawFn,
    *,
    policies: Sequence[str] = ("fcfs", "priority"),
    windows: Sequence[int | None] = (None, None, 4, 9),
    hybrid: bool = True,
    planned_ahead: Sequence[bool] = (False, True),
) -> Load:
    """Engines that are mostly too small for what is asked of them, and clients that mostly wait."""
    growing = draw(st.booleans())  # short prompts and long answers: everybody is let in, and then there is not enough
    chunked = draw(st.sampled_from([True, True, False]))
    max_num_seqs = draw(st.sampled_from([3, 4, 6] if growing else [1, 2, 3, 6]))
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    groups: tuple[AttentionGroup, ...] = ()
    if hybrid and draw(
        st.sampled_from([False, False, True])
    ):  # two groups of layers that keep different tokens, or three
        sizes = [block_size, *draw(st.sampled_from([(1,), (2,), (1, 1)]))]
        groups = tuple(
            AttentionGroup(
                block_size=size if size == block_size else size * block_size, window=draw(st.sampled_from([None, 4, 9]))
            )
            for size in sizes
        )
    config = engine(
        num_gpu_blocks=max(len(groups), 1)
        * draw(st.sampled_from([64, 48, 80] if growing else [24, 56, 200]))
        // block_size,
        block_size=block_size,
        max_model_len=draw(st.sampled_from([96, 96, 48])),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.sampled_from([60, 12, 4, 0])) if chunked else 96,
        enable_prefix_caching=draw(st.sampled_from([True, True, False])),
        enable_chunked_prefill=chunked,
        scheduling_policy=draw(st.sampled_from(policies)),
        reserve_full_prompt=draw(st.booleans()),
        sliding_window=None if groups else draw(st.sampled_from(windows)),
        kv_groups=groups,
        watermark=draw(st.sampled_from([0.0, 0.0, 0.2, 0.5])),
        async_scheduling=draw(st.sampled_from(planned_ahead)),
    )
    span, arrival_ticks, made = draw(st.sampled_from([4, 2, 8])), 0, []
    for number in range(draw(st.integers(2, 9))):
        arrival_ticks += draw(st.sampled_from([0, 3, 8] if growing else [0, 8, 16, 50]))
        input_tokens = draw(st.integers(1, 10 if growing else 40))
        output_tokens = draw(st.integers(15, 45) if growing else st.integers(1, 30))
        ids = draw(st.sampled_from(["", "xxxx", "xx", "xxxxxx", "xxy", "y"]))
        impatient = draw(st.sampled_from([None] * 9 + ["cancels at once", "cancels", "times out"]))
        made.append(
            request(
                number,
                arrival_ticks * TICK_S,
                input_tokens,
                output_tokens,
                max_tokens=draw(st.sampled_from([None, output_tokens, output_tokens + 9, max(1, output_tokens - 5)])),
                priority=draw(st.integers(0, 2)),
                content_ids=tuple(ids),
                content_block_tokens=span if ids else 0,
                namespace=Namespace(lora=draw(st.sampled_from(["", "", "", "l"]))),
                cancel_after_s={"cancels at once": 0.0, "cancels": draw(st.integers(1, 99)) * TICK_S}.get(impatient),
                timeout_s=40 * TICK_S if impatient == "times out" else None,
            )
        )
    return Load(config, tuple(made))


@dataclass(frozen=True)
class Seen:
    """What a plan did to the set of running requests."""

    start_fs: int
    preempted: tuple[str, ...]
    admitted: tuple[str, ...]
    before: frozenset[str]
    """Running until then, without those that ended."""
    after: frozenset[str]
    """Running from then on."""


@dataclass
class Watcher:
    """An executor that follows who runs, from the plans alone."""

    core: EngineCore
    plans: list[StepPlan] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        served = {share.request_id for share in plan.scheduled(0)}
        ended = {name for name, _ in plan.releases} - served - set(plan.preempted)
        before = (self.seen[-1].after if self.seen else frozenset()) - ended
        after = (before - set(plan.preempted)) | set(plan.admitted)
        assert len(after) == self.core.num_running
        self.seen.append(Seen(plan.start_fs, plan.preempted, plan.admitted, before, after))
        return ModelExecutor(COST).execute(plan)


def watched(load: Load, **hooks: object) -> tuple[RunRecord, Watcher]:
    """A stepping run, and what was seen of it."""
    made: list[Watcher] = []

    def executor(core: EngineCore) -> Watcher:
        made.append(Watcher(core))
        return made[0]

    return load.run(stepping=True, executor=executor, **hooks), made[0]
