"""The CPU prefix tier of models whose layers slide: what is loaded when a window, or every group, must have what it needs.

Blocks hold 4 tokens. A window of W tokens needs, of a prefix of T tokens, blocks from `(T - W + 1) // 4` on (engine-policies §1.1.7).
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.config import AttentionGroup, EngineConfig
from sim.core.request import Outcome, RequestSpec, State
from tests.support.leaping import at
from tests.support.roomy import TICK_S
from tests.support.tiers import (
    Copies,
    assert_nobody_is_lost,
    conversations,
    copies,
    finish,
    named,
    pass_all,
    scenario_of,
    warm,
)

SMALL = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_cpu_prefix_blocks": 40}
FULL, SLIDING = AttentionGroup(block_size=4), AttentionGroup(block_size=4, window=8)


def warm_engine(drive, names: str = "wxyz", blocks: int = 20, **settings):
    """A prompt of these names has been served and saved, and is nowhere on the device."""
    engine = drive(num_gpu_blocks=blocks, **SMALL | settings)
    warm(engine, "W", names)
    engine.core.pool.drop_cached()
    return engine


def test_a_window_loads_the_last_blocks_that_it_covers(drive):
    """16 tokens are cached, and a window of 8 sees those from 9 on: blocks 2 and 3 of "wxyz" are loaded, w and x are not. The table has
    NO_BLOCK for them, and a fifth block for the 17th token and those that follow."""
    engine = warm_engine(drive, sliding_window=8)
    a = engine.add("A", 17, output_tokens=3, **named("wxyz"))
    plan = engine.step().plan
    ((_, _, pairs),) = plan.loads
    assert len(pairs) == 2
    assert a.state is State.LOADING
    assert a.table.blocks[:2] == [0, 0]
    assert a.table.blocks[2:4] == [device for _, device in pairs]
    assert engine.pool.num_owned == 3
    pass_all(engine, plan)
    step = engine.step()
    assert step.tokens == {"A": 1}
    assert (a.prefix_hit_tokens, engine.core.cpu_hit_tokens) == (0, 16)


def test_a_window_takes_what_the_device_still_has_from_there(drive):
    """z is on the device, w, x and y are not: y is loaded, from the tier, and z is taken where it is."""
    engine = drive(num_gpu_blocks=20, **SMALL | {"sliding_window": 8})
    engine.add("W", 17, **named("wxyz"))
    finish(engine)
    blocks = [engine.pool.find([key])[0] for key in engine.core.tables.keys(_keys(engine, "wxyz"))]
    engine.pool.forget(blocks[:3])
    a = engine.add("A", 17, **named("wxyz"))
    plan = engine.step().plan
    assert [len(pairs) for _, _, pairs in plan.loads] == [1]
    assert a.table.blocks[3] == blocks[3]
    pass_all(engine, plan)
    assert engine.step().tokens == {"A": 1}


def _keys(engine, names: str) -> list[int]:
    request = engine.add("probe", 4 * len(names) + 1, **named(names))
    keys = request.keys.keys(0, len(names))
    engine.abort("probe")
    return keys


def test_a_hit_is_what_every_group_has(drive):
    """Two groups, one of which sees 8 tokens. Of 16 tokens the first needs 4 blocks and the second 2: six are loaded, not eight."""
    engine = warm_engine(drive, kv_groups=(FULL, SLIDING))
    a = engine.add("A", 17, **named("wxyz"))
    plan = engine.step().plan
    assert [len(pairs) for _, _, pairs in plan.loads] == [6]
    assert [table.blocks.count(0) for table in a.table.groups] == [0, 2]
    pass_all(engine, plan)
    assert engine.step().tokens == {"A": 1}
    assert engine.core.cpu_hit_tokens == 16


def test_a_group_that_lacks_one_block_shortens_the_hit_of_all(drive):
    """The window's last block, of z, is not in the tier: 12 tokens can be had, with 3 blocks of the first group and 2 of the other."""
    engine = warm_engine(drive, kv_groups=(FULL, SLIDING))
    last = engine.core.tables.keys(_keys(engine, "wxyz"))[7]
    engine.core.offload.tier.forget([last])
    a = engine.add("A", 17, **named("wxyz"))
    plan = engine.step().plan
    assert [len(pairs) for _, _, pairs in plan.loads] == [5]
    pass_all(engine, plan)
    assert engine.step().tokens == {"A": 5}
    assert (a.outcome, engine.core.cpu_hit_tokens) == (Outcome.FINISHED, 12)


