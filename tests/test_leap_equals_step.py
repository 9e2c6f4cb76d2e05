"""A leap over k steps leaves exactly what the k steps would have left (I13)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.catalog.gpus import GIB, gpu
from sim.catalog.models import model_shape
from sim.core.batching import check_batching
from sim.core.clock import to_fs
from sim.core.config import AttentionGroup, ConfigError, EngineConfig
from sim.core.engine import EngineCore
from sim.core.eviction import EVICTIONS
from sim.core.ladder import ACTIONS, LadderConfig, Rung
from sim.core.plan import BatchShape, Durations, OomReport, ScheduledRequest, Segment, StepPlan, StepResult
from sim.core.policy import Batching, BatchLimits, Policy
from sim.core.preemption import VICTIMS
from sim.core.request import Namespace, Outcome, Request, RequestSpec
from sim.core.retention import Retention
from sim.core.waiting import FcfsQueue, aging_queue, priority_queue
from sim.costs.constant import FixedCost
from sim.costs.protocol import CostModel
from sim.memory import build_ledger
from sim.memory.device import Device
from sim.memory.faults import Fault, Faults
from sim.memory.step_memory import StepMemory
from sim.results.bill import bill_of
from sim.results.recorder import RunRecord
from sim.results.summary import mark_columns, request_columns, summarize, timeline_columns
from sim.world import run_world
from sim.world.executors import ModelExecutor

TICK_S = 2.0**-10
"""Arrivals and step times are whole ticks, which are whole femtoseconds: what can coincide does coincide, often and exactly."""
TICK = to_fs(TICK_S)
STEP_TICKS = 8
"""Length of a step in the cases written by hand."""


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


@dataclass(frozen=True)
class Scenario:
    """One run, but for how time passes in it."""

    config: EngineConfig
    cost: CostModel
    requests: tuple[RequestSpec, ...]
    replicas: int = 1
    router: str = "round-robin"
    max_concurrency: int | None = None
    policy: Policy | None = None

    def run(self, *, stepping: bool, **hooks: object) -> RunRecord:
        return run_world(
            self.config,
            self.cost,
            self.requests,
            replicas=self.replicas,
            router=self.router,
            max_concurrency=self.max_concurrency,
            policy=self.policy,
            stepping=stepping,
            check=True,
            **hooks,
        )


def everything(scenario: Scenario, *, stepping: bool, **hooks: object) -> dict[str, object]:
    """All that a run leaves behind, without what a clock on the wall says."""
    log: list[str] = []
    record = scenario.run(stepping=stepping, decision_log=lambda entry: log.append(json.dumps(entry)), **hooks)
    slots_per_block = record.config.slots_per_block
    bills = [bill_of(request, slots_per_block) for request in record.requests]
    used = [recorder.integrals for recorder in record.recorders]
    assert sum(bill.owed_fs for bill in bills) == sum(integrals.block_fs for integrals in used)
    assert sum(bill.held_fs for bill in bills) * slots_per_block == sum(whole.table_slots for whole in used)
    assert sum(bill.unfilled_slot_fs for bill in bills) == sum(integrals.unfilled_slots for integrals in used)
    summary = summarize(record, scenario={}, seed=0, version="", limits_s={"ttft": 0.1, "tpot": 0.02})
    del summary["core_time_s"], summary["wall_time_s"]
    return {
        "decision log": log,
        "summary": json.dumps(summary),
        "requests": request_columns(record),
        "timeline": timeline_columns(record),
        "marks": mark_columns(record),
        "memory": [row.memory for recorder in record.recorders for row in recorder.rows],
        "bills": bills,
        "ooms": [recorder.memory.ooms for recorder in record.recorders if recorder.memory],
    }


def assert_leap_equals_step(scenario: Scenario, **hooks: object) -> None:
    leaping, stepping = (everything(scenario, stepping=stepping, **hooks) for stepping in (False, True))
    for part in stepping:
        assert leaping[part] == stepping[part], part


def at(ticks: int, name: str, input_tokens: int, output_tokens: int, **fields: object) -> RequestSpec:
    """A request that arrives after `ticks`."""
    return RequestSpec(
        request_id=name, arrival_s=ticks * TICK_S, input_tokens=input_tokens, output_tokens=output_tokens, **fields
    )


# -- random worlds ---------------------------------------------------------------------------------------------------


@st.composite
def request_lists(draw: st.DrawFn) -> tuple[RequestSpec, ...]:
    """Requests whose arrivals, cancellations and time-outs often fall on the end of a step, and on each other."""
    growing = draw(st.booleans())  # short prompts and long answers: everybody is let in, and then there is not enough
    span = draw(st.sampled_from([4, 2, 16]))
    arrival_ticks = 0
    made = []
    for number in range(draw(st.integers(1, 9))):
        arrival_ticks += draw(st.sampled_from([0, 1, 4, 8, 8, 16, 24, 61]))
        output_tokens = draw(st.integers(20, 50) if growing else st.integers(1, 30))
        ids = draw(st.sampled_from(["", "xxxx", "xx", "xxxxxx", "xxy", "y"]))
        cap = draw(st.sampled_from([None, "tight", "loose", "short"]))
        impatient = draw(st.sampled_from([None] * 6 + ["cancels", "times out", "either"]))
        limit_s = draw(st.sampled_from([0, 4, 8, 16, 20, 24, 40, 64, 96])) * TICK_S
        made.append(
            RequestSpec(
                request_id=f"r{number}",
                arrival_s=arrival_ticks * TICK_S,
                input_tokens=draw(st.integers(1, 8 if growing else 40)),
                output_tokens=output_tokens,
                max_tokens={None: None, "tight": output_tokens, "loose": output_tokens + 9, "short": 3}[cap],
                priority=draw(st.integers(0, 2)),
                content_ids=tuple(ids),
                content_block_tokens=span if ids else 0,
                namespace=Namespace(salt=draw(st.sampled_from(["", "", "", "s"]))),
                cancel_after_s=limit_s if impatient in ("cancels", "either") else None,
                timeout_s=limit_s if impatient in ("times out", "either") else None,
            )
        )
    return tuple(made)


@st.composite
def attention(draw: st.DrawFn, block_size: int) -> dict[str, object]:
    """One kind of layer, mostly; else two or three groups of layers that keep different tokens, in blocks of different sizes."""
    if draw(st.sampled_from([True, True, False])):
        return {"sliding_window": draw(st.sampled_from([None, None, None, 4, 9]))}
    windows = st.sampled_from([None, 1, 4, 9, 20])
    sizes = [block_size, *draw(st.lists(st.sampled_from([block_size, 2 * block_size]), min_size=1, max_size=2))]
    return {"kv_groups": tuple(AttentionGroup(block_size=size, window=draw(windows)) for size in sizes)}


@st.composite
def configs(draw: st.DrawFn, *, cpu_blocks: Sequence[int] = (0,)) -> EngineConfig:
    """Engines from starved to comfortable."""
    chunked = draw(st.sampled_from([True, True, True, False]))
    max_num_seqs = draw(st.integers(1, 6))
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    return EngineConfig(
        num_gpu_blocks=draw(st.sampled_from([24, 48, 64, 96, 300])) // block_size,
        block_size=block_size,
        max_model_len=draw(st.sampled_from([128, 48])),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.sampled_from([60, 10, 3, 0])) if chunked else 128,
        enable_prefix_caching=draw(st.sampled_from([True, True, False])),
        enable_chunked_prefill=chunked,
        scheduling_policy=draw(st.sampled_from(["fcfs", "priority"])),
        reserve_full_prompt=draw(st.sampled_from([True, True, False])),
        **draw(attention(block_size)),
        num_cpu_blocks=draw(st.sampled_from(cpu_blocks)),
        watermark=draw(st.sampled_from([0.0, 0.0, 0.1, 0.3])),
        async_scheduling=draw(st.booleans()),
    )


smooth_costs = st.sampled_from(
    [
        FixedCost(8 * TICK_S),
        FixedCost(8 * TICK_S, per_context_token_s=TICK_S / 4),
        FixedCost(4 * TICK_S, per_token_s=TICK_S, per_seq_s=TICK_S),
        FixedCost(3.3e-3, per_context_token_s=1.7e-6),
    ]
)
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


NEED_CPU_MEMORY = ("swap_out", "offload_cache", "run_on_cpu")


@st.composite
def rungs(draw: st.DrawFn) -> Rung:
    """A rung of the degradation ladder that goes on and off often; `swap_out` is a `pause` with a CPU pool."""
    signal = draw(st.sampled_from(["kv_usage", "shortage", "queue_s", "preemptions"]))
    thresholds = {"kv_usage": [0.3, 0.6, 0.9], "shortage": [0.0001, 0.2], "queue_s": [4 * TICK_S, 20 * TICK_S]}
    on = draw(st.sampled_from(thresholds.get(signal, [1.0, 2.0])))
    action = draw(st.sampled_from([action for action in ACTIONS if action not in NEED_CPU_MEMORY]))
    return Rung(
        action=action,
        signal=signal,
        on=on,
        off=on * draw(st.sampled_from([1.0, 0.5])),
        hold_s=draw(st.sampled_from([0.0, 20 * TICK_S])),
        value={"shrink_step": 0.5, "micro_batch": 3, "cap_new": 5, "cap_running": 5, "truncate": 8, "pause": 0.5}.get(
            action, 0.0
        ),
    )


ladders = st.lists(rungs(), min_size=1, max_size=3, unique_by=lambda rung: rung.action).map(
    lambda made: LadderConfig(rungs=tuple(made), guard_priority=0)
)
retentions = st.builds(
    Retention,
    priority=st.sampled_from([0, 35, 60, 100]),
    start=st.sampled_from([0, 4, 12]),
    end=st.sampled_from([None, 16]),
    duration_s=st.sampled_from([None, TICK_S, 20 * TICK_S, 90 * TICK_S]),
    output=st.booleans(),
)
some = st.sampled_from([None, None, 1, 2, 3])
batch_limits = st.sampled_from(Batching).flatmap(
    lambda batching: st.tuples(
        st.just(batching),
        st.builds(
            BatchLimits,
            max_prefill_seqs=some,
            max_decode_seqs=some,
            max_prefill_tokens=st.sampled_from([None, 5, 200]),
            continuous_decode_steps=st.sampled_from([None, 1, 3, 20])
            if batching is Batching.DECODE_FIRST
            else st.none(),
        ),
    )
)
policies = st.builds(
    lambda batching, **fields: Policy(batching=batching[0], limits=batching[1], **fields),
    batching=batch_limits,
    queue=st.sampled_from([FcfsQueue, priority_queue, aging_queue(20 * TICK)]),
    victim=st.sampled_from(list(VICTIMS.values())),
    ladder=st.one_of(st.none(), ladders),
    swap=st.booleans(),
    eviction=st.sampled_from(list(EVICTIONS)),
).flatmap(
    lambda policy: st.builds(
        lambda ranges: replace(policy, retention=tuple(ranges)) if policy.eviction == "retention" else policy,
        st.lists(retentions, max_size=3),
    )
)


def is_possible(scenario: Scenario) -> bool:
    """Whether the limits on a step agree with the engine's own."""
    policy = scenario.policy or Policy()
    try:
        check_batching(policy.batching, policy.limits, scenario.config)
    except ConfigError:
        return False
    return True


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


