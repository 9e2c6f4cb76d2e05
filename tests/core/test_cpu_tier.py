"""The CPU prefix tier by hand: what is saved and loaded when, who holds what meanwhile, and the public bugs of asynchronous copies.

row, trace  test
B03         test_b03_a_load_is_not_begun_until_all_its_blocks_are_secured
B04, T10    test_b04_t10_the_block_after_the_prompt_is_counted_when_a_load_is_admitted
B23         test_b23_blocks_of_an_aborted_load_return_when_the_copy_is_done
"""

from __future__ import annotations

import pytest

from sim.core.config import ConfigError, EngineConfig
from sim.core.durations import Durations
from sim.core.engine import EngineCore
from sim.core.plan import OomReport, StepResult
from sim.core.policy import Batching, BatchLimits, Policy
from sim.core.request import Outcome, RequestSpec, State
from sim.core.tier import PrefixTier
from sim.costs.constant import FixedCost
from sim.results.summary import summarize
from sim.world import run_world
from tests.support.tiers import fill, named, pass_all, warm

SMALL = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_cpu_prefix_blocks": 10}


# -- saves ------------------------------------------------------------------------------------------------------------------------


def test_blocks_that_are_saved_return_when_the_copy_is_done(drive):
    """Pool of 4. Step 0: A gets 1 and 2, R gets 3. Step 1: A takes 4 for its second token, and 1 and 2 are being saved. A ends: 4 is
    free, 1 and 2 are quarantined. B needs two blocks and waits through steps 2 and 3; in step 3 R takes block 4. Then the copy is
    done, and B gets 2 and 1, in the order in which a release gives them back."""
    engine = drive(num_gpu_blocks=4, **SMALL)
    engine.add("A", 8, output_tokens=2, **named("xy"))
    engine.add("R", 2, output_tokens=6)
    assert engine.step().plan.saves == ()
    engine.add("B", 8)
    step = engine.step()
    assert step.plan.saves == ((-1, ((1, 1), (2, 2))),)
    assert step.tables == {"A": (1, 2, 4), "R": (3,)}
    assert (engine.pool.num_free, engine.pool.num_quarantined) == (1, 2)
    assert engine.step().tokens == {"R": 1}
    assert engine.step().tables == {"R": (3, 4)}
    assert (engine.pool.num_free, engine.pool.num_quarantined) == (0, 2)
    engine.core.pass_fence(-1, engine.now_fs)
    assert (engine.pool.num_free, engine.pool.num_quarantined, engine.pool.num_cached) == (2, 0, 2)
    assert engine.step().tables == {"R": (3, 4), "B": (2, 1)}


def test_write_through_saves_a_block_once_it_is_computed_and_only_once(drive):
    engine = drive(num_gpu_blocks=20, **SMALL)
    engine.add("A", 13, output_tokens=3, **named("xyz"))
    assert [plan.saves for plan in (engine.step().plan, engine.step().plan, engine.step().plan)] == [
        (),
        ((-1, ((1, 1), (2, 2), (3, 3))),),
        (),
    ]
    engine.core.pass_fence(-1, engine.now_fs)
    engine.add("B", 17, **named("xyzw"))
    engine.step()
    assert engine.plan().saves == ((-2, ((5, 4),)),)


def test_write_back_saves_what_is_next_to_be_evicted_and_leaves_it_in_place(drive):
    """Pool of 8: the next 2 blocks, which a step of 8 tokens takes, are kept saved. After A the queue is 5 to 8, which were never used,
    and then 4, 3, 2, 1. B takes 5 and 6, and then 7 and 8: now 4 and 3 are next. While they are saved B takes 2; they return to
    their places, before 1. N takes 4, and 1 is next but one."""
    engine = drive(num_gpu_blocks=8, **SMALL | {"max_num_batched_tokens": 8, "cpu_prefix_mode": "write_back"})
    engine.add("A", 16, **named("wxyz"))
    plans = [engine.step().plan for _ in range(2)]
    assert [plan.saves for plan in plans] == [(), ()]
    engine.add("B", 19, output_tokens=4)
    plans = [engine.step().plan for _ in range(3)]
    assert [plan.saves for plan in plans] == [(), ((-1, ((4, 1), (3, 2))),), ()]
    assert (engine.pool.num_free, engine.pool.num_quarantined) == (1, 2)
    engine.core.pass_fence(-1, engine.now_fs)
    assert engine.pool.peek(3) == [4, 3, 1]
    engine.add("N", 4)
    assert engine.step().plan.saves == ((-2, ((1, 3),)),)


