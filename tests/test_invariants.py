"""What holds in every run, whatever the engine, the load and the pressure: nothing is lost, nothing is unexplained, nobody starves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.admission import AdmissionBase, Rejection, default_admission
from sim.core.clock import to_fs
from sim.core.config import AttentionGroup, EngineConfig
from sim.core.engine import EngineCore
from sim.core.ladder import LadderConfig, Rung
from sim.core.plan import Durations, OomReport, ScheduledRequest, StepPlan, StepResult
from sim.core.policy import Batching, Policy
from sim.core.preemption import VICTIMS, worst_priority
from sim.core.request import Namespace, Outcome, Request, RequestSpec
from sim.core.tables import Allocation, BlockTable
from sim.core.view import EngineView
from sim.core.waiting import FcfsQueue, priority_queue
from sim.costs.constant import FixedCost
from sim.results.recorder import RunRecord
from sim.results.summary import summarize
from sim.world import run_world
from sim.world.executors import ModelExecutor

TICK_S = 2.0**-10
COST = FixedCost(8 * TICK_S, per_context_token_s=TICK_S / 8)
STEP = FixedCost(TICK_S)


def engine(**settings: object) -> EngineConfig:
    """A roomy engine, unless something else is asked for."""
    roomy = {"num_gpu_blocks": 10_000, "block_size": 16, "max_model_len": 4096, "max_num_seqs": 64}
    return EngineConfig(**({**roomy, "max_num_batched_tokens": 4096} | settings))


def request(name: object, arrival_s: float, input_tokens: int, output_tokens: int, **fields: object) -> RequestSpec:
    return RequestSpec(
        request_id=str(name), arrival_s=arrival_s, input_tokens=input_tokens, output_tokens=output_tokens, **fields
    )


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


# -- every request ends, for a reason; every block comes back -----------------------------------------------------------


def can_never_be_served(spec: RequestSpec, config: EngineConfig) -> bool:
    """From the request and the engine alone: what is asked for is longer than the context or does not fit in the whole pool."""
    asked = spec.input_tokens + (spec.max_tokens or 1)
    if asked > config.max_model_len:
        return True
    needed = 0
    for group in config.kv_groups or (AttentionGroup(block_size=config.block_size, window=config.sliding_window),):
        blocks = math.ceil((asked - 1) / group.block_size)
        if group.window is not None:
            seen = min(group.window - 1 + config.max_num_batched_tokens, config.max_model_len)
            blocks = min(blocks, math.ceil(seen / group.block_size) + 1)
        needed += blocks
    return needed > config.num_gpu_blocks


@settings(max_examples=150)
@given(loads(), st.booleans())
def test_every_request_ends_with_an_outcome_and_a_reason_and_every_block_is_back(load: Load, stepping: bool) -> None:
    record = load.run(stepping=stepping)
    pool = record.recorders[0].core.pool
    assert (pool.num_free, pool.num_owned, pool.num_quarantined) == (load.config.num_gpu_blocks, 0, 0)
    assert [r.spec for r in record.requests] == list(load.requests)
    for r in record.requests:
        assert r.outcome is not None
        assert r.ended_fs is not None
        assert r.ended_fs >= r.arrival_fs == to_fs(r.spec.arrival_s)
        assert r.reason
        assert (r.outcome is Outcome.REJECTED) == can_never_be_served(r.spec, load.config)
        room = load.config.max_model_len - r.spec.input_tokens
        if r.outcome is Outcome.FINISHED:
            assert r.num_output_tokens == min(r.spec.target_tokens, room)
        elif r.outcome is Outcome.REJECTED:
            assert r.ended_fs == r.arrival_fs
            assert r.num_output_tokens == 0
        else:
            assert 0 <= r.num_output_tokens < min(r.spec.target_tokens, room)
        if r.outcome is Outcome.ABORTED:
            assert r.spec.cancel_after_s is not None
            assert r.ended_fs == r.arrival_fs + to_fs(r.spec.cancel_after_s)
        if r.outcome is Outcome.TIMED_OUT:
            assert r.spec.timeout_s is not None
            assert r.ended_fs == r.arrival_fs + to_fs(r.spec.timeout_s)
        if r.outcome is Outcome.FAILED:  # only for want of a cap could it enter and outgrow the pool
            assert r.spec.max_tokens is None
            assert str(load.config.num_gpu_blocks) in r.reason


def test_a_rejection_says_what_was_asked_and_what_there_is() -> None:
    config = engine(num_gpu_blocks=10, block_size=16)
    specs = [
        request("no room", 0.0, 161, 1, max_tokens=1),
        request("fits exactly", 0.0, 160, 1, max_tokens=1),
        request("no room for the answer", 0.0, 100, 62, max_tokens=62),
        request("fits with the answer", 0.0, 100, 61, max_tokens=61),
        request("too long", 0.0, 4000, 97, max_tokens=97),
    ]
    record = run_world(config, STEP, specs, check=True)
    outcomes = {r.request_id: (r.outcome, r.finish_reason) for r in record.requests}
    assert outcomes == {
        "no room": (Outcome.REJECTED, "exceeds_kv_pool"),
        "fits exactly": (Outcome.FINISHED, "length"),
        "no room for the answer": (Outcome.REJECTED, "exceeds_kv_pool"),
        "fits with the answer": (Outcome.FINISHED, "length"),
        "too long": (Outcome.REJECTED, "exceeds_max_model_len"),
    }
    no_room, _, _, _, too_long = record.requests
    for number in ("161", "11", "10", "16"):
        assert number in no_room.reason
    for number in ("4000", "97", "4097", "4096"):
        assert number in too_long.reason


def test_a_request_that_outgrows_the_whole_pool_fails_alone_and_in_words() -> None:
    """Nobody knew how long it would get. Its end frees its blocks for the other, which finishes."""
    specs = [request("grows", 0.0, 30, 1000), request("other", 0.0, 30, 10)]
    record = run_world(engine(num_gpu_blocks=4), STEP, specs, check=True)
    grows, other = record.requests
    assert grows.outcome is Outcome.FAILED
    assert grows.num_output_tokens == 4 * 16 + 1 - 30  # the 65th token would need a fifth block
    assert "65 tokens" in grows.reason
    assert "5 KV blocks of a pool of 4" in grows.reason
    assert (other.outcome, other.num_output_tokens) == (Outcome.FINISHED, 10)


def test_a_client_that_leaves_at_time_zero_leaves_at_time_zero() -> None:
    """Its step is under way then, and ends later; zero is a time like any other."""
    core = EngineCore(engine())
    core.add(request("a", 0.0, 10, 5), 0)
    plan = core.plan(0)
    assert plan is not None
    assert core.abort("a", 0)
    core.commit(plan, StepResult(durations=Durations.one(1000)), 1000)
    (ended,) = core.take_ended()
    assert (ended.outcome, ended.ended_fs) == (Outcome.ABORTED, 0)


class FirstStepRunsOutOfMemory:
    """An executor that fails once, at once."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core

    def execute(self, plan: StepPlan) -> StepResult:
        oom = None if plan.step else OomReport(op="activations", requested_bytes=2, free_bytes=1)
        return StepResult(durations=ModelExecutor(STEP).execute(plan).durations, oom=oom)


