"""Several attention groups in one pool: which prefix is found, in which group's blocks."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from sim.core.blocks import BlockPool
from sim.core.config import AttentionGroup
from sim.core.groups import GroupTables
from tests.support.attention_groups import FULL_AND_32, config, group_sets


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
