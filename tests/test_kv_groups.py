"""Several attention groups in one pool: blocks by step on paper, prefix hits, one need for sizer, gate, predictor and allocator (I5)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim import Scenario, simulate
from sim.core.blocks import NO_BLOCK, BlockPool
from sim.core.config import AttentionGroup, ConfigError, EngineConfig
from sim.core.groups import GroupTables
from sim.core.plan import Durations, OomReport, StepResult
from sim.core.request import Outcome, RequestSpec
from sim.costs.constant import FixedCost
from sim.memory import build_ledger
from sim.simulation import core_groups
from sim.world import run_world

FULL_AND_32 = (AttentionGroup(block_size=16, window=32), AttentionGroup(block_size=16))
"""The two-group model of the cases on paper: a window of 32 tokens, blocks of 16."""


def config(groups: Sequence[AttentionGroup] = FULL_AND_32, **settings: object) -> EngineConfig:
    usual = {"num_gpu_blocks": 100, "block_size": 16, "max_model_len": 1024, "max_num_seqs": 8}
    return EngineConfig(**(usual | {"max_num_batched_tokens": 32, "kv_groups": tuple(groups)} | settings))


# -- blocks by step ------------------------------------------------------------------------------------------------------


def test_blocks_of_two_groups_by_step(drive):
    """Prompt 70 in chunks of 32, window 32, blocks of 16. With C tokens computed max(C - 31, 0) // 16 blocks of the window are gone.

    Chunks to 32, 64, 70 tokens: full 2, 4, 5 blocks; window 2, 4, and 5 - (64 - 31) // 16 = 3. Then a token a step: when C is 79,
    the third block slides out (48 // 16) and 79 + 1 tokens need no other: 5 + 2. When C is 80, both groups take one: 6 + 3. When C
    is 95, one slides (64 // 16): 6 + 2; when C is 96, both take one: 7 + 3.
    """
    engine = drive(100, 16, max_num_batched_tokens=32, kv_groups=FULL_AND_32)
    engine.add("A", 70, output_tokens=30)
    owned = {}
    while (plan := engine.plan(max_repeat=1)) is not None:
        (share,) = plan.scheduled(0)
        owned[share.context_tokens] = engine.pool.num_owned
        window, full = share.group_tables
        assert share.block_table == window
        assert NO_BLOCK not in full
        engine.commit(plan)
    assert [owned[computed] for computed in (0, 32, 64)] == [2 + 2, 4 + 4, 5 + 3]
    assert [owned[computed] for computed in (70, 78, 79, 80, 94, 95, 96, 98)] == [8, 8, 7, 9, 9, 8, 10, 10]
    assert engine.pool.num_free == 100


def test_a_stretch_passes_over_blocks_taken_and_given_back(drive):
    """The same request: after its prompt, all 29 tokens are one stretch, whose log says in which step which block came and went.

    The pool's blocks are handed out in order, group by group: the prompt has 1, 2 | 3, 4; then 5, 6 | 7, 8; then 9 | 10. The window's
    1 and 2 slide out when 64 are computed, 5 when 79 are (step 3 + 9), and 6 when 95 are (step 3 + 25).
    """
    engine = drive(100, 16, max_num_batched_tokens=32, kv_groups=FULL_AND_32)
    engine.add("A", 70, output_tokens=30)
    repeats = []
    while (plan := engine.plan()) is not None:
        repeats.append(plan.repeat)
        engine.commit(plan)
    engine.close()
    assert repeats == [1, 1, 1, 29]
    taken = {entry["step"]: entry["scheduled"][0][2] for entry in engine.log if entry["scheduled"]}
    assert [taken[step] for step in range(3)] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]
    assert {step: blocks for step, blocks in taken.items() if step > 2 and blocks} == {13: [11, 12], 29: [13, 14]}
    released = {entry["step"]: entry["released"] for entry in engine.log if entry["released"]}
    assert released == {
        2: [("A", [1, 2])],
        12: [("A", [5])],
        28: [("A", [6])],
        32: [("A", [9, 11, 13, 3, 4, 7, 8, 10, 12, 14])],
    }


def test_a_group_with_larger_blocks_takes_one_at_every_second_boundary(drive):
    """Full attention in blocks of 32, a window of 16 in blocks of 16 (as gemma-4-26b-a4b has them): 64 tokens are 2 + 4 blocks; at
    token 65 both groups take one; the window keeps (C - 15) // 16 fewer: with C = 64 3 are gone, with C = 79 one more.
    """
    groups = (AttentionGroup(block_size=16, window=16), AttentionGroup(block_size=32))
    engine = drive(100, 16, max_num_batched_tokens=64, kv_groups=groups)
    engine.add("A", 64, output_tokens=40)
    owned = {}
    while (plan := engine.plan(max_repeat=1)) is not None:
        (share,) = plan.scheduled(0)
        owned[share.context_tokens] = engine.pool.num_owned
        engine.commit(plan)
    assert [owned[computed] for computed in (0, 64, 78, 79, 80, 95, 96)] == [
        4 + 2,
        2 + 3,
        2 + 3,
        1 + 3,
        2 + 3,
        1 + 3,
        2 + 4,
    ]


def test_one_group_with_a_window_gives_the_blocks_that_the_window_alone_would(drive):
    """A second group that never holds more than the first: the window's group has the tables it has in a model of its own."""
    alone = drive(100, 16, max_num_batched_tokens=32, sliding_window=32)
    beside = drive(100, 16, max_num_batched_tokens=32, kv_groups=FULL_AND_32)
    held = []
    for engine in (alone, beside):
        engine.add("A", 70, output_tokens=30)
        held.append([])
        while (plan := engine.plan(max_repeat=1)) is not None:
            (share,) = plan.scheduled(0)
            held[-1].append([block != NO_BLOCK for block in share.block_table])
            engine.commit(plan)
    assert held[0] == held[1]


# -- prefix hits ---------------------------------------------------------------------------------------------------------


def found(groups: Sequence[AttentionGroup], cached: Sequence[Sequence[int]], num_keys: int) -> list[list[int]]:
    """What is hit of each group when blocks `cached[g]` of group g, and nothing else, can be found; as places, None for NO_BLOCK."""
    pool = BlockPool(1000)
    tables = GroupTables(pool, config(groups, block_size=min(group.block_size for group in groups)))
    keys = list(range(50, 50 + num_keys))
    place_of = {}
    for own, places in zip(tables._keys_by_group(keys), cached, strict=True):
        for place in places:
            if place < len(own):
                (block,) = pool.allocate(1)
                pool.index.add([block], [own[place]])
                place_of[block] = place
    return [[place_of.get(block) for block in hits] for hits in tables.split(tables.find(keys))]


def test_a_window_needs_only_the_blocks_that_it_covers():
    """Window 32: the token after n blocks of 16 sees the last ceil(31 / 16) = 2. Full attention has blocks 0 to 5, the window 1, 2 and
    4: of 6 or 5 blocks it lacks 5 or 3, of 4 it lacks 3; of 3 it has 1 and 2.
    """
    assert found(FULL_AND_32, [[1, 2, 4], range(6)], 6) == [[None, 1, 2], [0, 1, 2]]


def test_a_model_of_windows_alone_needs_only_the_last_blocks_too(drive):
    """Window 32, blocks of 16, one group. A prompt of 96 tokens in chunks of 32: (64 - 31) // 16 = 2 blocks slide out when 64 are
    computed, and the second of them is the first to be taken by somebody else. The prompt is hit all the same: after 80 tokens only the
    last two of five blocks are seen.
    """
    engine = drive(6, 16, max_num_batched_tokens=32, sliding_window=32)
    prompt = {"content_ids": tuple("abcdef"), "content_block_tokens": 16}
    engine.add("first", 96, **prompt)
    engine.run()
    engine.add("other", 16)
    assert engine.step().tables == {"other": (2,)}
    again = engine.add("again", 96, **prompt)
    assert engine.step().tokens == {"again": 16}
    assert again.prefix_hit_tokens == 80


def test_full_attention_needs_every_block_from_the_first():
    assert found(FULL_AND_32, [range(6), [0, 1, 3, 4, 5]], 6) == [[0, 1], [0, 1]]
    assert found(FULL_AND_32, [range(6), [1, 2, 3]], 6) == [[], []]


def test_hits_are_whole_blocks_of_every_group():
    """Blocks of 16 and 32: five small blocks are found, of which four make two large ones."""
    groups = (AttentionGroup(block_size=16, window=16), AttentionGroup(block_size=32))
    assert found(groups, [range(5), range(4)], 5) == [[None, None, None, 3], [0, 1]]


@st.composite
def group_sets(draw: st.DrawFn) -> tuple[AttentionGroup, ...]:
    sizes = draw(st.lists(st.sampled_from([4, 4, 8, 16]), min_size=1, max_size=3))
    windows = st.sampled_from([None, 1, 4, 5, 9, 20])
    return (
        AttentionGroup(block_size=4, window=draw(windows)),
        *(AttentionGroup(block_size=size, window=draw(windows)) for size in sizes),
    )


@given(group_sets(), st.lists(st.sets(st.integers(0, 12)), min_size=4, max_size=4), st.integers(0, 13))
def test_the_longest_prefix_that_every_group_can_serve_is_found(
    groups: tuple[AttentionGroup, ...], cached: list[set[int]], num_keys: int
) -> None:
    """Against trying every length, from the longest."""
    unit = max(group.block_size for group in groups)

    def seen(group: AttentionGroup, tokens: int) -> range:
        oldest = 0 if group.window is None else max(tokens - group.window + 1, 0)
        return range(oldest // group.block_size, tokens // group.block_size)

    longest = max(
        tokens
        for tokens in range(0, num_keys * 4 + 1, unit)
        if all(set(seen(group, tokens)) <= have for group, have in zip(groups, cached, strict=False))
    )
    expected = [
        [place if place in seen(group, longest) else None for place in range(longest // group.block_size)]
        for group in groups
    ]
    assert found(groups, cached[: len(groups)], num_keys) == expected


def test_equal_content_is_hit_in_the_group_that_computed_it_and_in_no_other(drive):
    """I7: a prompt of 64 tokens that was computed before is hit up to its last token but one: 48 tokens, in each group its own blocks.

    The first has 1 to 4 in the window's group and 5 to 8 in the other. The second sees, of 3 blocks, the last 2 in its window.
    """
    engine = drive(100, 16, max_num_batched_tokens=64, kv_groups=FULL_AND_32)
    prompt = {"content_ids": ("a", "b", "c", "d"), "content_block_tokens": 16}
    engine.add("first", 64, **prompt)
    engine.run()
    second = engine.add("second", 64, **prompt)
    plan = engine.plan()
    (share,) = plan.scheduled(0)
    assert share.group_tables == ((0, 2, 3, 9), (5, 6, 7, 10))
    assert second.prefix_hit_tokens == 48
    engine.commit(plan)
    assert engine.log[1]["scheduled"] == [("second", 16, [0, 2, 3, 9, 5, 6, 7, 10])]


def test_a_block_found_by_one_group_is_not_given_to_another_as_new():
    """5 blocks: the first four were computed, one a group and place, and are free. 40 tokens hit two blocks a group; one more each is
    needed, and the pool has 5 - 4 = 1: refused, and nothing changed. With 6 it is granted, and the hits are where they were.
    """
    groups = (AttentionGroup(block_size=16), AttentionGroup(block_size=16, window=100))
    for num_blocks, granted in ((5, False), (6, True)):
        pool = BlockPool(num_blocks)
        tables = GroupTables(pool, config(groups))
        first = tables.new("first")
        tables.grow(first, 0, 32)
        pool.index.add(first.blocks, tables.keys([1, 2]))
        tables.release(first, "first")
        hits = tables.find([1, 2])
        assert hits == [1, 2, 3, 4]
        second = tables.new("second")
        assert tables.need(second, 0, 8, hits) == 6
        queue = pool.peek(num_blocks)
        allocation = tables.grow(second, 0, 8, hits)
        assert (allocation is not None) == granted
        if granted:
            assert [table.blocks for table in second.groups] == [[1, 2, 5], [3, 4, 6]]
        else:
            assert (second.blocks, pool.peek(num_blocks), pool.num_free) == ([], queue, num_blocks)
        pool.check([("second", second.blocks)])


# -- one need (I5) -------------------------------------------------------------------------------------------------------


def test_t5_the_gate_of_two_groups(drive):
    """Golden trace T5: bs 16, W 64, batched 128, max length 1024. A 512-token prompt needs 32 + 13 = 45 blocks, 256 tokens 16 + 13."""
    groups = (AttentionGroup(block_size=16), AttentionGroup(block_size=16, window=64))
    settings = {"max_model_len": 1024, "max_num_batched_tokens": 128, "kv_groups": groups}
    pool = drive(64 + 13, 16, **settings)
    assert pool.core.config.most_blocks(512) == 45
    pool.add("holder", 400)  # 25 + 13 blocks are asked for, and 77 - 45 = 32 would be left for it
    pool.add("512", 512)
    assert pool.step().tokens == {"holder": 128}
    first = next(step for step in pool.run() if "512" in step.tokens)
    assert pool.ended[0].request_id == "holder" and first is not None
    small = drive(5, 16, **settings)
    refused = small.add("256", 256)
    assert refused.outcome is Outcome.REJECTED
    assert "need 29 KV blocks in 2 attention groups, but the whole pool has 5" in refused.reason


@given(group_sets(), st.lists(st.integers(1, 20), min_size=1, max_size=12))
def test_what_is_predicted_is_taken_and_bounded_by_the_gate(
    groups: tuple[AttentionGroup, ...], chunks: list[int]
) -> None:
    """However a sequence is cut into chunks, each group's need is what it takes, and never more is held than the gate counted (T7)."""
    total = sum(chunks)
    made = config(groups, block_size=4, max_num_batched_tokens=max(*chunks, 8), max_model_len=256)
    pool = BlockPool(1000)
    tables = GroupTables(pool, made)
    table = tables.new("A")
    for computed, after in pairwise([0, *(sum(chunks[: n + 1]) for n in range(len(chunks)))]):
        tables.slide(table, computed)
        predicted, free = tables.need(table, computed, after - computed), pool.num_free
        tables.grow(table, computed, after - computed)
        assert free - pool.num_free == predicted
        assert pool.num_owned == made.blocks_at(computed, after) <= made.most_blocks(total)
        pool.check([("A", table.blocks)])


@pytest.mark.parametrize("model", ["gpt-oss-20b", "gemma-2-9b", "gemma-4-26b-a4b", "llama-3.1-8b"])
@given(tokens=st.integers(1, 8192), batched=st.sampled_from([512, 2048, 8192]))
def test_the_gate_counts_what_the_sizer_counted(model: str, tokens: int, batched: int) -> None:
    """I12 of the engine policies: the same number from the ledger and from the engine that it sized, for a request of any length."""
    ledger = _ledger(model, batched)
    engine = EngineConfig(
        num_gpu_blocks=ledger.num_gpu_blocks,
        block_size=16,
        max_model_len=ledger.max_model_len,
        max_num_seqs=256,
        max_num_batched_tokens=batched,
        kv_groups=core_groups(ledger),
        in_flight_tokens=ledger.in_flight_tokens,
    )
    assert engine.most_blocks(tokens) == ledger.request_blocks(tokens)


_LEDGERS = {}


def _ledger(model: str, batched: int):
    key = (model, batched)
    if key not in _LEDGERS:
        _LEDGERS[key] = build_ledger(
            model, "h200-sxm-141gb", max_model_len=8192, max_num_seqs=256, max_num_batched_tokens=batched
        )
    return _LEDGERS[key]


# -- the pool, filled ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["gpt-oss-20b", "gemma-2-9b", "gemma-4-26b-a4b"])
def test_requests_of_the_longest_length_fill_the_pool_exactly_as_the_ledger_says(model: str) -> None:
    """Prompts of max_model_len - 1 tokens, all computed in one step: each takes what the ledger counts for a request, and
    floor(max_concurrency) of them start at once; one more waits until the first are done.
    """
    length, batched = 1025, 1 << 16
    sizes = {"max_model_len": length, "max_num_batched_tokens": batched, "max_num_seqs": 64}
    need = build_ledger(model, "h200-sxm-141gb", **sizes).request_blocks(length - 1)
    ledger = build_ledger(model, "h200-sxm-141gb", num_gpu_blocks_override=7 * need + need // 2, **sizes)
    fits = ledger.num_gpu_blocks // ledger.request_blocks(length - 1)
    assert fits == 7
    assert ledger.max_concurrency == ledger.num_gpu_blocks / ledger.request_blocks(length)
    lengths = {"input_tokens": length - 1, "output_tokens": 1, "num_requests": fits + 1, "rate": float("inf")}
    result = simulate(
        Scenario(
            model=model,
            gpu="h200-sxm-141gb",
            workload={"workload": "uniform", **lengths},
            engine={"num_gpu_blocks_override": ledger.num_gpu_blocks, **sizes},
            run={"check": True},
        )
    )
    assert result.summary["num_gpu_blocks"] == ledger.num_gpu_blocks
    assert result.summary["finished"] == fits + 1
    assert result.timeline["running"].tolist() == [fits, 1]
    assert result.timeline["used_blocks"].tolist() == [fits * need, need]


def test_as_many_longest_requests_as_the_ledger_counts_run_at_once_without_a_preemption() -> None:
    """Longer than a step and than the window, decoding to their end: the ledger's count is safe. (A window holds its worst only
    while its prompt is computed, so more may run.)
    """
    length = 4096
    sizes = {"max_model_len": length, "max_num_batched_tokens": 512, "max_num_seqs": 64}
    ledger = build_ledger("gpt-oss-20b", "h200-sxm-141gb", num_gpu_blocks_override=3000, **sizes)
    fits = int(ledger.max_concurrency)
    result = simulate(
        Scenario(
            model="gpt-oss-20b",
            gpu="h200-sxm-141gb",
            workload={
                "workload": "uniform",
                "input_tokens": 3000,
                "output_tokens": 1096,
                "num_requests": fits,
                "rate": float("inf"),
            },
            engine={"num_gpu_blocks_override": 3000, **sizes},
            run={"check": True},
        )
    )
    assert (result.summary["finished"], result.summary["num_preemptions"]) == (fits, 0)
    assert result.timeline["running"].max() == fits


# -- stretches of windows ------------------------------------------------------------------------------------------------


def test_a_stretch_ends_when_a_block_that_slides_out_lets_the_next_in(drive):
    """The request of the first case holds 8 of 10 blocks and one is somebody else's: the next, which needs 2, finds 1. When 79 tokens
    are computed a third block slides out, and in that step, the tenth of decoding, the next is let in.
    """
    engine = drive(10, 16, max_num_batched_tokens=32, kv_groups=FULL_AND_32)
    engine.add("A", 70, output_tokens=20)
    engine.commit(engine.plan())
    engine.occupy(1, fence=1)
    next_in = engine.add("next", 16)
    starts = []
    while (plan := engine.plan()) is not None:
        starts.append((plan.step, plan.repeat, plan.admitted))
        engine.commit(plan)
    assert starts[2:4] == [(3, 9, ()), (12, 1, ("next",))]
    assert next_in.outcome is Outcome.FINISHED


def leaps_and_steps(made: EngineConfig, requests: Sequence[RequestSpec]) -> list[list[str]]:
    """The decision logs of a leaping and of a stepping run."""
    logs: list[list[str]] = []
    for stepping in (False, True):
        logs.append([])
        run_world(
            made,
            FixedCost(0.01),
            requests,
            stepping=stepping,
            check=True,
            decision_log=lambda entry: logs[-1].append(json.dumps(entry)),
        )
    return logs


def test_a_head_whose_cached_prefix_goes_in_two_groups_is_looked_at_again_in_every_step() -> None:
    """Two requests that cannot both grow: the one that gave way finds its own blocks again, in both groups. As the other takes them,
    the blocks that its next chunk needs fall by two at a time: it may start in the middle of what would be a stretch.
    """
    group = AttentionGroup(block_size=2)
    made = EngineConfig(
        num_gpu_blocks=20,
        block_size=2,
        max_model_len=128,
        max_num_seqs=2,
        max_num_batched_tokens=5,
        reserve_full_prompt=False,
        kv_groups=(group, group),
    )
    sizes = {"older": (7, 15), "younger": (8, 3)}
    leaping, stepping = leaps_and_steps(
        made,
        [
            RequestSpec(request_id=name, arrival_s=0.0, input_tokens=tokens, output_tokens=output)
            for name, (tokens, output) in sizes.items()
        ],
    )
    assert any(json.loads(entry)["preempted"] for entry in stepping), "no pressure, no test"
    assert leaping == stepping


def test_blocks_in_use_are_counted_in_the_middle_of_a_stretch(drive):
    """What a router asks: the same numbers as single steps have, in every step of a stretch in which two requests share a prefix."""
    prompt = {"content_ids": ("a", "b", "c", "d"), "content_block_tokens": 16}
    owned = []
    for repeat in (None, 1):
        engine = drive(100, 16, max_num_batched_tokens=128, kv_groups=FULL_AND_32)
        engine.add("first", 66, output_tokens=60, **prompt)
        engine.commit(engine.plan())
        engine.add("second", 66, output_tokens=60, **prompt)
        owned.append([])
        while (plan := engine.plan(repeat)) is not None:
            owned[-1] += [engine.core.owned_blocks_in(ahead) for ahead in range(plan.repeat)]
            engine.commit(plan)
    assert owned[0] == owned[1]
    # Both groups take at once, so an odd change is a block that slid out.
    assert any((later - earlier) % 2 for earlier, later in pairwise(owned[0][:40])), "nothing slid out, no test"


def test_a_step_that_ran_out_of_memory_leaves_no_window_half_filled(drive):
    """A second request was to read blocks that the first was to write in the same step: 4 and 5 of 6. The step fails. Blocks 0 to 3 are
    as they were, but in the window's group the second has not taken 2 and 3, which a token after 64 would see: it starts from nothing.
    """
    engine = drive(100, 16, max_num_batched_tokens=64, kv_groups=FULL_AND_32)
    prompt = {"content_ids": ("a", "b", "c", "d", "e", "f"), "content_block_tokens": 16}
    engine.add("first", 98, output_tokens=40, **prompt)
    engine.commit(engine.plan())
    second = engine.add("second", 98, output_tokens=40, **prompt)
    plan = engine.plan()
    assert [(share.request_id, share.context_tokens) for share in plan.scheduled(0)] == [("first", 64), ("second", 96)]
    report = OomReport(op="activations", requested_bytes=2, free_bytes=1)
    engine.now_fs += 1
    engine.core.commit(plan, StepResult(durations=Durations.one(1), oom=report), engine.now_fs)
    engine.core.check()
    assert (second.num_computed_tokens, second.held_blocks) == (0, 0)
    engine.run()
    assert [request.outcome for request in engine.ended] == [Outcome.FINISHED] * 2


# -- bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sliding_window": 8}, "sliding_window is 8 and there are 2 kv_groups"),
        ({"kv_groups": FULL_AND_32[:1]}, "kv_groups has 1 group"),
        ({"kv_groups": (AttentionGroup(block_size=16, window=0), FULL_AND_32[1])}, r"window of kv_groups\[0\] is 0"),
        (
            {"kv_groups": (AttentionGroup(block_size=24), FULL_AND_32[1])},
            r"block size of kv_groups\[0\] is 24.*multiple",
        ),
        ({"block_size": 8}, "block_size is 8, but no kv_group has blocks of that many tokens"),
    ],
)
def test_groups_that_contradict_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**settings)
