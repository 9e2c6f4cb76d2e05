"""Samples and beams where steps are planned ahead: what forks by what a step samples rests until that is known."""

import pytest

import sim
from sim.core.clock import FS_PER_S
from sim.core.durations import Durations
from sim.core.forking import Forking
from sim.core.plan import StepResult
from sim.core.request import Outcome, RequestSpec, samples

WINDOWS = {"num_gpu_blocks": 40, "block_size": 4}


def add(world, name, width, change, input_tokens=8, output_tokens=4, seed=0):
    spec = RequestSpec(
        request_id=name,
        arrival_s=world.now_fs / FS_PER_S,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        max_tokens=output_tokens,
        n=width,
        forking=Forking(width=width, change=change, seed=seed),
    )
    return [world.core.add(sample, world.now_fs).request for sample in samples(spec)]


def tokens(world, limit=40):
    return [step.tokens for step in world.run(limit)]


def step(world, forked=None):
    """One step, of which a sampler says which sequences go on as copies of which."""
    plan = world.plan(max_repeat=1)
    scheduled = [share.request_id for share in plan.scheduled(0)]
    world.now_fs += FS_PER_S
    world.core.commit(plan, StepResult(durations=Durations.one(FS_PER_S), forked=forked), world.now_fs)
    world.core.check()
    return scheduled


def test_forked_samples_are_planned_ahead_like_anybody(drive):
    """The prompt in the first step; then both samples a token a step, and nothing is computed in vain."""
    world = drive(40, 4, async_scheduling=True)
    add(world, "s", 2, 0.0)
    world.add("other", 4, 3, max_tokens=3)
    assert tokens(world) == [
        {"s#0": 8, "other": 4},
        {"s#0": 1, "other": 1, "s#1": 1},
        {"s#0": 1, "other": 1, "s#1": 1},
        {"s#0": 1, "s#1": 1},
    ]
    assert world.core.discarded_tokens == 0
    assert world.pool.num_owned == 0


def test_beams_rest_in_the_step_that_is_planned_before_it_is_known_who_goes_on(drive):
    """Others get a token in every step, the beams in every second one; when the others are done, in every step again."""
    world = drive(40, 4, async_scheduling=True)
    add(world, "b", 2, 0.5)
    world.add("other", 4, 5, max_tokens=5)
    steps = tokens(world)
    assert steps == [
        {"b#0": 8, "other": 4},
        {"other": 1},
        {"b#0": 1, "other": 1, "b#1": 1},
        {"other": 1},
        {"b#0": 1, "other": 1, "b#1": 1},
        {"b#0": 1, "b#1": 1},
    ]
    assert world.pool.num_owned == 0


@pytest.mark.parametrize("change", [0.1, 0.5, 0.9])
def test_beams_alone_are_decided_as_without_planning_ahead(drive, change):
    """Nothing can be planned while they wait for their outcome: the engine waits for the step, and then knows all."""
    logs = []
    for ahead in (False, True):
        world = drive(40, 4, async_scheduling=ahead)
        add(world, "b", 3, change, output_tokens=15, seed=3)
        world.run(60)
        world.close()
        logs.append(world.log)
    without, ahead = logs
    assert any(entry["released"] for entry in without[1:-1])  # beams were replaced
    assert [shape(entry) for entry in ahead] == [shape(entry) for entry in without]


def shape(entry):
    """A step without the names of its blocks: sequences outside the decode set are given theirs in another order."""
    rows = [(name, tokens, len(blocks)) for name, tokens, blocks in entry["scheduled"]]
    released = [(name, len(blocks)) for name, blocks in entry["released"]]
    return rows, len(entry["copied"]), released, entry["admitted"], entry["preempted"]


def test_what_a_sampler_chose_is_done_one_step_later(drive):
    """In step 2 the sampler lets the second beam go on as a copy of the first. Step 3 is planned without knowing that; then the second
    beam's own block is free, and the copy is written into a block of its own.
    """
    world = drive(40, 4, async_scheduling=True)
    first, second = add(world, "b", 2, 0.5, output_tokens=6)
    world.add("other", 4, 9, max_tokens=9)
    assert step(world, {}) == ["b#0", "other"]
    assert step(world, {}) == ["other"]
    assert first.table.blocks == second.table.blocks
    assert step(world, {"b#1": "b#0"}) == ["b#0", "other", "b#1"]
    own = [request.table.blocks[-1] for request in (first, second)]
    assert own[0] != own[1]
    assert step(world, {}) == ["other"]
    assert second.table.blocks == first.table.blocks
    assert world.pool.ref_cnt(own[1]) == 0
    assert step(world, {}) == ["b#0", "other", "b#1"]
    assert second.table.blocks[:2] == first.table.blocks[:2]
    assert second.table.blocks[2] != first.table.blocks[2]


def test_a_choice_is_dropped_if_its_source_has_left_since(drive):
    world = drive(40, 4, async_scheduling=True)
    first, second = add(world, "b", 2, 0.5, output_tokens=6)
    world.add("other", 4, 9, max_tokens=9)
    step(world, {})
    step(world, {})
    step(world, {"b#1": "b#0"})
    plan = world.plan(max_repeat=1)
    world.abort("b#0")
    world.commit(plan)
    blocks = list(second.table.blocks)
    world.run()
    assert (first.outcome, second.outcome) == (Outcome.ABORTED, Outcome.FINISHED)
    assert second.num_output_tokens == 6
    assert len(blocks) == 3


@pytest.mark.parametrize("when", ["at once", "in the first step", "between", "later"])
def test_when_the_client_leaves_all_sequences_leave(drive, when):
    world = drive(40, 4, async_scheduling=True)
    world.add("other", 4, 9, max_tokens=9)
    world.step()
    made = []
    plan = world.plan(max_repeat=1)
    made = add(world, "b", 3, 0.5)
    if when == "at once":
        assert world.abort("b")
    world.commit(plan)
    if when == "in the first step":
        plan = world.plan(max_repeat=1)
        assert world.abort("b")
        world.commit(plan)
    world.step()
    if when == "between":
        world.abort("b")
    world.step()
    if when == "later":
        world.abort("b")
    world.run()
    assert {request.outcome for request in made} == {Outcome.ABORTED}
    assert world.core.num_unfinished == 0
    assert world.core.num_waiting == 0
    assert world.pool.num_owned == 0


@pytest.mark.parametrize("samples_as", [{"n": 3}, {"n": 3, "fork_samples": True}, {"beam_width": 3}])
def test_a_scenario_with_samples_or_beams_runs_with_async_scheduling(samples_as):
    scenario = sim.Scenario(
        model="llama-3.1-8b",
        gpu="h100-sxm-80gb",
        engine={"num_gpu_blocks_override": 200, "max_model_len": 512, "max_num_seqs": 16},
        workload={
            "workload": "uniform",
            "rate": 50.0,
            "num_requests": 20,
            "input_tokens": [10, 90],
            "output_tokens": [1, 30],
        },
    )
    ahead, without = (
        sim.simulate(scenario, async_scheduling=on, check=True, **samples_as).summary for on in (True, False)
    )
    assert ahead["finished"] == without["finished"] == 60
    assert ahead["output_tokens"] == without["output_tokens"]
    assert ahead["discarded_tokens"] == 0
