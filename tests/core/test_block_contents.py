"""Whatever the engine, the load and the pressure: every request reads its own tokens, and plans tell of every block (I7, I9)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.cpu_server import CpuExecutor
from sim.core.engine import EngineCore
from sim.core.plan import CpuMove, ScheduledRequest, StepPlan, StepResult
from sim.core.policy import Batching, Policy
from sim.core.preemption import VICTIMS
from sim.core.request import RequestSpec
from sim.core.rungs import LadderConfig, Rung
from sim.core.waiting import FcfsQueue, priority_queue
from sim.world.executors import ModelExecutor
from tests.support.pressed_engines import COST, Load, loads
from tests.support.roomy import TICK_S


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
    moved_at: dict[str, int] = field(default_factory=dict)
    """Who went to the CPU executor, and how many tokens it had computed."""
    out: tuple[int, list[tuple[ScheduledRequest, ...]]] = (0, [])

    def execute(self, plan: StepPlan) -> StepResult:
        self.settle(plan.step)
        for _, pairs in plan.swap_outs:
            self.copy(self.slots, self.saved, pairs)
        for move in plan.to_cpu:
            self.moved_at[move.request_id] = move.computed_tokens
        for move in plan.from_cpu:
            self.compute_on_cpu(move, dict(plan.swap_ins)[move.request_id])
        for _, pairs in plan.swap_ins:
            self.copy(self.saved, self.slots, pairs)
        self.copy(self.slots, self.slots, plan.copies)
        self.out = (plan.step, [plan.scheduled(ahead) for ahead in range(plan.repeat)])
        return ModelExecutor(COST).execute(plan)

    def compute_on_cpu(self, move: CpuMove, pairs: Sequence[tuple[int, int]]) -> None:
        """What the CPU executor has written into the blocks that come back from it."""
        places = {block: cpu_block for cpu_block, block in pairs}
        for index, (group, table) in enumerate(zip(self.core.config.groups, move.group_tables, strict=True)):
            for token in range(self.moved_at[move.request_id], move.computed_tokens):
                if block := table[token // group.block_size]:
                    slot = (places[block], token % group.block_size)
                    self.saved[slot] = (index, self.identity(move.request_id, token))

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
    untold = books[0].core.untold
    books[0].settle(books[0].core.steps, (*untold.slid, *untold.releases, *last))
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
    check_contents(Load(replace(load.config, num_cpu_blocks=num_cpu_blocks), load.requests, policy), stepping)


on_cpu = st.builds(
    lambda on, off, hold_s, token_s: Policy(
        swap=True,
        cpu_executor=CpuExecutor(token_s=token_s),
        ladder=LadderConfig(
            rungs=(Rung(action="run_on_cpu", on=on, off=on * off, hold_s=hold_s, value=0.1),), guard_priority=-1
        ),
    ),
    st.sampled_from([0.2, 0.4]),
    st.sampled_from([1.0, 0.5]),
    st.sampled_from([0.0, 20 * TICK_S]),
    st.sampled_from([4 * TICK_S, 12 * TICK_S, 40 * TICK_S]),
)


@settings(max_examples=100)
@given(loads(windows=[None, 4, 9]), on_cpu, st.sampled_from([60, 400]), st.booleans())
def test_so_it_does_when_it_goes_on_on_the_cpu_and_comes_back(
    load: Load, policy: Policy, num_cpu_blocks: int, stepping: bool
) -> None:
    """What it takes along, computes there and brings back lies in each group where its tables say."""
    check_contents(Load(replace(load.config, num_cpu_blocks=num_cpu_blocks), load.requests, policy), stepping)


def check_contents(load: Load, stepping: bool) -> None:
    """Run a load and look at every read."""
    shadows: list[ShadowMemory] = []

    def executor(core: EngineCore) -> ShadowMemory:
        shadows.append(ShadowMemory(core, {spec.request_id: spec for spec in load.requests}))
        return shadows[0]

    load.run(stepping=stepping, executor=executor)
    shadows[0].settle(shadows[0].core.steps)