# -- the tables an executor is shown -------------------------------------------------------------------------------------


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


# -- steps that run out of memory ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunsOutOfMemory:
    """An executor on which the steps with these numbers fail for lack of memory, after the time they would have taken."""

    cost: CostModel
    failing: frozenset[int]

    def execute(self, plan: StepPlan) -> StepResult:
        result = ModelExecutor(self.cost).execute(plan)
        failed = next((ahead for ahead in range(plan.repeat) if plan.step + ahead in self.failing), None)
        if failed is None:
            return result
        report = OomReport(op="activations", requested_bytes=2, free_bytes=1)
        return StepResult(durations=result.durations.prefix(failed + 1), oom=report)


def everything_with_failures(scenario: Scenario, failing: frozenset[int], *, stepping: bool) -> dict[str, object]:
    return everything(scenario, stepping=stepping, executor=lambda core: RunsOutOfMemory(scenario.cost, failing))


@settings(max_examples=100)
@given(
    st.builds(Scenario, configs(), smooth_costs, request_lists()).filter(lambda s: s.config.enable_chunked_prefill),
    st.frozensets(st.integers(0, 40), min_size=1, max_size=4),
)
def test_a_step_that_runs_out_of_memory_leaves_the_same_inside_a_stretch_and_alone(
    scenario: Scenario, failing: frozenset[int]
) -> None:
    leaping = everything_with_failures(scenario, failing, stepping=False)
    stepping = everything_with_failures(scenario, failing, stepping=True)
    for part in stepping:
        assert leaping[part] == stepping[part], part


