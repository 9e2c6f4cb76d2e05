"""What left a window is given back to the device, poisoned and never read: of a model of windows alone at once, of several attention
groups at once or, in stretches of decodes, when the core says so.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from experiments.validation import SCENARIOS, reference_answers, run_for_real
from experiments.validation.scenario_kinds import ANY_GPU, BLOCK_SIZE, HYBRID, MAX_MODEL_LEN, windowed
from experiments.validation.worlds import changed_answers, preset
from gpu.metering import allocation_meter
from gpu.real_engine import RealEngine
from gpu.real_settings import RealSettings
from sim.assembly import core_groups
from sim.catalog.models import model_shape
from sim.core.clock import to_fs
from sim.core.config import AttentionGroup, EngineConfig
from sim.core.engine import EngineCore
from sim.core.plan import ScheduledRequest, StepPlan
from sim.core.request import RequestSpec
from sim.memory import build_ledger
from tests.support.scenarios import with_engine


def groups_of(shape) -> tuple[AttentionGroup, ...]:
    """Those of the ledger."""
    return core_groups(build_ledger(shape, ANY_GPU, block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN))


class Watcher:
    """An executor after each of whose plans every block that the device's book calls free must be poison, in every place."""

    def __init__(self, inner) -> None:
        self.inner, self.slid, self.passed, self.checked_blocks = inner, 0, 0, 0

    def execute(self, plan):
        self.slid += sum(len(blocks) for _, blocks in plan.slid)
        for share in plan.scheduled(0):
            self.passed += any(0 in table for table in share.group_tables or (share.block_table,))
        result = self.inner.execute(plan)
        pool = self.inner.pool
        for block in range(1, pool.num_blocks + 1):
            if not pool.tags.holders(block):
                assert (pool.rows.strided[block] == -1).all(), f"block {block} is free and not poisoned"
                self.checked_blocks += 1
        return result

    def close(self, untold):
        self.inner.close(untold)


@pytest.mark.parametrize("name", ["window-0", "window-1", "window-2", "hybrid-0", "hybrid-1", "hybrid-swaps-1"])
def test_what_nobody_holds_is_poison_and_no_answer_suffers(name, steady_time):
    """Without a prefix cache every block that is given back is filled with NaN. Of a model of windows alone every plan's releases tell
    what slid; with several groups, what slid in the later steps of a stretch is in the next plan's `slid`.
    """
    scenario, watchers = with_engine(SCENARIOS[name], enable_prefix_caching=False), []

    def watched(inner):
        watchers.append(Watcher(inner))
        return watchers[0]

    run = run_for_real(scenario, preset("vllm-v1"), wrap=watched)
    assert watchers[0].checked_blocks > 0
    assert watchers[0].passed > 20
    assert (watchers[0].slid > 0) == name.startswith("hybrid")
    assert changed_answers(run, reference_answers(scenario)) == []
    assert run.leaked_blocks == 0


class Served:
    """One hybrid engine on the CPU device, driven step by step: window 6 and blocks of 4, so that blocks leave the window in steps in
    which nobody takes one.
    """

    def __init__(self, **settings: object) -> None:
        self.shape = windowed(model_shape(HYBRID), 6)
        self.specs = [
            RequestSpec(request_id=f"r{index}", arrival_s=0.0, input_tokens=tokens, output_tokens=26)
            for index, tokens in enumerate((11, 15))
        ]
        self.core = EngineCore(
            EngineConfig(
                num_gpu_blocks=72,
                block_size=BLOCK_SIZE,
                max_model_len=MAX_MODEL_LEN,
                max_num_seqs=4,
                max_num_batched_tokens=32,
                kv_groups=groups_of(self.shape),
            )
        )
        self.engine = RealEngine(
            RealSettings(**{"shape": self.shape, "checked": True, "num_threads": 1} | settings), self.specs
        )
        self.executor = self.engine.executor(self.core)
        self.plans: list[StepPlan] = []
        self.now_s = 0.0
        for spec in self.specs:
            self.core.add(spec, 0)

    def step(self, max_repeat: int | None = None, cut: Callable[[int], int] = lambda steps: steps) -> None:
        """Plan, execute, and commit what is left when `cut` has said how many of the steps done count."""
        plan = self.core.plan(to_fs(self.now_s), max_repeat)
        assert plan is not None
        self.plans.append(plan)
        result = self.executor.execute(plan)
        self.now_s += 1.0
        self.core.commit(plan, result.cut(cut(result.steps)), to_fs(self.now_s))

    def run(self, **how: object) -> dict[str, list[int]]:
        while self.core.num_unfinished:
            self.step(**how)
        self.executor.close(self.core.untold)
        assert self.executor.leaked_blocks == 0
        return {spec.request_id: self.engine.tokens.answer(spec.request_id) for spec in self.specs}


@pytest.mark.parametrize("seed", range(4))
def test_a_stretch_may_be_cut_before_or_after_a_block_slid_out_of_it(seed):
    """Steps that were run and do not count may have passed a block that the next step reads after all: it must still be there."""
    stepped = Served()
    want = stepped.run(max_repeat=1)
    assert not any(plan.slid for plan in stepped.plans)
    whole = Served()
    assert whole.run() == want
    assert any(plan.slid for plan in whole.plans)
    assert len(whole.plans) < len(stepped.plans) / 2
    draw, cuts = random.Random(seed), Served()
    assert cuts.run(cut=lambda steps: draw.randint(1, steps)) == want
    assert any(plan.slid for plan in cuts.plans)
    assert len(cuts.plans) > len(whole.plans)


def test_a_later_step_of_a_stretch_is_what_the_core_says_but_for_what_slid(monkeypatch):
    """The device goes on with its first tables: they are the core's, with blocks where the core has NO_BLOCK already."""
    served, compared, slid = Served(), 0, 0
    seen: list[tuple[ScheduledRequest, ...]] = []
    run = type(served.executor.forward).run
    monkeypatch.setattr(
        served.executor.forward,
        "run",
        lambda scheduled, parts=1: (seen.append(scheduled), run(served.executor.forward, scheduled, parts))[1],
    )
    while served.core.num_unfinished:
        plan = served.core.plan(to_fs(served.now_s))
        seen.clear()
        result = served.executor.execute(plan)
        for ahead, mine in enumerate(seen):
            for share, told in zip(mine, plan.scheduled(ahead), strict=True):
                compared += 1
                assert (share.request_id, share.context_tokens) == (told.request_id, told.context_tokens)
                for own, table in zip(share.group_tables, told.group_tables, strict=True):
                    assert len(own) == len(table)
                    assert all(block in (0, kept) for block, kept in zip(table, own, strict=True))
                    slid += own != table
        served.now_s += 1.0
        served.core.commit(plan, result, to_fs(served.now_s))
    assert compared > 40
    assert slid > 5


def test_a_decode_step_of_several_groups_makes_no_allocator_call():
    served = Served(checked=False)
    for _ in range(4):
        served.step(max_repeat=1)
    meter = allocation_meter("cpu")
    for _ in range(8):
        with meter:
            served.step(max_repeat=1)
    assert meter.allocations == 0, getattr(meter, "by_operation", None)