def test_a_save_that_fails_leaves_nothing_in_the_tier(drive):
    engine = drive(num_gpu_blocks=20, **SMALL)
    engine.add("A", 9, output_tokens=3, **named("xy"))
    engine.step()
    engine.step()
    engine.core.pass_fence(-1, engine.now_fs, done=False)
    engine.run()
    fill(engine, 80)
    engine.add("A again", 9, **named("xy"))
    assert engine.step().tokens == {"A again": 9}


def test_what_a_step_that_failed_was_to_compute_is_not_saved(drive):
    """9 tokens in blocks 1 to 3 fail; 4, 4 and 1 tokens in blocks 4 to 6 do not: only 4 and 5 are ever saved."""
    engine = drive(num_gpu_blocks=20, **SMALL)
    engine.add("A", 9, **named("xy"))
    plan = engine.plan()
    failed = StepResult(durations=Durations.one(1), oom=OomReport(op="logits", requested_bytes=2, free_bytes=1))
    engine.core.commit(plan, failed, 1)
    engine.core.check()
    assert [engine.step().plan.saves for _ in range(3)] == [(), ((-1, ((4, 1),)),), ((-2, ((5, 2),)),)]


# -- loads ------------------------------------------------------------------------------------------------------------------------


def loading_engine(drive, **settings):
    """x and y are in the tier, and nowhere on the device; the pool has 4 blocks."""
    engine = drive(num_gpu_blocks=4, **SMALL | settings)
    warm(engine, "W", "xy")
    fill(engine, 16)
    assert engine.pool.num_free == 4
    return engine


def test_a_request_that_loads_takes_no_place_and_does_not_compute(drive):
    """A holds three blocks: for its 9 tokens, and for the token that follows. The one place is free for C, which came later."""
    engine = loading_engine(drive, max_num_seqs=1)
    a, c = engine.add("A", 9, **named("xy")), engine.add("C", 3)
    step = engine.step()
    ((request_id, fence, pairs),) = step.plan.loads
    assert (request_id, [cpu for cpu, _ in pairs]) == ("A", [1, 2])
    assert step.tokens == {"C": 3}
    assert (a.state, c.outcome) == (State.LOADING, Outcome.FINISHED)
    assert (engine.pool.num_owned, engine.core.num_running, engine.core.num_waiting) == (3, 0, 1)
    assert engine.plan() is None
    engine.core.pass_fence(fence, engine.now_fs)
    step = engine.step()
    assert step.tokens == {"A": 1}
    assert step.tables["A"][:2] == tuple(device for _, device in pairs)
    assert a.outcome is Outcome.FINISHED
    assert engine.core.cpu_hit_tokens == 8
    assert a.prefix_hit_tokens == 0


def test_a_loaded_request_waits_for_the_decodes_turn_to_end_and_no_longer(drive):
    """Turns of 5 steps. Step 0: C's prompt, and A begins to load. Steps 1 to 5 are the decodes'. The load ends after step 2, when nobody
    else waits: a stretch from step 3 on is 3 steps long, and A starts in step 6.
    """
    turns = Policy(batching=Batching.DECODE_FIRST, limits=BatchLimits(continuous_decode_steps=5))
    engine = drive(num_gpu_blocks=20, policy=turns, **SMALL)
    warm(engine, "W", "xy")
    engine.pool.drop_cached()
    a = engine.add("A", 9, **named("xy"))
    engine.add("C", 3, 20)
    begins = engine.step()
    first = begins.plan.step
    for _ in range(2):
        assert engine.step().tokens == {"C": 1}
    pass_all(engine, begins.plan)
    plan = engine.plan()
    assert (plan.step - first, plan.repeat) == (3, 3)
    engine.commit(plan)
    assert engine.step().tokens == {"A": 1}
    assert a.outcome is Outcome.FINISHED