def test_a_window_without_its_last_blocks_hits_nothing(drive):
    """Only w is in the tier: of a prefix of 4 tokens a window of 8 needs it alone. Only z is: there is no prefix that needs it alone."""
    for kept, loaded in ((0, 4), (3, 0)):
        engine = warm_engine(drive, sliding_window=8)
        keys = _keys(engine, "wxyz")
        engine.core.offload.tier.forget(key for index, key in enumerate(keys) if index != kept)
        engine.add("A", 17, **named("wxyz"))
        finish(engine)
        assert engine.core.cpu_hit_tokens == loaded


def test_groups_of_unequal_blocks_are_loaded_in_whole_blocks_of_all(drive):
    """Blocks of 4 and of 8 tokens; 20 tokens are named, 16 of which are whole blocks of both: 4 and 2 are loaded."""
    engine = warm_engine(drive, "vwxyz", kv_groups=(FULL, AttentionGroup(block_size=8)))
    engine.add("A", 21, **named("vwxyz"))
    plan = engine.step().plan
    assert [len(pairs) for _, _, pairs in plan.loads] == [6]
    pass_all(engine, plan)
    assert engine.step().tokens == {"A": 5}


@pytest.mark.parametrize("settings", [{}, {"sliding_window": 8}, {"kv_groups": (FULL, SLIDING)}])
def test_a_load_that_fails_is_computed_with_blocks_of_its_own(drive, settings):
    engine = warm_engine(drive, **settings)
    a = engine.add("A", 17, output_tokens=2, **named("wxyz"))
    plan = engine.step().plan
    owned = engine.pool.num_owned
    engine.core.pass_fence(plan.loads[0][1], engine.now_fs, done=False)
    assert (a.state, engine.pool.num_owned) == (State.WAITING, 0)
    step = engine.step()
    assert (step.tokens, step.plan.loads) == ({"A": 17}, ())
    assert [(name, len(blocks)) for name, blocks in step.plan.releases] == [("A", owned)]
    finish(engine)
    assert (a.outcome, engine.core.cpu_hit_tokens) == (Outcome.FINISHED, 0)


def test_no_more_is_held_for_a_load_than_the_next_step_can_compute_where_a_window_slides(drive):
    """61 tokens of which 16 come from the tier, 8 a step, a window of 8: two loaded blocks and those of tokens 17 to 24."""
    engine = warm_engine(drive, sliding_window=8, max_num_batched_tokens=8)
    a = engine.add("A", 61, **named("wxyz"))
    plan = engine.step().plan
    assert len(a.table.blocks) == 6
    assert engine.pool.num_owned == 4
    pass_all(engine, plan)
    assert engine.step().tokens == {"A": 8}
    finish(engine)
    assert a.outcome is Outcome.FINISHED


def test_a_block_that_slides_out_while_it_is_saved_is_not_given_away(drive):
    """x has slid out of A's window while its copy reads it: nobody gets its block before the copy is done (I9)."""
    engine = drive(num_gpu_blocks=6, **SMALL | {"sliding_window": 4, "max_num_batched_tokens": 8})
    engine.add("A", 8, output_tokens=12, **named("xy"))
    engine.step()
    plan = engine.step().plan
    ((fence, pairs),) = plan.saves
    reading = {block for block, _ in pairs}
    for _ in range(6):
        engine.add(f"n{_}", 2)
        step = engine.step()
        for name, table in step.tables.items():
            if name != "A":
                assert not reading & set(table)
    engine.core.pass_fence(fence, engine.now_fs)
    finish(engine)
    assert engine.pool.num_free == 6