# -- what happens inside a stretch, by hand ------------------------------------------------------------------------------


def by_hand(*requests: RequestSpec, cost: CostModel | None = None, **settings: object) -> Scenario:
    """A scenario on a roomy engine with steps of eight ticks, unless something else is asked for."""
    config = {"num_gpu_blocks": 100, "block_size": 4, "max_model_len": 2048, "max_num_seqs": 8} | settings
    config.setdefault("max_num_batched_tokens", 2048)
    return Scenario(EngineConfig(**config), cost or FixedCost(STEP_TICKS * TICK_S), requests)


def served(scenario: Scenario) -> dict[str, Request]:
    """The requests after a leaping run that equals the stepping run."""
    assert_leap_equals_step(scenario)
    return {request.request_id: request for request in scenario.run(stepping=False).requests}


def ticks(time_fs: int | None) -> float | None:
    return None if time_fs is None else time_fs / TICK


@pytest.mark.parametrize(
    ("arrival", "started"),
    [(24, 24), (25, 32), (31, 32), (32, 32)],
    ids=["at the end of a step", "just after it", "just before the next end", "at the next end"],
)
def test_an_arrival_inside_a_stretch_starts_at_the_end_of_the_step_in_progress(arrival: int, started: int) -> None:
    requests = served(by_hand(at(0, "long", 4, 50), at(arrival, "new", 4, 2)))
    assert ticks(requests["new"].scheduled_fs) == started
    assert ticks(requests["new"].ended_fs) == started + 2 * STEP_TICKS
    assert ticks(requests["long"].ended_fs) == 50 * STEP_TICKS