@pytest.mark.parametrize("chunked", [True, False], ids=["in chunks", "whole"])
def test_a_step_that_ran_out_of_memory_keeps_nobody_out_for_ever(chunked: bool) -> None:
    """The first request is over, or gone, when the second comes, whose prompt is longer than half of the step that failed."""
    config = engine(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, enable_chunked_prefill=chunked)
    specs = [request("first", 0.0, 10, 1, cancel_after_s=0.5 * TICK_S), request("second", 10 * TICK_S, 10, 3)]
    record = run_world(config, STEP, specs, check=True, executor=FirstStepRunsOutOfMemory)
    assert record.recorders[0].core.oom_events == 1
    assert [r.outcome for r in record.requests] == [Outcome.ABORTED, Outcome.FINISHED]


def test_a_step_shrunk_by_the_ladder_keeps_out_no_prompt_that_cannot_be_cut() -> None:
    """Without chunked prefill a prompt of 100 tokens does not fit in half of a step of 128; when nothing runs, it starts all the same."""
    config = engine(max_model_len=128, max_num_seqs=1, max_num_batched_tokens=128, enable_chunked_prefill=False)
    shrink = Rung(action="shrink_step", signal="queue_s", on=4 * TICK_S, off=TICK_S, value=0.5)
    specs = [request("first", 0.0, 10, 9, priority=1), request("long", TICK_S, 100, 2, priority=1)]
    policy = Policy(ladder=LadderConfig(rungs=(shrink,)))
    record = run_world(config, STEP, specs, check=True, policy=policy)
    assert [(r.outcome, r.degraded) for r in record.requests] == [
        (Outcome.FINISHED, []),
        (Outcome.FINISHED, []),
    ]


