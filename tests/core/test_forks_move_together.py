"""The sequences of a request give way, are paused, swapped and brought back together; what they share is saved once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.clock import FS_PER_S
from sim.core.config import AttentionGroup, EngineConfig
from sim.core.draft import Draft
from sim.core.forking import Forking
from sim.core.policy import Policy
from sim.core.preemption import worst_priority
from sim.core.request import Outcome, RequestSpec, samples
from sim.core.rungs import LadderConfig, Rung
from sim.costs.constant import FixedCost
from sim.world import run_world


def add(world, name, width, input_tokens=10, output_tokens=12, change=0.0, **fields):
    spec = RequestSpec(
        request_id=name,
        arrival_s=world.now_fs / FS_PER_S,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        n=width,
        forking=Forking(width=width, change=change),
        **fields,
    )
    return [world.core.add(sample, world.now_fs).request for sample in samples(spec)]


def moved(world, what):
    return [entry[what] for entry in world.log if entry[what]]


def swapping(drive, **settings):
    """Blocks of 4 tokens, 11 of them. `old` holds 3 for its 10 tokens, and one more every 4 steps; the two samples of a prompt of 10 share
    2 full blocks, and each has the others for itself.
    """
    world = drive(11, 4, policy=Policy(swap=True), num_cpu_blocks=20, **settings)
    world.add("old", 10, 24)
    pair = add(world, "s", 2, output_tokens=14)
    return world, pair


def test_two_samples_on_paper_give_way_and_come_back_in_one_step(drive):
    """After 7 steps each has 16 tokens: 4 blocks of old, 2 that the pair shares, 2 of each: 10 of 11. In the next each needs one. The last
    admitted gives way, and with it its sibling, of which alone 2 blocks would have come back. 4 + 2 blocks are saved.
    """
    world, pair = swapping(drive)
    for _ in range(7):
        world.step()
    assert [len(request.table.blocks) for request in pair] == [4, 4]
    assert pair[0].table.blocks[:2] == pair[1].table.blocks[:2]
    assert pair[0].table.blocks[2:] != pair[1].table.blocks[2:]
    assert (world.core.num_running, world.pool.num_owned) == (3, 10)
    assert world.step().tokens == {"old": 1}
    (saved,) = moved(world, "swapped_out")
    assert [(name, len(pairs)) for name, pairs in saved] == [("s#0", 4), ("s#1", 2)]
    assert moved(world, "preempted") == [["s#1", "s#0"]]
    assert world.core._scheduler.swapping.cpu_pool.num_owned == 6
    assert world.pool.num_owned == 5
    steps = world.run()
    (back,) = moved(world, "swapped_in")
    assert [(name, len(pairs)) for name, pairs in back] == [("s#0", 4), ("s#1", 2)]
    first = next(step for step in steps if "s#0" in step.tokens)
    assert {"s#0", "s#1"} <= first.tokens.keys()
    assert first.tables["s#0"][:2] == first.tables["s#1"][:2]
    assert not set(first.tables["s#0"][2:]) & set(first.tables["s#1"][2:])
    assert [request.num_preemptions for request in pair] == [1, 1]
    assert [request.recomputed_tokens for request in pair] == [0, 0]
    assert world.core._scheduler.swapping.cpu_pool.num_owned == world.pool.num_owned == 0


def test_a_block_that_is_not_full_is_saved_for_each_and_comes_back_without_a_copy(drive):
    """Right after the fork both hold the same three blocks, the last with 2 tokens in it. Saved in that moment it is saved twice, and each
    comes back with one of its own: a copy on write would read what has not arrived.
    """
    world, pair = swapping(drive)
    world.step()
    assert pair[0].table.blocks == pair[1].table.blocks
    scheduler = world.core._scheduler
    relief = Draft(budget=0)
    scheduler.shortage.give_way(scheduler.families.moving_with(pair[1]), relief, world.now_fs)
    assert [(name, len(pairs)) for name, pairs in relief.swap_outs] == [("s#0", 3), ("s#1", 1)]
    world.core._note(relief, world.now_fs)
    step = world.step()
    assert step.tokens == {"old": 1, "s#0": 1, "s#1": 1}
    assert not step.plan.copies
    assert step.tables["s#0"][:2] == step.tables["s#1"][:2]
    assert step.tables["s#0"][2] != step.tables["s#1"][2]
    world.run()
    assert world.pool.num_owned == 0


def test_who_was_to_get_a_copy_in_the_step_in_which_it_is_swapped_is_saved_from_where_its_tokens_are(drive):
    """7 blocks: 3 of old, 3 that three samples share right after the fork, the last with 2 tokens in it. To write on, s#0 is to get a
    copy in the last free block; s#1 finds none, and all three give way. Nothing has been copied, so each is saved from what they share.
    """
    world = drive(7, 4, policy=Policy(swap=True), num_cpu_blocks=20)
    world.add("old", 10, 14)
    first, *_ = add(world, "s", 3, output_tokens=14)
    world.step()
    shared = list(first.table.blocks)
    step = world.step()
    assert step.tokens == {"old": 1}
    assert step.plan.copies == ()
    (saved,) = moved(world, "swapped_out")
    assert [(name, [block for block, _ in pairs]) for name, pairs in saved] == [
        ("s#0", shared),
        ("s#1", shared[2:]),
        ("s#2", shared[2:]),
    ]
    world.run()
    assert world.core._scheduler.swapping.cpu_pool.num_owned == world.pool.num_owned == 0


def test_what_a_sequence_left_for_its_copies_stays_findable_when_it_ends(drive):
    """Two samples of a prompt of 4 tokens, both preempted at 10 tokens: two full blocks of each, of which the second is s#0's own. s#1
    goes on as a copy of s#0 while it waits. When s#0's client leaves, s#1 still finds what it is a copy of.
    """
    world = drive(20, 4, max_num_seqs=4)
    first, second = add(world, "s", 2, input_tokens=4, output_tokens=14, change=0.5)
    for _ in range(7):
        world.step()
    scheduler, relief = world.core._scheduler, Draft(budget=0)
    scheduler.shortage.give_way([first, second], relief, world.now_fs)
    world.core._note(relief, world.now_fs)
    second.keys.follow(first.keys, 2)
    findable = scheduler.holdings.find(first)
    assert len(findable) == 2
    assert scheduler.holdings.find(second) == findable
    world.abort("s#0")
    assert scheduler.holdings.find(second) == findable
    world.abort("s#1")
    assert [block in scheduler.pool.index for block in findable] == [
        True,
        False,
    ]  # the prompt's, which others may share


def test_what_is_left_of_a_swapped_pair_comes_back_whole_when_the_other_client_leaves(drive):
    world, pair = swapping(drive)
    for _ in range(8):
        world.step()
    assert world.abort("s#0")
    assert world.core._scheduler.swapping.cpu_pool.num_owned == 4
    world.run()
    back = moved(world, "swapped_in")[0]
    assert [(name, len(pairs)) for name, pairs in back] == [("s#1", 4)]
    assert pair[1].outcome is Outcome.FINISHED
    assert world.core._scheduler.swapping.cpu_pool.num_owned == 0


def test_to_be_computed_again_they_share_again_what_they_shared(drive):
    """Without a CPU pool: both go back to the queue in their order, and what is computed once is found by the other."""
    world = drive(11, 4)
    world.add("old", 10, 24)
    pair = add(world, "s", 2, output_tokens=14)
    steps = world.run()
    assert moved(world, "preempted")[0] == ["s#1", "s#0"]
    again = next(step for step in steps[8:] if "s#0" in step.tokens)
    assert {"s#0", "s#1"} <= again.tokens.keys()
    assert again.tables["s#0"][:2] == again.tables["s#1"][:2]
    assert [request.outcome for request in pair] == [Outcome.FINISHED] * 2
    assert world.pool.num_owned == 0


def test_beams_stay_in_step_when_they_were_swapped(drive):
    """All beams have as many tokens as each other after every step, before and after they were away."""
    world = drive(14, 4, policy=Policy(swap=True), num_cpu_blocks=40)
    world.add("old", 12, 26)
    beams = add(world, "b", 3, output_tokens=18, change=0.3)
    decode = world.core._scheduler.decode
    away = 0
    while (step := world.step()) is not None:
        alive = [beam for beam in beams if beam.ended_fs is None]
        away += all(beam.num_preemptions for beam in alive) and not step.tokens.keys() - {"old"}
        assert len({decode.known(beam) for beam in alive}) <= 1
        assert len({beam.state for beam in alive}) <= 1
    assert away
    assert all(beam.num_output_tokens == 18 for beam in beams)


@pytest.mark.parametrize("num_cpu_blocks", [0, 20])
def test_alone_they_give_way_one_by_one_and_all_finish(drive, num_cpu_blocks):
    """Three samples that together outgrow the pool, and nobody else: one waits until the others are done (vLLM V0 failed them all)."""
    world = drive(8, 4, policy=Policy(swap=num_cpu_blocks > 0), num_cpu_blocks=num_cpu_blocks)
    trio = add(world, "s", 3, input_tokens=8, output_tokens=16)
    steps = world.run()
    assert moved(world, "preempted")[0] == ["s#2"]
    assert any(len(step.tokens) == 2 for step in steps)
    assert [request.outcome for request in trio] == [Outcome.FINISHED] * 3
    assert all(request.num_output_tokens == 16 for request in trio)


@pytest.mark.parametrize("action", ["pause", "swap_out"])
def test_the_ladder_pauses_them_together_and_says_so_of_each(drive, action):
    rung = Rung(action=action, on=0.5, off=0.1, value=0.4, hold_s=0.0)
    policy = Policy(swap=True, victim=worst_priority, ladder=LadderConfig(rungs=(rung,)))
    world = drive(12, 4, policy=policy, num_cpu_blocks=20)
    world.add("important", 12, 8, priority=0)
    pair = add(world, "s", 2, priority=1)
    while not moved(world, "preempted"):
        world.step()
    assert moved(world, "preempted") == [["s#1", "s#0"]]
    assert all(action in request.degraded for request in pair)
    world.run()
    assert [request.outcome for request in pair] == [Outcome.FINISHED] * 2


@st.composite
def loads(draw):
    made = []
    for number in range(draw(st.integers(1, 6))):
        width, output_tokens = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 24))
        forking = Forking(width=width, change=draw(st.sampled_from([0.0, 0.1, 0.5])), seed=number)
        made.append(
            RequestSpec(
                request_id=f"r{number}",
                arrival_s=number * draw(st.sampled_from([0.0, 0.01, 0.1])),
                input_tokens=draw(st.integers(1, 24)),
                output_tokens=output_tokens,
                n=width,
                forking=forking if width > 1 else None,
                cancel_after_s=draw(st.sampled_from([None, None, 0.1])),
            )
        )
    return made


@st.composite
def engines(draw):
    kinds = draw(st.sampled_from([(), (), ((4, None), (4, 9))]))
    return EngineConfig(
        num_gpu_blocks=draw(st.integers(14, 30)) * (2 if kinds else 1),
        block_size=4,
        max_model_len=48,
        max_num_seqs=draw(st.sampled_from([4, 8])),
        max_num_batched_tokens=32,
        enable_prefix_caching=draw(st.booleans()),
        num_cpu_blocks=draw(st.sampled_from([6, 40, 200])),
        kv_groups=tuple(AttentionGroup(block_size=size, window=window) for size, window in kinds),
    )


@settings(max_examples=120)
@given(engines(), loads())
def test_with_room_for_them_sequences_of_a_request_are_away_together_or_not_at_all(config, requests):
    """Whoever is preempted while strangers run takes all running sequences of its request along; books are checked after every event."""
    log = []
    record = run_world(
        config, FixedCost(0.01), requests, policy=Policy(swap=True), check=True, stepping=True, decision_log=log.append
    )
    assert all(request.outcome is not None for request in record.requests)
    running = set()
    for entry in log:
        gone = set(entry["preempted"])
        for name in gone:
            family = {each for each in running if each.split("#")[0] == name.split("#")[0]}
            if family != running:
                assert family <= gone
        running = {name for name, *_ in entry["scheduled"]}
    assert record.recorders[0].core._scheduler.swapping.cpu_pool.num_owned == 0