def test_an_arrival_at_the_end_of_a_step_is_heard_however_late_it_was_announced() -> None:
    """The engine is full until tick 24, so that the first arrival cuts nothing; the second is announced at tick 20, long after the end
    of the step was. At tick 24 there is room for both.
    """
    ending = [at(0, "x", 4, 3), at(0, "y", 4, 3)]
    requests = served(by_hand(*ending, at(20, "first", 4, 9), at(24, "second", 4, 9), max_num_seqs=2))
    assert [ticks(requests[name].scheduled_fs) for name in ("first", "second")] == [24, 24]


def test_an_arrival_one_femtosecond_after_a_step_waits_for_the_next() -> None:
    late = RequestSpec(request_id="late", arrival_s=24 * TICK_S + 1e-15, input_tokens=4, output_tokens=2)
    assert to_fs(late.arrival_s) == 24 * TICK + 1
    assert ticks(served(by_hand(at(0, "long", 4, 50), late))["late"].scheduled_fs) == 32


@pytest.mark.parametrize(("cancelled", "tokens"), [(24, 2), (25, 3), (31, 3), (32, 3), (33, 4)])
def test_a_cancel_inside_a_stretch_drops_the_token_of_the_step_in_progress(cancelled: int, tokens: int) -> None:
    """The step that ends at tick 24 gives the third token; a client that leaves at that very moment does not see it."""
    leaves = at(0, "leaves", 4, 50, cancel_after_s=cancelled * TICK_S)
    requests = served(by_hand(leaves, at(0, "stays", 4, 50)))
    assert requests["leaves"].outcome is Outcome.ABORTED
    assert requests["leaves"].num_output_tokens == tokens
    assert ticks(requests["leaves"].ended_fs) == cancelled
    assert ticks(requests["stays"].ended_fs) == 50 * STEP_TICKS


def test_blocks_of_a_cancelled_request_return_when_the_step_in_progress_is_over() -> None:
    """Four blocks: the second request needs what the first holds, and starts with the step after the cancellation."""
    first = at(0, "first", 9, 7, cancel_after_s=20 * TICK_S)
    requests = served(by_hand(first, at(1, "second", 8, 2), num_gpu_blocks=4))
    assert ticks(requests["first"].ended_fs) == 20
    assert ticks(requests["second"].scheduled_fs) == 24


def test_a_time_out_inside_a_stretch_is_a_time_out() -> None:
    requests = served(by_hand(at(0, "slow", 4, 50, timeout_s=20 * TICK_S), at(0, "other", 4, 50)))
    assert requests["slow"].outcome is Outcome.TIMED_OUT
    assert ticks(requests["slow"].ended_fs) == 20