def test_what_is_loaded_is_shared_only_when_it_is_there(drive):
    """B has the same prefix. It waits for A's load, and then finds x and y on the device: they are not loaded twice."""
    engine = loading_engine(drive)
    engine.add("A", 9, output_tokens=2, **named("xy"))
    b = engine.add("B", 9, **named("xy"))
    plan = engine.step().plan
    assert [load[0] for load in plan.loads] == ["A"]
    assert engine.plan() is None
    pass_all(engine, plan)
    step = engine.step()
    assert step.plan.loads == ()
    assert step.tokens == {"A": 1, "B": 1}
    assert step.tables["A"][:2] == step.tables["B"][:2]
    assert b.prefix_hit_tokens == 8


def test_a_prefix_that_is_partly_on_the_device_is_loaded_from_where_it_ends(drive):
    """y's block is taken by somebody who needs one block; x is still there."""
    engine = drive(num_gpu_blocks=4, **SMALL)
    warm(engine, "W", "xy")
    fill(engine, 12)  # 4, 3 and 2: the queue is 4 (never used), 3, 2, 1
    a = engine.add("A", 9, **named("xy"))
    plan = engine.step().plan
    assert [(load[0], load[2][0][0]) for load in plan.loads] == [("A", 2)]
    assert a.table.blocks[0] == 1
    pass_all(engine, plan)
    assert engine.step().tokens == {"A": 1}
    assert (a.prefix_hit_tokens, engine.core.cpu_hit_tokens) == (4, 4)


def test_a_load_that_fails_is_computed_instead(drive):
    engine = loading_engine(drive)
    a = engine.add("A", 9, **named("xy"))
    plan = engine.step().plan
    engine.core.pass_fence(plan.loads[0][1], engine.now_fs, done=False)
    step = engine.step()
    assert (step.tokens, step.plan.loads) == ({"A": 9}, ())
    assert a.outcome is Outcome.FINISHED
    assert engine.core.cpu_hit_tokens == 0


def test_a_prompt_is_computed_in_pieces_after_a_load_as_after_a_hit(drive):
    """29 tokens, 8 loaded, a budget of 8 a step: 21 are left; the blocks beyond the first piece are given back until they are needed."""
    engine = drive(num_gpu_blocks=8, **SMALL | {"max_num_batched_tokens": 8})
    warm(engine, "W", "xy")
    fill(engine, 32)
    engine.add("A", 29, **named("xy"))
    plan = engine.step().plan
    assert engine.pool.num_owned == 8
    pass_all(engine, plan)
    step = engine.step()
    assert (step.tokens, len(step.tables["A"]), engine.pool.num_owned) == ({"A": 8}, 4, 4)
    assert [engine.step().tokens["A"] for _ in range(2)] == [8, 5]


def test_b03_a_load_is_not_begun_until_all_its_blocks_are_secured(drive):
    """vLLM #45388: 2048 blocks; A has 25,596 tokens of which 8,192 are loaded, B 19,196 and 11,776. Holding only what they load (512
    and 736 blocks) both would wait for ever for the rest. Here A secures its 1,600 blocks; B is not loaded beside it (1,200 > 448)."""
    engine = drive(num_gpu_blocks=2048, block_size=16, max_num_batched_tokens=40_000, num_cpu_prefix_blocks=4096)
    warm(engine, "WA", "a", 8192)
    warm(engine, "WB", "b", 11_776)
    fill(engine, 2048 * 16)
    a, b = engine.add("A", 25_596, **named("a", 8192)), engine.add("B", 19_196, **named("b", 11_776))
    first = engine.step().plan
    assert [(load[0], len(load[2])) for load in first.loads] == [("A", 512)]
    assert engine.pool.num_owned == 1600
    assert engine.plan() is None
    pass_all(engine, first)
    step = engine.step()
    assert step.tokens == {"A": 25_596 - 8192}
    assert a.outcome is Outcome.FINISHED
    second = engine.step().plan
    assert [(load[0], len(load[2])) for load in second.loads] == [("B", 736)]
    pass_all(engine, second)
    assert engine.step().tokens == {"B": 19_196 - 11_776}
    assert b.outcome is Outcome.FINISHED


