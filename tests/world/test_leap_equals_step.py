"""A leap over k steps leaves exactly what the k steps would have left (I13), in random worlds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.batch_shape import BatchShape
from sim.core.config import EngineConfig
from sim.core.durations import Durations, Segment
from sim.core.engine import EngineCore
from sim.core.plan import ScheduledRequest, StepPlan, StepResult
from sim.core.request import RequestSpec
from sim.costs.constant import FixedCost
from sim.costs.protocol import CostModel
from sim.world.executors import ModelExecutor
from tests.support.leap_worlds import configs, is_possible, policies, request_lists, smooth_costs
from tests.support.leaping import Scenario, assert_leap_equals_step, at
from tests.support.roomy import TICK, TICK_S


@dataclass(frozen=True)
class Staircase:
    """Decode steps that get longer by jumps, every `width` tokens of context: several segments a stretch."""

    base_ticks: int
    tread_ticks: int
    width: int
    name: str = "staircase"

    def step_fs(self, shape: BatchShape) -> int:
        context = shape.decode_context_tokens + sum(cached for _, cached in shape.prefill)
        return TICK * (self.base_ticks + self.tread_ticks * (context // self.width) + shape.prefill_tokens)

    def copy_fs(self, num_blocks: int) -> int:
        return TICK * num_blocks

    def decode_stretch(
        self, decode_seqs: int, context_tokens: int, steps: int, max_context_tokens: int = 0
    ) -> Durations:
        segments: list[Segment] = []
        for step in range(steps):
            context = context_tokens + step * decode_seqs
            duration_fs = self.step_fs(BatchShape(decode_seqs=decode_seqs, decode_context_tokens=context))
            if segments and segments[-1].first_fs == duration_fs:
                segments[-1] = Segment(segments[-1].steps + 1, duration_fs)
            else:
                segments.append(Segment(1, duration_fs))
        return Durations(tuple(segments))

    def warnings(self) -> list[str]:
        return []


# -- random worlds -----------------------------------------------------------------------------------------------------


staircases = st.builds(Staircase, st.integers(2, 8), st.integers(1, 8), st.sampled_from([5, 20, 50]))


@settings(max_examples=200)
@given(
    st.builds(Scenario, configs(), smooth_costs, request_lists(), max_concurrency=st.sampled_from([None, None, 1, 3]))
)
def test_one_engine_leaves_the_same_whether_it_leaps_or_steps(scenario: Scenario) -> None:
    assert_leap_equals_step(scenario)


@settings(max_examples=100)
@given(st.builds(Scenario, configs(), staircases, request_lists()))
def test_a_stretch_of_several_segments_is_cut_and_summed_exactly(scenario: Scenario) -> None:
    assert_leap_equals_step(scenario)


@settings(max_examples=200)
@given(
    st.builds(Scenario, configs(cpu_blocks=(100, 20, 0)), smooth_costs, request_lists(), policy=policies).filter(
        is_possible
    )
)
def test_every_policy_leaves_the_same_whether_the_engine_leaps_or_steps(scenario: Scenario) -> None:
    assert_leap_equals_step(scenario)


@st.composite
def tiered(draw: st.DrawFn) -> EngineConfig:
    """Engines with a CPU prefix tier, from one block to more than is ever saved."""
    config = draw(configs(cpu_blocks=(100, 0, 0)))
    return replace(
        config,
        block_size=4,
        num_gpu_blocks=draw(st.sampled_from([11, 14, 20])),
        max_model_len=44,
        enable_prefix_caching=True,
        sliding_window=None,
        kv_groups=(),
        async_scheduling=False,
        num_cpu_prefix_blocks=draw(st.sampled_from([1, 4, 20, 500])),
        cpu_prefix_mode=draw(st.sampled_from(["write_through", "write_back"])),
    )


@st.composite
def returning_lists(draw: st.DrawFn) -> tuple[RequestSpec, ...]:
    """Turns of a few conversations: the same beginnings come back when others have taken their blocks."""
    arrival_ticks, made = 0, []
    for number in range(draw(st.integers(6, 20))):
        arrival_ticks += draw(st.sampled_from([0, 0, 8, 24, 61]))
        output_tokens = draw(st.integers(1, 15))
        conversation, turns = draw(st.sampled_from("abcde")), draw(st.integers(1, 3))
        patience = draw(st.sampled_from([None] * 5 + [2, 8, 20, 64]))
        made.append(
            at(
                arrival_ticks,
                f"r{number}",
                8 * turns + draw(st.integers(1, 5)),
                output_tokens,
                max_tokens=draw(st.sampled_from([None, output_tokens, 15])),
                priority=draw(st.integers(0, 2)),
                content_ids=tuple(f"{conversation}{turn}" for turn in range(turns)),
                content_block_tokens=8,
                cancel_after_s=None if patience is None else patience * TICK_S,
            )
        )
    return tuple(made)


copying_costs = st.builds(
    FixedCost,
    st.just(8 * TICK_S),
    per_context_token_s=st.sampled_from([0.0, TICK_S / 4]),
    per_copied_block_s=st.sampled_from([0.0, TICK_S / 2, TICK_S, 8 * TICK_S, 30 * TICK_S]),
)


@settings(max_examples=200)
@given(
    st.builds(
        Scenario,
        tiered(),
        copying_costs,
        returning_lists(),
        st.sampled_from([1, 1, 2]),
        max_concurrency=st.sampled_from([None, None, 1, 3]),
        policy=policies,
    ).filter(is_possible),
    st.sampled_from([0, 2, 3]),
)
def test_a_cpu_prefix_tier_leaves_the_same_whether_the_engine_leaps_or_steps(scenario: Scenario, failing: int) -> None:
    """Every second or third copy fails, or none; whatever fails is computed instead, and everybody's request ends."""
    assert_leap_equals_step(scenario, failing_copies=lambda fence: failing > 0 and fence % failing == 0)


