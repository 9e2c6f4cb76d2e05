"""Decode stretches of models with sliding windows are leapt over, also while somebody waits for blocks, and decide as steps do."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.admission import CanEverFit, Every, FreeBlocks
from sim.core.config import AttentionGroup, EngineConfig
from sim.core.plan import StepPlan, StepResult
from sim.core.policies import MaxKvBlocks, PriorityShares
from sim.core.policies.reservation import FullReservation
from sim.core.policy import Batching, Policy
from sim.core.waiting import FcfsQueue, priority_queue
from sim.costs.constant import FixedCost
from sim.world import run_world
from sim.world.executors import ModelExecutor
from tests.support.leaping import Scenario, assert_leap_equals_step, at
from tests.support.roomy import TICK_S

COST = FixedCost(8 * TICK_S, per_token_s=TICK_S, per_context_token_s=TICK_S / 64)


class Counted:
    def __init__(self, calls: Counter[str]) -> None:
        self.inner, self.calls = ModelExecutor(COST), calls

    def execute(self, plan: StepPlan) -> StepResult:
        self.calls["plans"] += 1
        return self.inner.execute(plan)


def plans_and_steps(config, requests, policy=None):
    calls: Counter[str] = Counter()
    record = run_world(config, COST, requests, policy=policy, executor=lambda core: Counted(calls))
    return calls["plans"], record.recorders[0].core.steps


# -- by hand ----------------------------------------------------------------------------------------------------------------------


def test_a_stretch_in_a_window_takes_a_block_and_gives_one_back_every_block_size_steps(drive):
    """Blocks of 4, a window of 8, a prompt of 12. The step with c tokens computed sees tokens c - 7 to c: it holds ceil((c + 1) / 4) blocks
    less (c - 7) // 4. At 12 it takes one and gives one back, at 15 it gives one back, at 16 it takes one, and so on: in a pool of 4.
    """
    world = drive(4, 4, sliding_window=8)
    world.add("a", 12, 41)
    world.step()
    plan = world.plan()
    assert plan.repeat == 40
    held = [sum(1 for block in plan.scheduled(ahead)[0].block_table if block) for ahead in range(plan.repeat)]
    assert held == [3, 3, 3, 2] * 10
    world.commit(plan)
    world.close()
    taken = [len(blocks) for entry in world.log[1:41] for _, _, blocks in entry["scheduled"]]
    given = [sum(len(blocks) for _, blocks in entry["released"]) for entry in world.log[1:41]]
    assert taken == [1, 0, 0, 0] * 10
    assert given == [1, 0, 0, 1] + [0, 0, 0, 1] * 9
    assert world.core.num_unfinished == 0
    assert world.pool.num_owned == 0


def test_a_thousand_tokens_in_a_window_are_few_events():
    """One for the prompt, one until the window is full, and the rest in one: in the pool are only the window's blocks."""
    config = EngineConfig(
        num_gpu_blocks=7,
        block_size=16,
        sliding_window=64,
        max_model_len=2048,
        max_num_batched_tokens=16,
        max_num_seqs=4,
    )
    plans, steps = plans_and_steps(config, [at(0, "alone", 16, 1001)])
    assert steps == 1001
    assert plans <= 4


@pytest.mark.parametrize(
    ("kinds", "num_gpu_blocks"),
    [(((16, 64),), 40), (((16, None), (16, 64)), 200), (((16, None), (32, 64), (16, 128)), 180)],
)
def test_a_head_that_lacks_many_blocks_does_not_make_the_engine_step(kinds, num_gpu_blocks):
    """Four decode for 400 steps, and a prompt that finds a part of itself in the cache lacks more blocks than slide out until they are
    done. Six requests end, four prompts begin beside others: a dozen plans are enough.
    """
    shared = {"content_ids": ("p",) * 4, "content_block_tokens": 64}
    requests = [
        *(at(0, f"d{i}", 100 + 5 * i, 400) for i in range(4)),
        at(0, "first", 256, 2, **shared),
        at(2000, "again", 1800, 2, **shared),
    ]
    alone = len(kinds) == 1
    config = EngineConfig(
        num_gpu_blocks=num_gpu_blocks,
        block_size=16,
        sliding_window=kinds[0][1] if alone else None,
        kv_groups=() if alone else tuple(AttentionGroup(block_size=size, window=window) for size, window in kinds),
        max_model_len=2048,
        max_num_seqs=64,
        max_num_batched_tokens=512,
    )
    plans, steps = plans_and_steps(config, requests)
    assert steps == 405
    assert plans <= 12
    assert_leap_equals_step(Scenario(config, COST, tuple(requests)))