def test_b04_t10_the_block_after_the_prompt_is_counted_when_a_load_is_admitted(drive):
    """vLLM #57104: 7 blocks of 16; A's prompt has 4 (and one for what follows), B's 3. Loaded together they would fill the pool, and
    A's next block would not be there. A is admitted with 5; B waits, and both finish without a preemption."""
    engine = drive(num_gpu_blocks=7, block_size=16, max_num_batched_tokens=128, num_cpu_prefix_blocks=20)
    warm(engine, "WA", "abc", 16)
    warm(engine, "WB", "de", 16)
    fill(engine, 7 * 16)
    a = engine.add("A", 64, output_tokens=3, **named("abc", 16))
    b = engine.add("B", 48, output_tokens=3, **named("de", 16))
    plan = engine.step().plan
    assert [load[0] for load in plan.loads] == ["A"]
    assert (engine.pool.num_owned, engine.pool.num_free) == (5, 2)
    while engine.core.num_unfinished:
        pass_all(engine, plan)
        plan = engine.step().plan
    assert [request.request_id for request in engine.ended[-2:]] == ["A", "B"]
    assert (a.num_preemptions, b.num_preemptions) == (0, 0)


def test_b23_blocks_of_an_aborted_load_return_when_the_copy_is_done(drive):
    """vLLM #32255: A loads into blocks and its client leaves. B gets none of them before the copy is done."""
    engine = loading_engine(drive)
    a = engine.add("A", 9, **named("xy"))
    plan = engine.step().plan
    targets = {device for _, device in plan.loads[0][2]}
    assert engine.abort("A")
    assert a.outcome is Outcome.ABORTED
    assert (engine.pool.num_free, engine.pool.num_quarantined, engine.pool.num_owned) == (1, 3, 0)
    engine.add("B", 1, output_tokens=4)
    assert not targets & set(engine.step().tables["B"])
    engine.add("C", 9)
    assert engine.step().tokens == {"B": 1}  # C must wait
    pass_all(engine, plan)
    assert engine.step().tokens == {"B": 1, "C": 9}


def test_a_client_that_leaves_while_a_step_is_out_leaves_its_load_at_the_end_of_it(drive):
    engine = loading_engine(drive)
    engine.add("R", 2, output_tokens=5)
    a = engine.add("A", 9, **named("xy"))
    plan = engine.plan(max_repeat=1)
    assert [load[0] for load in plan.loads] == ["A"]
    engine.core.abort("A", engine.now_fs)
    assert engine.pool.num_quarantined == 0
    engine.commit(plan)
    assert (a.outcome, engine.pool.num_quarantined) == (Outcome.ABORTED, 3)
    pass_all(engine, plan)
    assert engine.pool.num_quarantined == 0


def test_a_fence_that_passes_while_a_step_is_out_counts_at_the_end_of_it(drive):
    engine = loading_engine(drive)
    engine.add("R", 2, output_tokens=5)
    a = engine.add("A", 9, **named("xy"))
    plan = engine.plan(max_repeat=1)
    engine.core.pass_fence(plan.loads[0][1], engine.now_fs)
    assert a.num_computed_tokens == 0
    engine.commit(plan)
    assert a.num_computed_tokens == 8
    with pytest.raises(KeyError, match="no copy under way has it"):
        engine.core.pass_fence(plan.loads[0][1], engine.now_fs)