several_replicas = st.sampled_from([2, 3])
closed_loops = st.sampled_from([None, None, 2, 4])


@settings(max_examples=100)
@given(
    st.builds(
        Scenario,
        configs(),
        smooth_costs,
        request_lists(),
        several_replicas,
        st.sampled_from(["round-robin", "least-requests"]),
        closed_loops,
    )
)
def test_several_replicas_leave_the_same_whether_they_leap_or_step(scenario: Scenario) -> None:
    assert_leap_equals_step(scenario)


@st.composite
def staggered_lists(draw: st.DrawFn) -> tuple[RequestSpec, ...]:
    """Requests that arrive one by one while others are in the middle of long stretches."""
    gaps = draw(st.lists(st.integers(1, 120), min_size=3, max_size=7))
    arrivals = [sum(gaps[: i + 1]) for i in range(len(gaps))]
    return tuple(
        at(arrival, f"r{i}", draw(st.integers(1, 30)), draw(st.integers(1, 60))) for i, arrival in enumerate(arrivals)
    )


@settings(max_examples=100)
@given(
    st.builds(Scenario, configs(), smooth_costs, staggered_lists(), several_replicas, st.just("least-kv"), closed_loops)
)
def test_a_router_that_looks_at_the_pools_sees_the_same_whether_they_leap_or_step(scenario: Scenario) -> None:
    assert_leap_equals_step(scenario)


# -- the tables an executor is shown -----------------------------------------------------------------------------------


@dataclass
class Shown:
    """An executor that keeps what every step was shown, under the number of the step; a later plan for it replaces it."""

    core: EngineCore
    cost: CostModel
    steps: dict[int, tuple[ScheduledRequest, ...]] = field(default_factory=dict)

    def execute(self, plan: StepPlan) -> StepResult:
        self.steps |= {plan.step + ahead: plan.scheduled(ahead) for ahead in range(plan.repeat)}
        return ModelExecutor(self.cost).execute(plan)


def shown_steps(scenario: Scenario, *, stepping: bool) -> dict[int, tuple[ScheduledRequest, ...]]:
    made: list[Shown] = []

    def executor(core: EngineCore) -> Shown:
        made.append(Shown(core, scenario.cost))
        return made[-1]

    scenario.run(stepping=stepping, executor=executor)
    done = made[0].core.steps
    return {step: shares for step, shares in made[0].steps.items() if step < done}


@settings(max_examples=100)
@given(st.builds(Scenario, configs(), smooth_costs, request_lists()))
def test_every_step_of_a_stretch_is_shown_the_block_tables_it_would_have_alone(scenario: Scenario) -> None:
    assert shown_steps(scenario, stepping=False) == shown_steps(scenario, stepping=True)