def test_a_cancel_of_a_queued_request_during_a_stretch_moves_nobody_else() -> None:
    queued = at(2, "queued", 4, 4, cancel_after_s=18 * TICK_S)
    requests = served(by_hand(at(0, "running", 4, 10), queued, at(3, "behind", 4, 4), max_num_seqs=1))
    assert requests["queued"].outcome is Outcome.ABORTED
    assert requests["queued"].scheduled_fs is None
    assert ticks(requests["queued"].ended_fs) == 20
    assert ticks(requests["running"].ended_fs) == 10 * STEP_TICKS
    assert ticks(requests["behind"].scheduled_fs) == 10 * STEP_TICKS


def test_a_cancel_of_the_head_of_the_queue_lets_the_next_start_at_the_end_of_the_step() -> None:
    """Ten blocks: the head needs nine and waits, and blocks a small request behind it until it goes away at tick 20."""
    head = at(2, "head", 36, 1, cancel_after_s=18 * TICK_S)
    requests = served(by_hand(at(0, "running", 4, 20), head, at(3, "small", 4, 1), num_gpu_blocks=10))
    assert requests["head"].scheduled_fs is None
    assert ticks(requests["small"].scheduled_fs) == 24


@pytest.mark.parametrize("arrival", [16, 20, 24])
def test_a_rejection_during_a_stretch_is_logged_with_the_next_step(arrival: int) -> None:
    scenario = by_hand(at(0, "running", 4, 10), at(arrival, "too long", 2000, 2000, max_tokens=2000))
    assert served(scenario)["too long"].outcome is Outcome.REJECTED
    log: list[dict[str, object]] = []
    scenario.run(stepping=False, decision_log=log.append)
    logged = [(entry["step"], name) for entry in log for name, _ in entry["rejected"]]
    assert logged == [(-(-arrival // STEP_TICKS), "too long")]


def test_two_cancels_in_one_step_cut_the_stretch_once() -> None:
    requests = served(
        by_hand(
            at(0, "a", 4, 50, cancel_after_s=18 * TICK_S),
            at(0, "b", 4, 50, cancel_after_s=21 * TICK_S),
            at(0, "c", 4, 50),
        )
    )
    assert [ticks(requests[name].ended_fs) for name in "abc"] == [18, 21, 50 * STEP_TICKS]
    assert [requests[name].num_output_tokens for name in "abc"] == [2, 2, 50]


def test_everybody_may_leave_in_the_same_step() -> None:
    leaving = [at(0, name, 4, 50, cancel_after_s=(17 + i) * TICK_S) for i, name in enumerate("abc")]
    requests = served(by_hand(*leaving, at(40, "later", 4, 2)))
    assert [ticks(requests[name].ended_fs) for name in "abc"] == [17, 18, 19]
    assert ticks(requests["later"].scheduled_fs) == 40


@pytest.mark.parametrize("arrival", [73, 79, 80])
def test_an_interruption_in_the_last_step_of_a_stretch_changes_nothing_of_it(arrival: int) -> None:
    """The stretch ends by itself at tick 80, when the running request is done."""
    requests = served(by_hand(at(0, "running", 4, 10), at(arrival, "new", 4, 2)))
    assert ticks(requests["running"].ended_fs) == 80
    assert ticks(requests["new"].scheduled_fs) == 80


def test_a_client_that_leaves_at_the_moment_of_its_last_token_has_left() -> None:
    requests = served(by_hand(at(0, "leaves", 4, 10, cancel_after_s=80 * TICK_S)))
    assert requests["leaves"].outcome is Outcome.ABORTED
    assert requests["leaves"].num_output_tokens == 9


def test_arrivals_at_the_same_moment_start_together_in_their_order() -> None:
    requests = served(by_hand(at(0, "long", 4, 50), at(20, "a", 4, 5), at(20, "b", 4, 5), at(20, "c", 4, 5)))
    assert [ticks(requests[name].scheduled_fs) for name in "abc"] == [24, 24, 24]
    assert requests["a"].order < requests["b"].order < requests["c"].order


@pytest.mark.parametrize("eviction", list(EVICTIONS))
def test_a_queued_prompt_whose_cached_head_is_evicted_may_need_less_than_before(eviction: str) -> None:
    """Six blocks of four, chunks of at most four tokens, and only the next chunk must fit. An important request leaves three blocks of
    a prompt, the first of which an unimportant one holds longer. The last to come finds all three, and cannot start: with its chunk it
    would take four of three free blocks. If the next block taken is the head of what it finds, it finds nothing and needs one.
    """
    prompt = {"content_block_tokens": 4}
    scenario = by_hand(
        at(0, "important", 13, 1, content_ids=tuple("xxx"), **prompt),
        at(4, "unimportant", 5, 3, content_ids=tuple("x"), priority=2, **prompt),
        at(7 * STEP_TICKS, "takes blocks", 1, 30),
        at(17 * STEP_TICKS, "waits", 16, 1, content_ids=tuple("xxxx"), **prompt),
        num_gpu_blocks=6,
        max_num_seqs=3,
        max_num_batched_tokens=4,
        reserve_full_prompt=False,
    )
    assert_leap_equals_step(replace(scenario, policy=Policy(eviction=eviction)))


def test_a_shortage_of_blocks_ends_a_stretch_and_a_preemption_is_the_same_in_both() -> None:
    """Two requests that grow to ten blocks each, in a pool of twelve."""
    scenario = by_hand(at(0, "older", 8, 30), at(0, "younger", 8, 30), num_gpu_blocks=12)
    requests = served(scenario)
    assert requests["older"].num_preemptions == 0
    assert requests["younger"].num_preemptions > 0
    assert all(request.num_output_tokens == 30 for request in requests.values())


def test_a_failed_step_that_needed_a_block_gives_it_back_the_same_way_in_a_stretch_and_alone() -> None:
    """The third step needs the second block, and fails; its retry needs it again."""
    scenario = by_hand(at(0, "a", 3, 9))
    leaping = everything_with_failures(scenario, frozenset({2}), stepping=False)
    stepping = everything_with_failures(scenario, frozenset({2}), stepping=True)
    assert leaping["decision log"] == stepping["decision log"]


def test_a_failed_step_writes_no_tokens_into_its_blocks() -> None:
    """Blocks of four with prompt 5, nothing else, and the third step fails: slots filled are 5, 6, 6, 7 of 8 in steps of equal length."""
    for stepping in (False, True):
        found = everything_with_failures(by_hand(at(0, "a", 5, 3)), frozenset({2}), stepping=stepping)
        fragmentation = json.loads(str(found["summary"]))["internal_fragmentation"]
        assert fragmentation == {"mean": pytest.approx((3 + 2 + 2 + 1) / 32), "max": pytest.approx(3 / 8)}, stepping


def test_steps_that_cost_nothing_are_the_same_in_both() -> None:
    served(by_hand(at(0, "a", 4, 20), at(1, "b", 4, 20, cancel_after_s=0.0), at(1, "c", 8, 3), cost=FixedCost(0.0)))


def test_a_router_by_kv_use_counts_the_blocks_taken_since_a_stretch_began() -> None:
    """After 39 steps the first replica's request is at eleven blocks, but its stretch began at two; the second's is at six."""
    grows, newer, third = at(0, "grows", 4, 60), at(300, "newer", 20, 60), at(39 * STEP_TICKS + 4, "third", 4, 2)
    config = by_hand().config
    scenario = Scenario(config, FixedCost(STEP_TICKS * TICK_S), (grows, newer, third), replicas=2, router="least-kv")
    expected = {"grows": 0, "newer": 1, "third": 1}
    assert scenario.run(stepping=True).replica_of == expected
    assert scenario.run(stepping=False).replica_of == expected


# -- running out of memory -----------------------------------------------------------------------------------------------


LLAMA, H100 = model_shape("llama-3.1-8b"), gpu("h100-sxm-80gb")
LEDGER = build_ledger(LLAMA, H100, max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=8192)
STEPS = StepMemory(LLAMA, H100, LEDGER.settings)


def left(bytes_left: int, *faults: Fault) -> Device:
    """A device that has `bytes_left` for steps, before `faults`."""
    whole = Device(LLAMA, H100, LEDGER, Faults())
    taken = Fault(kind="non_torch", gib=(whole.workspace_bytes - bytes_left) / GIB)
    return Device(LLAMA, H100, LEDGER, Faults((taken, *faults)))


def need_of(decodes: int, prefill: int = 0) -> int:
    """What a step of so many decodes and one prompt chunk needs; every sequence is sampled."""
    chunk = ((prefill, 0),) if prefill else ()
    sampled = decodes + bool(prefill)
    return STEPS.need(BatchShape(prefill=chunk, decode_seqs=decodes, sampled_seqs=sampled)).bytes


def test_a_prompt_that_needs_too_much_is_halved_until_it_fits() -> None:
    """One prompt of 512 tokens; the device has room for a step of 200: 512 and 256 fail, two of them end the request."""
    record = by_hand(at(0, "long", 512, 4), num_gpu_blocks=400).run(stepping=False, device=left(need_of(0, 200)))
    (request,) = record.requests
    assert request.outcome is Outcome.FAILED
    assert "out of memory in" in request.reason
    memory = record.recorders[0].memory
    assert memory is not None
    assert [event.shape.prefill_tokens for event in memory.ooms] == [512, 256]
    assert memory.min_headroom_bytes == need_of(0, 200) - need_of(0, 512)
    assert memory.peak_workspace_bytes == need_of(0, 512)


def test_one_halving_that_is_enough_costs_a_step_and_nobody() -> None:
    record = by_hand(at(0, "long", 512, 4), num_gpu_blocks=400).run(stepping=False, device=left(need_of(0, 256)))
    (request,) = record.requests
    assert request.outcome is Outcome.FINISHED
    assert record.recorders[0].core.oom_events == 1
    assert record.recorders[0].core.steps == 1 + 2 + 3


def test_a_fault_in_the_middle_of_a_stretch_fails_the_step_that_starts_then() -> None:
    """Steps of eight ticks; everything is taken at tick 100, so the step that starts at tick 104 is the first that fails."""
    scenario = by_hand(at(0, "a", 4, 60), at(0, "b", 4, 60))
    device = left(need_of(2, 8), Fault(kind="other_process", gib=1.0, at_s=100 * TICK_S, until_s=110 * TICK_S))
    record = scenario.run(stepping=False, device=device)
    memory = record.recorders[0].memory
    assert memory is not None
    assert [event.step for event in memory.ooms] == [13]
    assert record.recorders[0].core.oom_events == 1
    assert all(request.outcome is Outcome.FINISHED for request in record.requests)
    assert_leap_equals_step(scenario, device=device)


def test_without_a_limit_the_shortage_is_recorded_and_nothing_fails() -> None:
    scenario = by_hand(at(0, "long", 512, 4), num_gpu_blocks=400)
    record = scenario.run(stepping=False, device=left(need_of(0, 200)), memory_limit=False)
    memory = record.recorders[0].memory
    assert memory is not None
    assert memory.min_headroom_bytes < 0
    assert not memory.ooms
    assert record.requests[0].outcome is Outcome.FINISHED


@st.composite
def devices(draw: st.DrawFn) -> Device:
    """Devices with room for about what the steps of random worlds need, and faults that come and go during their stretches."""
    ticks = st.sampled_from([1, 8, 20, 64, 100, 200])
    faults = []
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["other_process", "leak", "fragmentation", "prompt_logprobs", "kernel_fallback"]))
        start = draw(ticks)
        holds = kind not in ("prompt_logprobs", "kernel_fallback")
        faults.append(
            Fault(
                kind=kind,
                at_s=start * TICK_S,
                until_s=(start + draw(ticks)) * TICK_S if draw(st.booleans()) else float("inf"),
                gib=draw(st.sampled_from([1, 4, 16])) / 1024 if holds else 0.0,
                every_s=draw(st.sampled_from([0, 8, 20])) * TICK_S if holds else 0.0,
            )
        )
    return left(need_of(draw(st.integers(1, 4)), draw(st.sampled_from([0, 1, 20]))), *faults)


@settings(max_examples=150, deadline=None)
@given(
    st.builds(
        Scenario, configs(cpu_blocks=(0, 100, 20)), smooth_costs, request_lists(), policy=st.none() | policies
    ).filter(is_possible),
    devices(),
)
def test_running_out_of_memory_is_the_same_whether_the_engine_leaps_or_steps(
    scenario: Scenario, device: Device
) -> None:
    assert_leap_equals_step(scenario, device=device)


@settings(max_examples=100, deadline=None)
@given(devices(), st.integers(1, 60), st.integers(0, 200), st.integers(1, 4))
def test_within_a_run_of_steps_each_leaves_at_most_as_much_as_the_one_before(
    device: Device, steps: int, start_ticks: int, seqs: int
) -> None:
    durations = Durations.affine(steps, round(8 * TICK_S * 1e15), 0)
    shape = BatchShape(decode_seqs=seqs, decode_context_tokens=50, sampled_seqs=seqs)
    start_fs = round(start_ticks * TICK_S * 1e15)
    runs = list(device.tightening(start_fs, durations))
    assert [step for run in runs for step in run] == list(range(steps))
    for run in runs:
        headrooms = [device.headroom_bytes(shape, start_fs, durations, step) for step in run]
        assert headrooms == sorted(headrooms, reverse=True)


def test_a_request_of_a_failed_step_computes_what_another_was_to_leave_in_the_cache() -> None:
    """Both prompts are alike, and the second is to find the first's blocks in the very step that fails: it may not keep them."""
    alike = [
        replace(at(0, name, 64, 2), content_ids=tuple(range(16)), content_block_tokens=4)
        for name in ("first", "second")
    ]
    scenario = by_hand(*alike, max_num_batched_tokens=2048)
    shape = BatchShape(prefill=((64, 0), (4, 60)), sampled_seqs=2)
    device = left(STEPS.need(shape).bytes - 512)
    assert_leap_equals_step(scenario, device=device)
    record = scenario.run(stepping=False, device=device)
    assert record.recorders[0].core.oom_events == 1
    assert sum(row.prefill_tokens for row in record.recorders[0].rows) == 64 + 64


# -- leaping really leaps ----------------------------------------------------------------------------------------------


@dataclass
class Counted:
    """An executor that counts its calls and the steps they stood for."""

    cost: CostModel
    calls: Counter[str]

    def execute(self, plan: StepPlan) -> StepResult:
        self.calls["plans"] += 1
        return ModelExecutor(self.cost).execute(plan)


def plans_executed(scenario: Scenario, *, stepping: bool) -> tuple[int, int]:
    """Executor calls, which are SimPy events of the replica, and engine steps."""
    calls: Counter[str] = Counter()
    record = scenario.run(stepping=stepping, executor=lambda core: Counted(scenario.cost, calls))
    return calls["plans"], sum(recorder.core.steps for recorder in record.recorders)


def test_a_thousand_decode_steps_are_one_event() -> None:
    """One for the prompt and one for the other thousand tokens, though two hundred and fifty blocks are taken on the way."""
    scenario = by_hand(at(0, "alone", 4, 1001), num_gpu_blocks=300)
    assert plans_executed(scenario, stepping=False) == (2, 1001)
    assert plans_executed(scenario, stepping=True) == (1001, 1001)


def test_a_stretch_with_a_growing_step_time_is_still_one_event() -> None:
    growing = FixedCost(8 * TICK_S, per_context_token_s=TICK_S)
    scenario = by_hand(at(0, "alone", 4, 1001), num_gpu_blocks=300, cost=growing)
    assert plans_executed(scenario, stepping=False) == (2, 1001)


def test_arrivals_that_only_join_a_queue_cut_nothing() -> None:
    queued = [at(10 + i, f"queued-{i}", 4, 1) for i in range(50)]
    scenario = by_hand(at(0, "running", 4, 501), *queued, max_num_seqs=1, num_gpu_blocks=300)
    plans, steps = plans_executed(scenario, stepping=False)
    assert steps == 501 + 50
    assert plans == 2 + 50


def test_arrivals_behind_a_head_that_does_not_fit_cut_nothing() -> None:
    """The head cuts the stretch when it arrives; those behind it cannot change the decision and do not."""
    queued = [at(10 + i, f"queued-{i}", 4, 1) for i in range(50)]
    scenario = by_hand(at(0, "running", 4, 401), at(9, "head", 800, 1), *queued, num_gpu_blocks=201, max_num_seqs=100)
    plans, steps = plans_executed(scenario, stepping=False)
    assert steps == 401 + 2  # the head with the one that fits beside it, and then everybody else
    assert plans == 1 + 2 + 2


def batch(sizes: Sequence[tuple[int, int]]) -> list[RequestSpec]:
    return [at(0, f"r{i}", input_tokens, output_tokens) for i, (input_tokens, output_tokens) in enumerate(sizes)]


def test_a_batch_takes_one_event_a_completion() -> None:
    scenario = by_hand(*batch([(4, 100), (4, 200), (4, 300), (4, 400)]), num_gpu_blocks=1000)
    assert plans_executed(scenario, stepping=False) == (1 + 4, 400)