def test_a_stretch_does_not_count_on_blocks_that_slide_out_while_a_copy_reads_them(drive):
    """18 blocks. Step 0: A's 17 tokens take 5 and 5, B's one token 1 and 1. Step 1: blocks 0 and 1 of A's window have slid out and are
    being saved, as its others are; 6 are free. With A's 21st token both take 2, and with its 25th again: 2 are free then, for A, and
    blocks 2 and 3 of its window have slid out but are being read. B waits for those that the copy still reads."""
    engine = drive(num_gpu_blocks=18, **SMALL | {"kv_groups": (FULL, SLIDING)})
    a = engine.add("A", 17, output_tokens=12, max_tokens=12, **named("wxyz"))
    b = engine.add("B", 1, output_tokens=12, max_tokens=12)
    engine.commit(engine.plan())
    plan = engine.plan()
    ((fence, pairs),) = plan.saves
    assert len(pairs) == 8
    engine.commit(plan)
    while engine.core.steps < 8:
        engine.commit(engine.plan())
    assert engine.step().tokens == {"A": 1}
    assert (engine.pool.num_free, engine.pool.num_quarantined) == (0, 4)
    engine.core.pass_fence(fence, engine.now_fs)
    finish(engine)
    assert [(r.outcome, r.num_preemptions) for r in (a, b)] == [(Outcome.FINISHED, 0)] * 2


TIGHT = EngineConfig(
    num_gpu_blocks=52,
    block_size=4,
    max_model_len=93,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    kv_groups=(FULL, SLIDING),
)


def talk(ticks: int, name: str, names: str, input_tokens: int, output_tokens: int) -> RequestSpec:
    """A request that arrives after `ticks`, whose prompt is named by letters, 8 tokens a letter."""
    return at(ticks, name, input_tokens, output_tokens, max_tokens=output_tokens, **named(names, 8))


def test_a_stretch_ends_where_the_tier_would_bring_one_that_waits_less():
    """ "again" waits for blocks while others decode. What of its prefix is on the device is evicted meanwhile, and what the tier still has
    costs it other blocks: it must be asked at every step, as it is when the engine steps."""
    requests = (
        talk(40, "first", "abcde", 45, 27),
        talk(130, "second", "vw", 17, 34),
        talk(220, "again", "mnop", 35, 21),
        talk(220, "third", "ab", 17, 31),
    )
    tier = Copies(10, "write_through", 20 * TICK_S, 0)
    assert_nobody_is_lost(scenario_of("vllm-v1", TIGHT, tier, requests), tier.fails)


def test_a_stretch_ends_where_what_slides_out_of_a_window_is_next_to_be_evicted():
    """So few blocks are free that write-back keeps all of them saved: a block that joins them is due at once, though none is taken."""
    requests = (
        talk(173, "first", "abcdef", 51, 12),
        talk(181, "second", "m", 12, 25),
        talk(189, "third", "uvwxyz", 49, 19),
    )
    tier = Copies(300, "write_back", TICK_S, 0)
    assert_nobody_is_lost(scenario_of("vllm-v1", TIGHT, tier, requests), tier.fails)


KINDS = [
    {"sliding_window": 5},
    {"sliding_window": 9},
    {"kv_groups": (FULL, SLIDING)},
    {"kv_groups": (FULL, AttentionGroup(block_size=8, window=5))},
    {"kv_groups": (FULL, FULL)},
    {"kv_groups": (SLIDING, FULL, AttentionGroup(block_size=4, window=13))},
]


@pytest.mark.parametrize("kind", KINDS, ids=KINDS.index)
@pytest.mark.parametrize("name", ["vllm-v1", "sglang", "trtllm-max-util"])
def test_nobody_is_lost_and_a_leap_is_its_steps(name: str, kind: dict[str, object]) -> None:
    @settings(max_examples=25)
    @given(
        conversations(most_output_tokens=20),
        st.sampled_from([13, 16, 24]),
        copies,
        st.sampled_from(["lru", "lfu"]),
        st.booleans(),
    )
    def same(requests: tuple[RequestSpec, ...], blocks: int, tier: Copies, eviction: str, ahead: bool) -> None:
        config = EngineConfig(
            num_gpu_blocks=blocks * len(kind.get("kv_groups", (None,))),
            block_size=4,
            max_model_len=48,
            max_num_seqs=4,
            max_num_batched_tokens=48,
            async_scheduling=ahead,
            **kind,
        )
        assert_nobody_is_lost(scenario_of(name, config, tier, requests, eviction), tier.fails)

    same()
