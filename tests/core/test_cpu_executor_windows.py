"""The CPU executor for models whose layers have windows, and for several attention groups: what a request takes along, has room for there,
and brings back.

Blocks of four, and a rung that moves whoever it may (`run_on_cpu`, engine-policies §1.1.6). "low" has 13 prompt tokens and
may produce 10, so its last KV is that of token 22 of 23: 6 blocks where everything is kept.
"""

from __future__ import annotations

import pytest

from sim.core.config import AttentionGroup
from sim.core.cpu_server import CpuExecutor
from sim.core.request import Outcome, State
from sim.core.rungs import Rung
from tests.support.laddered_engine import LadderedEngine

FULL, NARROW = AttentionGroup(block_size=4), AttentionGroup(block_size=4, window=5)
WIDE = AttentionGroup(block_size=8, window=9)


RUNG = Rung(action="run_on_cpu", on=0.15, off=0.05, hold_s=0.0, value=0.01)
"""Off only when "high" is done."""


def engine_with(rung: Rung, **settings: object) -> LadderedEngine:
    return LadderedEngine(rung, cpu=CpuExecutor(token_s=1.0), num_cpu_blocks=40, **settings)


def room_taken(engine: LadderedEngine) -> int:
    return engine.core._scheduler.swapping.cpu_pool.num_owned


def passed(table: tuple[int, ...]) -> int:
    """Leading entries that are out of the window; behind them all are there."""
    gone = table.count(0)
    assert 0 not in table[gone:]
    return gone


@pytest.mark.parametrize(
    ("settings", "taken_along", "room", "brought_back"),
    [
        # 13 tokens are computed when it goes, and 17 when it comes back: the first of 18 in whose window the next one looks is token 13.
        ({"sliding_window": 5}, [(2, 2)], 4, [(3, 2)]),
        ({"sliding_window": 8}, [(1, 3)], 5, [(2, 3)]),
        ({"kv_groups": (FULL, NARROW)}, [(0, 4), (2, 2)], 6 + 4, [(0, 5), (3, 2)]),
        # Blocks of 8 with a window of 9: token 5 is the first in the window of token 13, and token 9 that of token 17.
        ({"kv_groups": (NARROW, WIDE)}, [(2, 2), (0, 2)], 4 + 3, [(3, 2), (1, 2)]),
    ],
)
def test_a_request_takes_its_windows_along_and_brings_back_those_of_then(settings, taken_along, room, brought_back):
    """By group: entries out of its window, and blocks. On the CPU it has room for all tokens from its windows on. It goes after its first
    step, at 1 s, has its tokens of 2, 3, 4 and 5 s, and comes back when "high" is done."""
    engine = engine_with(RUNG, num_gpu_blocks=30, **settings)
    engine.add("high", 9, 5, priority=0)
    low = engine.add("low", 13, 10, priority=2)
    engine.step()
    plan = engine.step().plan
    (gone,) = plan.to_cpu
    assert (low.state, gone.request_id, gone.computed_tokens, gone.most_tokens) == (State.ON_CPU, "low", 13, 22)
    assert [(passed(table), len(table) - passed(table)) for table in gone.group_tables] == taken_along
    kept = [block for table in gone.group_tables for block in table if block]
    assert [block for _, pairs in plan.swap_outs for block, _ in pairs] == kept
    assert room_taken(engine) == room
    while not (plan := engine.step().plan).from_cpu:
        pass
    (back,) = plan.from_cpu
    assert (back.request_id, back.computed_tokens) == ("low", 17)
    assert [(passed(table), len(table) - passed(table)) for table in back.group_tables] == brought_back
    restored = [block for table in back.group_tables for block in table if block]
    assert [block for _, pairs in plan.swap_ins for _, block in pairs] == restored
    assert room_taken(engine) == 0
    engine.run()
    assert (low.outcome, low.num_output_tokens) == (Outcome.FINISHED, 10)


def test_what_comes_back_lies_where_it_was_computed():
    """Of the CPU blocks of each group those come back whose places the windows then cover."""
    engine = engine_with(RUNG, num_gpu_blocks=30, kv_groups=(FULL, NARROW))
    engine.add("high", 9, 5, priority=0)
    low = engine.add("low", 13, 10, priority=2)
    engine.step()
    engine.step()
    full, narrow = low.cpu_blocks[:6], low.cpu_blocks[6:]  # places 0 to 5, and 2 to 5
    while not (plan := engine.step().plan).from_cpu:
        pass
    ((_, pairs),) = plan.swap_ins
    assert [cpu_block for cpu_block, _ in pairs] == [*full[:5], *narrow[1:3]]


def test_a_block_that_has_just_left_a_window_is_released_and_not_moved():
    """With 12 tokens computed token 5 is the first in a window of 8: the first block is out. The step that would have said so is the one
    that moves "low"."""
    engine = engine_with(RUNG, num_gpu_blocks=16, sliding_window=8)
    engine.add("high", 5, 20, priority=0)
    low = engine.add("low", 12, 10, priority=2)
    engine.step()
    assert low.held_blocks == 3
    plan = engine.step().plan
    ((name, pairs),) = plan.swap_outs
    assert (name, len(pairs), plan.to_cpu[0].group_tables[0][0]) == ("low", 2, 0)
    assert [len(blocks) for name, blocks in plan.releases if name == "low"] == [1, 2]
    engine.run()


def test_one_whose_client_leaves_before_it_is_back_leaves_nothing():
    """ "next" waits from 1 s on, for the blocks that "low" holds; at 2 s "low" goes to the CPU and "next" starts, so at 3 s the rung is
    off. "low" waits, swapped out, and its client goes."""
    rung = Rung(action="run_on_cpu", signal="queue_s", on=0.5, off=0.5, hold_s=0.0, value=0.01)
    engine = engine_with(rung, num_gpu_blocks=9)
    engine.add("high", 9, 9, priority=0)
    low = engine.add("low", 9, 10, priority=2)
    engine.step()
    engine.add("next", 20, 9, priority=0)
    assert [[move.request_id for move in engine.step().plan.to_cpu] for _ in range(2)] == [[], ["low"]]
    engine.step()
    assert low.state is State.SWAPPED
    assert room_taken(engine) == 3
    engine.abort("low")
    assert (low.outcome, room_taken(engine)) == (Outcome.ABORTED, 0)
    assert not engine.core._scheduler.swapping.from_cpu
    assert engine.step().plan.ended_on_cpu == ("low",)
    assert engine.step().plan.ended_on_cpu == ()
    engine.run()


def test_who_ends_on_the_cpu_is_told_by_name_and_who_comes_back_is_not():
    """ "low" has all its tokens there; in the tests above it comes back, and no plan says that it ended there."""
    engine = engine_with(RUNG, num_gpu_blocks=30)
    engine.add("high", 9, 20, priority=0)
    low = engine.add("low", 13, 4, priority=2)
    told = []
    while engine.core.num_unfinished:
        plan = engine.step().plan
        told += [(low.state, name) for name in plan.ended_on_cpu]
    assert told == [(State.ENDED, "low")]

    engine = engine_with(RUNG, num_gpu_blocks=30)
    engine.add("high", 9, 5, priority=0)
    engine.add("low", 13, 10, priority=2)
    plans = []
    while engine.core.num_unfinished:
        plans.append(engine.step().plan)
    assert [move.request_id for plan in plans for move in plan.from_cpu] == ["low"]
    assert [name for plan in plans for name in plan.ended_on_cpu] == []