def test_nobody_gives_way_for_blocks_that_are_only_being_saved(drive):
    """vLLM #49675. Pool of 6. Step 0: A gets 1 to 4 and ends, R gets 5, N 6. Step 1: R gets 4 and N 3; of 1 and 2, which are free, one
    may be saved at a time: 1. In step 5 both need a block: R gets 2, and N waits for 1, rather than give up what it has."""
    engine = drive(num_gpu_blocks=6, **SMALL)
    engine.add("A", 13, **named("xyz"))
    engine.add("R", 4, output_tokens=9)
    n = engine.add("N", 4, output_tokens=9)
    engine.step()
    assert engine.step().plan.saves == ((-1, ((1, 1),)),)
    assert [engine.step().tokens for _ in range(3)] == [{"R": 1, "N": 1}] * 3
    assert [engine.step().tokens for _ in range(2)] == [{"R": 1}] * 2
    engine.core.pass_fence(-1, engine.now_fs)
    step = engine.step()
    assert step.tables == {"R": (5, 4, 2), "N": (6, 3, 1)}
    engine.run()
    assert (n.outcome, n.num_preemptions) == (Outcome.FINISHED, 0)


# -- the tier's own books -----------------------------------------------------------------------------------------------------------


def test_the_tier_forgets_what_was_used_longest_ago_and_never_what_a_copy_uses():
    tier = PrefixTier(2)
    a, b = tier.begin_saves([10, 11, 12])  # then both are being written
    tier.end_save([a], done=True)
    tier.end_save([b], done=True)
    tier.begin_load([a])
    assert [block.block_id for block in tier.begin_saves([12])] == [b.block_id]
    assert 11 not in tier
    tier.check()


def test_a_dropped_block_is_free_when_its_last_copy_is_done():
    tier = PrefixTier(1)
    (block,) = tier.begin_saves([10])
    tier.end_save([block], done=True)
    tier.begin_load([block])
    tier.begin_load([block])
    tier.end_load([block], done=False)
    assert 10 not in tier
    assert tier.begin_saves([11]) == []
    tier.end_load([block], done=True)
    tier.check()
    assert [block.block_id for block in tier.begin_saves([11])] == [1]


def test_of_one_prefix_the_tail_is_forgotten_before_the_head():
    tier = PrefixTier(3)
    blocks = tier.begin_saves([1, 2, 3])
    tier.end_save(blocks, done=True)
    tier.begin_saves([9])
    assert [key in tier for key in (1, 2, 3)] == [True, True, False]


# -- settings, and what is reported ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"enable_prefix_caching": False}, "without prefix caching no block is ever looked for again"),
        ({"cpu_prefix_mode": "write_around"}, "known are write_through"),
        ({"num_cpu_prefix_blocks": -1}, "at least 0"),
    ],
)
def test_a_tier_that_could_never_be_used_is_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        EngineConfig(**{"num_gpu_blocks": 100, "num_cpu_prefix_blocks": 10} | settings)


def test_an_engine_without_a_tier_knows_no_fence():
    core = EngineCore(EngineConfig(num_gpu_blocks=10), policy=Policy())
    with pytest.raises(KeyError, match="fence 1 has passed"):
        core.pass_fence(1, 0)


def test_a_copy_takes_the_time_of_its_blocks_and_what_it_brings_need_not_be_computed():
    """Prompts of 4 blocks of 4 and one token; a step takes 1 s and 1 s a token, a copied block 0.25 s. A is served in [0, 18]; F takes
    the whole pool in [18, 51]; B arrives at 51 with A's prompt: 4 blocks are loaded in 1 s, and one token is computed in 2 s."""
    config = EngineConfig(
        num_gpu_blocks=8,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=64,
        num_cpu_prefix_blocks=8,
    )
    requests = [
        RequestSpec(request_id="A", arrival_s=0.0, input_tokens=17, output_tokens=1, **named("wxyz")),
        RequestSpec(request_id="F", arrival_s=40.0, input_tokens=32, output_tokens=1),
        RequestSpec(request_id="B", arrival_s=80.0, input_tokens=17, output_tokens=1, **named("wxyz")),
    ]
    record = run_world(config, FixedCost(1.0, per_token_s=1.0, per_copied_block_s=0.25), requests, check=True)
    summary = summarize(record, scenario={}, seed=0, version="")
    assert [request.ended_fs / 1e15 for request in record.requests] == [18.0, 73.0, 83.0]
    assert (summary["saved_blocks"], summary["loaded_blocks"], summary["failed_copies"]) == (4, 4, 0)
    assert summary["prefix_hit_rate"] == 0.0
    assert summary["cpu_prefix_hit_rate"] == 16 / (17 + 32 + 17)