# -- what is in the blocks -----------------------------------------------------------------------------------------------


@dataclass
class ShadowMemory:
    """An executor that keeps, for every slot of the pool, whose token was written there last, and looks at each step whether every
    request reads what it must.

    The KV of a token is known by all the content before it: named content by namespace and ids, all other by its request. A plan is
    applied when the next one comes, because only then is it known how many of its steps were done.
    """

    core: EngineCore
    specs: dict[str, RequestSpec]
    slots: dict[tuple[int, int], object] = field(default_factory=dict)
    saved: dict[tuple[int, int], object] = field(default_factory=dict)
    """The same of the CPU pool."""
    out: tuple[int, list[tuple[ScheduledRequest, ...]]] = (0, [])

    def execute(self, plan: StepPlan) -> StepResult:
        self.settle(plan.step)
        for _, pairs in plan.swap_outs:
            self.copy(self.slots, self.saved, pairs)
        for _, pairs in plan.swap_ins:
            self.copy(self.saved, self.slots, pairs)
        self.copy(self.slots, self.slots, plan.copies)
        self.out = (plan.step, [plan.scheduled(ahead) for ahead in range(plan.repeat)])
        return ModelExecutor(COST).execute(plan)

    def copy(
        self,
        source: dict[tuple[int, int], object],
        target: dict[tuple[int, int], object],
        pairs: Sequence[tuple[int, int]],
    ) -> None:
        for old, new in pairs:
            for offset in range(max(group.block_size for group in self.core.config.groups)):
                target[new, offset] = source.get((old, offset))

    def settle(self, steps_done: int) -> None:
        """Write and read what the steps of the last plan wrote and read, as far as they were done."""
        first, steps = self.out
        for shares in steps[: steps_done - first]:
            for index, group in enumerate(self.core.config.groups):
                for share in shares:
                    table = share.group_tables[index] if share.group_tables else share.block_table
                    for token in range(share.context_tokens, share.context_tokens + share.num_tokens):
                        block = table[token // group.block_size]
                        assert block, "a token is written into no block"
                        self.slots[block, token % group.block_size] = (index, self.identity(share.request_id, token))
            for index, group in enumerate(self.core.config.groups):
                for share in shares:
                    table = share.group_tables[index] if share.group_tables else share.block_table
                    oldest = 0 if group.window is None else max(share.context_tokens - group.window + 1, 0)
                    for token in range(oldest, share.context_tokens + share.num_tokens):
                        slot = (table[token // group.block_size], token % group.block_size)
                        assert self.slots[slot] == (index, self.identity(share.request_id, token))
        self.out = (steps_done, [])

    def identity(self, name: str, token: int) -> object:
        spec = self.specs[name]
        count, span = len(spec.content_ids), spec.content_block_tokens
        named = count * span
        if (count - 1) * span < spec.input_tokens:
            named = min(named, spec.input_tokens)
        if token < named:
            return (spec.namespace, spec.content_ids[: token // span + 1], token)
        return (name, token)


@dataclass
class Book:
    """An executor that keeps, from the plans alone, who holds which blocks: what it was shown in the steps that were done, less what it
    was told of.
    """

    core: EngineCore
    held: dict[str, set[int]] = field(default_factory=dict)
    out: tuple[int, list[tuple[ScheduledRequest, ...]]] = (0, [])

    def execute(self, plan: StepPlan) -> StepResult:
        self.settle(plan.step, (*plan.slid, *plan.releases))
        self.out = (plan.step, [plan.scheduled(ahead) for ahead in range(plan.repeat)])
        for share in self.out[1][0]:
            tables = share.group_tables or (share.block_table,)
            assert self.held.get(share.request_id, set()) <= {block for table in tables for block in table}
        return ModelExecutor(COST).execute(plan)

    def settle(self, steps_done: int, given: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        first, steps = self.out
        for shares in steps[: steps_done - first]:
            for share in shares:
                tables = share.group_tables or (share.block_table,)
                self.held.setdefault(share.request_id, set()).update(
                    block for table in tables for block in table if block
                )
        for name, blocks in given:
            self.held.get(name, set()).difference_update(blocks)


@settings(max_examples=150)
@given(loads(planned_ahead=[False]), st.booleans())
def test_plans_tell_of_every_block_that_is_given_back(load: Load, stepping: bool) -> None:
    books: list[Book] = []

    def executor(core: EngineCore) -> Book:
        books.append(Book(core))
        return books[0]

    log: list[dict[str, object]] = []
    load.run(stepping=stepping, executor=executor, decision_log=log.append)
    last = [] if not log or log[-1]["scheduled"] else log[-1]["released"]  # decided after the last plan
    books[0].settle(books[0].core.steps, (*books[0].core.pending_releases, *last))
    assert not any(books[0].held.values())


policies = st.one_of(
    st.none(),
    st.builds(
        Policy,
        queue=st.sampled_from([FcfsQueue, priority_queue]),
        victim=st.sampled_from(list(VICTIMS.values())),
        batching=st.sampled_from(Batching),
        swap=st.just(True),
    ),
)


@settings(max_examples=150)
@given(loads(), policies, st.integers(0, 40), st.booleans())
def test_every_request_reads_its_own_tokens_and_no_others(
    load: Load, policy: Policy | None, num_cpu_blocks: int, stepping: bool
) -> None:
    """I7 and I9: no block is shared wrongly, taken too early or written twice, on its way through the CPU pool either."""
    load = Load(replace(load.config, num_cpu_blocks=num_cpu_blocks), load.requests, policy)
    shadows: list[ShadowMemory] = []

    def executor(core: EngineCore) -> ShadowMemory:
        shadows.append(ShadowMemory(core, {spec.request_id: spec for spec in load.requests}))
        return shadows[0]

    load.run(stepping=stepping, executor=executor)
    shadows[0].settle(shadows[0].core.steps)


# -- one function for every need (I5) --------------------------------------------------------------------------------------


class AskedAndGiven:
    """Stands between an engine and its tables and pool, and compares what was predicted with what was taken."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.grown = self.refused = 0
        self._grow = core.tables.grow
        core.tables.grow = self.grow

    def grow(
        self, table: BlockTable, computed_tokens: int, new_tokens: int, hits: Sequence[int] = ()
    ) -> Allocation | None:
        tables, pool = self.core.tables, self.core.pool
        tables.slide(table, computed_tokens)
        predicted, free = tables.need(table, computed_tokens, new_tokens, hits), pool.num_free
        allocation = self._grow(table, computed_tokens, new_tokens, hits)
        assert (allocation is None) == (predicted > free)
        assert free - pool.num_free == (0 if allocation is None else predicted)
        self.grown += allocation is not None
        self.refused += allocation is None
        return allocation

    def execute(self, plan: StepPlan) -> StepResult:
        return ModelExecutor(COST).execute(plan)


@settings(max_examples=100)
@given(loads(), st.booleans())
def test_the_allocator_takes_exactly_what_the_predictor_said(load: Load, stepping: bool) -> None:
    load.run(stepping=stepping, executor=AskedAndGiven)


class Gate(AdmissionBase):
    """The default admission, remembering for how many blocks it let somebody start."""

    def __init__(self, config: EngineConfig) -> None:
        self._default = default_admission(config)
        self.granted: list[int] = []

    def arrive(self, spec: RequestSpec, view: EngineView) -> Rejection | None:
        return self._default.arrive(spec, view)

    def may_start(self, request: Request, need_blocks: int, view: EngineView) -> bool | Rejection:
        granted = self._default.may_start(request, need_blocks, view)
        if granted is True:
            self.granted.append(need_blocks)
        return granted


def drive(core: EngineCore, specs: Sequence[RequestSpec]) -> list[StepPlan]:
    """All requests at once, and one second a step, until there is nothing to do."""
    for spec in specs:
        core.add(spec, 0)
    plans: list[StepPlan] = []
    while (plan := core.plan(len(plans) * 10**15, 1)) is not None:
        plans.append(plan)
        core.commit(plan, StepResult(durations=Durations.one(10**15)), len(plans) * 10**15)
        core.check()
    return plans


@settings(max_examples=100)
@given(loads(policies=["fcfs"]))
def test_whoever_passes_the_gate_finds_the_blocks_the_gate_counted(load: Load) -> None:
    """The gate asks for the whole prompt, or for the next chunk; in the step that follows the allocator takes that or less, and takes it
    at once: nobody passes the gate in vain.
    """
    gate = Gate(load.config)
    core = EngineCore(load.config, policy=Policy(admission=lambda config: gate))
    taken: list[int] = []
    grow = core.tables.grow

    def counted(table: BlockTable, computed: int, new: int, hits: Sequence[int] | None = None) -> Allocation | None:
        free = core.pool.num_free
        allocation = grow(table, computed, new, hits or ())
        if hits is not None:  # only an admission says what it found
            assert allocation is not None, "passed the gate and found no room"
            taken.append(free - core.pool.num_free)
        return allocation

    core.tables.grow = counted
    drive(core, load.requests)
    assert len(taken) == len(gate.granted)
    for got, granted in zip(taken, gate.granted, strict=True):
        assert got <= granted
        if not load.config.reserve_full_prompt:
            assert got == granted


def test_the_sizer_the_gate_and_the_allocator_agree_on_the_largest_prompt() -> None:
    """A prompt that the sizer says the pool just holds is let in, gets every block, and finishes; one token more is turned away."""
    for block_size in (1, 16, 48):
        config = engine(num_gpu_blocks=7, block_size=block_size, max_model_len=7 * block_size + 1)
        largest = request("a", 0.0, 7 * block_size, 1, max_tokens=1)
        (served,) = run_world(config, STEP, [largest], check=True).requests
        assert (served.outcome, served.peak_blocks) == (Outcome.FINISHED, 7)
        wider = engine(num_gpu_blocks=7, block_size=block_size, max_model_len=7 * block_size + 2)
        (refused,) = run_world(wider, STEP, [request("a", 0.0, 7 * block_size + 1, 1, max_tokens=1)]).requests
        assert refused.finish_reason == "exceeds_kv_pool"


# -- fairness and preemption ----------------------------------------------------------------------------------------------


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


@settings(max_examples=100)
@given(loads(policies=["fcfs"], planned_ahead=[False]))
def test_first_come_first_served_runs_the_oldest_in_the_system(load: Load) -> None:
    """Nobody waits who came before somebody that runs: admission never overtakes, and whoever gives way is the last that came."""
    record, watcher = watched(load)
    for seen in watcher.seen:
        in_system = [r.request_id for r in record.requests if r.arrival_fs <= seen.start_fs < r.ended_fs]
        assert seen.after == set(in_system[: len(seen.after)])


@settings(max_examples=100)
@given(loads(policies=["priority"], planned_ahead=[False]))
def test_under_priority_scheduling_whoever_gives_way_is_the_least_important_that_runs(load: Load) -> None:
    rank = {spec.request_id: (spec.priority, spec.arrival_s, i) for i, spec in enumerate(load.requests)}
    for seen in watched(load)[1].seen:
        stayed = seen.before - set(seen.preempted)
        assert all(rank[victim] > rank[other] for victim in seen.preempted for other in stayed)


@settings(max_examples=100)
@given(loads(policies=["fcfs"]))
def test_preemptions_of_a_request_are_bounded_by_the_growth_of_those_before_it(load: Load) -> None:
    """First come, first served preempts the last of the running only. Between two preemptions of a request, it or one that came before
    it must have taken a block; one that came before takes at most its whole length once, and again after each preemption of its own.
    """
    record = load.run()
    bound = 0
    for r in record.requests:
        length = math.ceil((r.spec.input_tokens + r.spec.target_tokens) / load.config.block_size)
        assert r.num_preemptions <= length + bound
        bound += length * (r.num_preemptions + 1)


@settings(max_examples=100)
@given(loads(policies=["fcfs"]))
def test_the_first_to_come_is_never_preempted(load: Load) -> None:
    record = load.run()
    served = [r for r in record.requests if r.outcome is not Outcome.REJECTED]
    if served:
        assert served[0].num_preemptions == 0


def test_preemptions_stay_few_under_heavy_pressure() -> None:
    """Two hundred requests of 24 tokens growing to 120, in a pool that holds five of them: real engines preempt a request a handful of
    times at most, and a simulator that preempts without progress shows here.
    """
    requests = [request(i, i * 0.004, 24, 96, max_tokens=96) for i in range(200)]
    load = Load(
        engine(num_gpu_blocks=40, block_size=16, max_num_batched_tokens=256, max_model_len=128), tuple(requests)
    )
    summary = summarize(load.run(), scenario={}, seed=0, version="")
    assert summary["finished"] == 200
    assert summary["num_preemptions"] > 20, "no pressure, no test"
    assert summary["max_preemptions_per_request"] <= 8
    assert summary["kv_blocks_at_end"]["owned"] == 0


def test_a_less_important_victim_is_the_same_in_whatever_order_the_running_are_listed() -> None:
    core = EngineCore(engine(scheduling_policy="priority"))
    made = [core.add(request(i, 0.0, 4, 4, priority=p), i // 2).request for i, p in enumerate([0, 2, 1, 2, 2])]

    def known(request: Request) -> int:
        return request.num_tokens

    chosen = {worst_priority(dict(enumerate(order)), known) for order in (made, made[::-1], made[2:] + made[:2])}
    assert chosen == {made[4]}


@settings(max_examples=50)
@given(loads(), st.integers(0, 3))
def test_a_pool_for_everybody_at_once_preempts_nobody(load: Load, spare: int) -> None:
    needed = sum(math.ceil((spec.input_tokens + spec.output_tokens) / load.config.block_size) for spec in load.requests)
    needed *= len(load.config.groups)
    enough = Load(replace(load.config, num_gpu_blocks=needed + spare), load.requests)
    assert all(r.num_preemptions == 0 for r in enough.run().requests)


# -- the decision log ----------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(loads(windows=[None], hybrid=False))
def test_the_log_accounts_for_every_block_it_hands_out(load: Load) -> None:
    """Read on its own: a block given as new is held by nobody, a released one is held, and an admission may share what others hold."""
    log: list[dict[str, object]] = []
    load.run(decision_log=log.append)
    held: dict[str, list[int]] = {}
    for entry in log:
        for name, blocks in entry["released"]:
            table = held.setdefault(name, [])
            assert set(table) <= set(blocks), "a request ends and keeps blocks"
            held[name] = []
        for name, _, blocks in entry["scheduled"]:
            if name not in entry["admitted"]:
                everybody = {block for table in held.values() for block in table}
                assert not everybody & set(blocks), "a block is handed out while somebody holds it"
            held[name] = held.get(name, []) + [block for block in blocks if block]


def test_the_log_tells_of_blocks_that_slid_out_of_the_window() -> None:
    """A window of 4 over blocks of 4: of a request's five blocks no more than two are held at once, and all five are given back."""
    log: list[dict[str, object]] = []
    config = engine(num_gpu_blocks=3, block_size=4, sliding_window=4, max_num_seqs=1, max_num_batched_tokens=4)
    specs = [request("a", 0.0, 4, 16), request("after", 0.0, 1, 1)]
    run_world(config, STEP, specs, check=True, decision_log=log.append)
    given_out = Counter(
        block for entry in log for name, _, blocks in entry["scheduled"] if name == "a" for block in blocks
    )
    given_back = Counter(
        block for entry in log for name, blocks in entry["released"] if name == "a" for block in blocks
    )
    assert sum(given_out.values()) == 5
    assert given_back == given_out


@pytest.mark.parametrize(
    "arrival_ticks", [0, 4, 100], ids=["before any step", "during the last step", "after the last step"]
)
def test_the_log_has_every_rejection(arrival_ticks: int) -> None:
    log: list[dict[str, object]] = []
    specs = [request("runs", 0.0, 4, 1), request("too long", arrival_ticks * TICK_S, 5000, 1)]
    record = run_world(engine(), COST, specs, check=True, decision_log=log.append)
    reason = record.requests[1].reason
    assert [rejected for entry in log for rejected in entry["rejected"]] == [("too long", reason)]


def test_the_log_has_the_release_of_the_last_request() -> None:
    log: list[dict[str, object]] = []
    run_world(engine(), COST, [request("a", 0.0, 40, 3)], check=True, decision_log=log.append)
    assert [released for entry in log for released in entry["released"]] == [("a", [1, 2, 3])]


@settings(max_examples=100)
@given(loads(planned_ahead=[False]))
def test_a_plan_says_the_same_as_the_log(load: Load) -> None:
    log: list[dict[str, object]] = []
    _, watcher = watched(load, decision_log=log.append)
    for plan, entry in zip(watcher.plans, [entry for entry in log if entry["scheduled"]], strict=True):
        assert plan.step == entry["step"]
        assert list(plan.admitted) == entry["admitted"]
        assert list(plan.preempted) == entry["preempted"]
        assert [(name, list(blocks)) for name, blocks in plan.releases] == entry["released"]


@settings(max_examples=50)
@given(loads(), st.sampled_from([2, 3]), st.sampled_from(["round-robin", "least-requests", "least-kv"]))
def test_several_replicas_lose_nothing_either(load: Load, replicas: int, router: str) -> None:
    record = load.run(replicas=replicas, router=router)
    assert [r.spec for r in record.requests] == list(load.requests)
    assert set(record.replica_of) == {spec.request_id for spec in load.requests}
    for recorder in record.recorders:
        pool = recorder.core.pool
        assert (pool.num_free, pool.num_owned) == (load.config.num_gpu_blocks, 0)


@settings(max_examples=50)
@given(loads(), st.integers(1, 4))
def test_a_closed_loop_never_has_more_requests_outstanding_than_clients(load: Load, clients: int) -> None:
    record = load.run(max_concurrency=clients)
    edges = sorted(
        [(r.arrival_fs, 1) for r in record.requests if r.ended_fs != r.arrival_fs]
        + [(r.ended_fs, -1) for r in record.requests if r.ended_fs != r.arrival_fs]
    )
    outstanding = 0
    for _, change in edges:
        outstanding += change
        assert outstanding <= clients