@pytest.mark.parametrize("max_repeat", [1, None])
def test_the_head_starts_in_the_step_in_which_its_last_block_slides_out(drive, max_repeat):
    """Blocks of 4, a window of 8, 7 blocks. In step 2 both that decode hold 3, and the head lacks one of 2. In step 3 the second has 11
    tokens computed, and its first block is out of view.
    """
    world = drive(7, 4, sliding_window=8, max_num_batched_tokens=64)
    world.add("a", 8, 60)
    world.step()
    world.add("b", 10, 60)
    world.step()
    world.add("head", 8, 1)
    tried = []
    while world.core.num_waiting:
        plan = world.plan(max_repeat)
        tried.append((plan.step, plan.repeat, [row.request_id for row in plan.scheduled(0)]))
        world.commit(plan)
    assert tried == [(2, 1, ["a", "b"]), (3, 1, ["a", "b", "head"])]


# -- properties -------------------------------------------------------------------------------------------------------------------


@st.composite
def engines(draw):
    kinds = draw(
        st.sampled_from(
            [
                ((4, 9),),
                ((4, 5),),
                ((4, 8),),
                ((1, 3),),
                ((4, None), (4, 9)),
                ((4, None), (8, 9)),
                ((4, 6), (4, 13)),
                ((4, None), (4, 5), (4, 12)),
            ]
        )
    )
    alone = len(kinds) == 1
    return EngineConfig(
        num_gpu_blocks=draw(st.integers(8, 26)) * len(kinds),
        block_size=kinds[0][0],
        max_model_len=72,
        max_num_seqs=draw(st.sampled_from([2, 4, 8])),
        max_num_batched_tokens=draw(st.sampled_from([8, 24, 80])),
        enable_prefix_caching=draw(st.sampled_from([True, True, False])),
        reserve_full_prompt=draw(st.booleans()),
        sliding_window=kinds[0][1] if alone else None,
        kv_groups=() if alone else tuple(AttentionGroup(block_size=size, window=window) for size, window in kinds),
        num_cpu_blocks=draw(st.sampled_from([0, 0, 20])),
        async_scheduling=draw(st.sampled_from([False, False, True])),
    )


@st.composite
def loads(draw):
    """Long outputs beside prompts that share content, so that heads of the queue find hits and lack blocks."""
    arrival, made = 0, []
    for number in range(draw(st.integers(2, 9))):
        arrival += draw(st.sampled_from([0, 0, 5, 20, 60, 200]))
        shared = draw(st.integers(0, 5))
        made.append(
            at(
                arrival,
                f"r{number}",
                draw(st.integers(1, 40)),
                draw(st.sampled_from([1, 3, 20, 30])),
                priority=draw(st.integers(0, 2)),
                content_ids=tuple("xyzuv"[:shared]),
                content_block_tokens=8 if shared else 0,
                cancel_after_s=draw(st.sampled_from([None, None, None, 60 * TICK_S])),
            )
        )
    return made


ADMISSIONS = {
    "default": None,
    "watermark": lambda config: Every([CanEverFit(config), FreeBlocks(2)]),
    "at most so many blocks": lambda config: Every(
        [CanEverFit(config), MaxKvBlocks(config.num_gpu_blocks * 2 // 3), FreeBlocks()]
    ),
    "shares": lambda config: Every([CanEverFit(config), PriorityShares(config, {0: 0.3, 1: 0.2}), FreeBlocks()]),
    "worst case": lambda config: Every([CanEverFit(config), FullReservation(config)]),
    "everybody": lambda config: CanEverFit(config),
}


@pytest.mark.parametrize("admission", ADMISSIONS)
@settings(max_examples=60)
@given(config=engines(), requests=loads(), data=st.data())
def test_windows_leap_as_they_step(admission, config, requests, data):
    made = {} if ADMISSIONS[admission] is None else {"admission": ADMISSIONS[admission]}
    if admission == "worst case":
        config = replace(config, reserve_full_prompt=True)
    policy = Policy(
        queue=data.draw(st.sampled_from([FcfsQueue, priority_queue])),
        batching=data.draw(st.sampled_from(list(Batching))),
        eviction=data.draw(st.sampled_from(["lru", "lru", "lfu", "priority"])),
        swap=config.num_cpu_blocks > 0,
        **made,
    )
    assert_leap_equals_step(Scenario(config, COST, tuple(requests), policy=policy))
