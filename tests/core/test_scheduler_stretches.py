"""How far a plan reaches: stretches of equal steps, and which arrivals end one."""

from __future__ import annotations

import pytest

from sim.core.request import RequestSpec


def test_a_stretch_lasts_until_the_next_completion(drive):
    """Prompts of 4; after their first tokens, 4 and 9 are left: 4 equal steps, then 5."""
    engine = drive(num_gpu_blocks=20, block_size=4)
    engine.add("short", 4, output_tokens=5)
    engine.add("long", 4, output_tokens=10)
    repeats = []
    while (plan := engine.plan()) is not None:
        repeats.append(plan.repeat)
        engine.commit(plan)
    assert repeats == [1, 4, 5]


def test_a_stretch_lasts_while_blocks_do(drive):
    """5 blocks of 4, two requests with 4 tokens: they take blocks 3 and 4 in the first step, and of the two more that they need
    in the fifth one is there. So 4 equal steps; then the younger gives way; then the older leaps to its end."""
    engine = drive(num_gpu_blocks=5, block_size=4)
    engine.add("older", 4, output_tokens=10)
    engine.add("younger", 4, output_tokens=10)
    repeats, preempted = [], []
    while (plan := engine.plan()) is not None:
        repeats.append(plan.repeat)
        preempted.append(plan.preempted)
        engine.commit(plan)
    assert repeats[:4] == [1, 4, 1, 4]
    assert preempted[:4] == [(), (), ("younger",), ()]


def test_a_stretch_may_use_the_last_block(drive):
    """3 blocks of 4 hold the 12 tokens of the whole request: its 8 decode steps are one stretch."""
    engine = drive(num_gpu_blocks=3, block_size=4)
    engine.add("A", 4, output_tokens=9)
    engine.commit(engine.plan())
    plan = engine.plan()
    assert plan.repeat == 8
    engine.commit(plan)
    assert engine.core.num_unfinished == 0


def test_a_prompt_under_way_is_not_leapt_over(drive):
    engine = drive(num_gpu_blocks=20, block_size=4, max_num_batched_tokens=4)
    engine.add("A", 4, output_tokens=9)
    engine.commit(engine.plan())
    engine.add("B", 9)
    for _ in range(3):
        plan = engine.plan()
        assert plan.repeat == 1
        engine.commit(plan)
    assert engine.plan().repeat == 5


def arrives(engine, request_id, input_tokens, priority=0):
    """Whether an arrival may change what is under way."""
    spec = RequestSpec(
        request_id=request_id, arrival_s=0.0, input_tokens=input_tokens, output_tokens=1, priority=priority
    )
    return engine.core.add(spec, engine.now_fs).may_change_plan


def test_an_arrival_matters_to_a_stretch_only_if_it_changes_the_head_of_the_queue(drive):
    """Behind others it changes no decision. A rejection does: it belongs in the log of the step."""
    engine = drive(num_gpu_blocks=4, block_size=4)
    engine.add("A", 4, output_tokens=9)
    engine.commit(engine.plan())
    assert engine.plan().repeat == 8
    assert arrives(engine, "head", 8)
    assert not arrives(engine, "behind", 1)
    assert arrives(engine, "never", 100)


def test_with_priorities_it_matters_if_it_goes_to_the_front(drive):
    engine = drive(num_gpu_blocks=4, block_size=4, scheduling_policy="priority")
    engine.add("A", 4, output_tokens=9)
    engine.commit(engine.plan())
    engine.plan()
    assert arrives(engine, "head", 8, priority=5)
    assert not arrives(engine, "behind", 1, priority=6)
    assert arrives(engine, "new head", 8, priority=4)


def test_an_arrival_does_not_matter_while_the_batch_is_full(drive):
    engine = drive(num_gpu_blocks=4, block_size=4, max_num_seqs=1)
    engine.add("A", 4, output_tokens=9)
    engine.commit(engine.plan())
    engine.plan()
    assert not arrives(engine, "head", 1)


@pytest.mark.parametrize("done", [1, 2, 5, 8])
def test_the_tables_of_future_steps_are_the_ones_that_are_then_allocated(drive, done):
    """A stretch of 8 steps of three requests that need blocks in different steps, on fresh blocks first and freed ones after: what
    `scheduled(i)` shows before is what is there after i + 1 steps, and what the log says was given."""
    engine = drive(num_gpu_blocks=13, block_size=4)
    engine.add("gone", 12)
    engine.step()
    requests = [engine.add(name, length, output_tokens=9) for name, length in (("A", 4), ("B", 5), ("C", 7))]
    engine.step()
    plan = engine.plan()
    assert plan.repeat == 8
    future = [plan.scheduled(index) for index in range(8)]
    free = engine.pool.num_free
    assert [plan.scheduled(index) for index in range(8)] == future  # looking changes nothing
    assert engine.pool.num_free == free
    for index, step in enumerate(future):
        assert [share.context_tokens for share in step] == [4 + index, 5 + index, 7 + index]

    logged = len(engine.log) - 1  # the plan's first step is logged already
    engine.commit(plan, steps=done)
    if done < 8:
        assert [tuple(request.table.blocks) for request in requests] == [
            share.block_table for share in future[done - 1]
        ]
    assert len(engine.log) - logged == done
    tables = {request.request_id: [] for request in requests}
    for entry in engine.log[1:]:
        for request_id, _num_tokens, blocks in entry["scheduled"]:
            tables[request_id] += blocks
    assert tables == {share.request_id: list(share.block_table) for share in future[done - 1]}
