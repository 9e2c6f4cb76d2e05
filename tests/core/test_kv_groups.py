"""Several attention groups in one pool: blocks by step on paper, and in stretches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest

from sim.core.blocks import NO_BLOCK
from sim.core.config import AttentionGroup, ConfigError, EngineConfig
from sim.core.durations import Durations
from sim.core.plan import OomReport, StepResult
from sim.core.request import Outcome, RequestSpec
from sim.costs.constant import FixedCost
from sim.world import run_world
from tests.support.attention_groups import FULL_AND_32, config

# -- blocks by step ----------------------------------------------------------------------------------------------------


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


# -- stretches of windows ----------------------------------------------------------------------------------------------


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


# -- bad input ---------------------------------------------------------------------------------------------------------


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
