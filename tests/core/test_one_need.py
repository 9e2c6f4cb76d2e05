"""One function for every need (I5): sizer, gate, predictor and allocator count the same blocks."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.admission import AdmissionBase, Rejection, default_admission
from sim.core.config import EngineConfig
from sim.core.durations import Durations
from sim.core.engine import EngineCore
from sim.core.plan import StepPlan, StepResult
from sim.core.policy import Policy
from sim.core.request import Outcome, Request, RequestSpec
from sim.core.tables import Allocation, BlockTable
from sim.core.view import EngineView
from sim.world import run_world
from sim.world.executors import ModelExecutor
from tests.support.pressed_engines import COST, STEP, Load, loads
from tests.support.roomy import engine, request


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
