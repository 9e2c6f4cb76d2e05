"""Retention by priority and time: what a released block is worth when, and that the head of a sequence outlives its tail."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.blocks import BlockPool
from sim.core.clock import FS_PER_S
from sim.core.config import ConfigError, EngineConfig
from sim.core.policy import Policy
from sim.core.request import RequestSpec
from sim.core.retention import DEFAULT_PRIORITY, Retention, at, courses, higher
from sim.costs.constant import FixedCost
from sim.world import run_world

RANGES = st.lists(
    st.builds(
        Retention,
        priority=st.integers(0, 100),
        start=st.integers(0, 10),
        end=st.sampled_from([None, 11, 20]),
        duration_s=st.sampled_from([None, 1.0, 2.0, 5.0]),
        output=st.booleans(),
    ),
    max_size=4,
)


def left(pool: BlockPool, keys: list[int], ranges: list[Retention], at_s: int, input_tokens: int = 99) -> list[int]:
    """Blocks with these keys, released with these ranges at a time; 4 tokens a block."""
    blocks = pool.allocate(len(keys))
    pool.index.add(blocks, keys)
    pool.tick(at_s * FS_PER_S)
    pool.retain(blocks, courses(ranges, input_tokens, len(keys), 4, at_s * FS_PER_S))
    pool.release(blocks, "test")
    return blocks


def test_the_course_of_a_block_is_that_of_the_first_range_with_its_first_token():
    """8 prompt tokens, 4 a block: [0, 4) is kept at 80 for 10 s, the rest of the prompt at 50, the output at 20."""
    ranges = [
        Retention(priority=80, end=4, duration_s=10.0),
        Retention(priority=50),
        Retention(priority=20, output=True),
    ]
    made = courses(ranges, input_tokens=8, num_blocks=3, block_size=4, now_fs=5)
    assert made == [((10 * FS_PER_S + 5, 80), (None, 50)), ((None, 50),), ((None, 20),)]


def test_without_a_range_everything_is_worth_the_default():
    assert courses([], 8, 3, 4, 0) == [((None, DEFAULT_PRIORITY),)] * 3


def test_low_priorities_go_first_and_the_older_release_of_equals():
    pool = BlockPool(4, eviction="retention")
    high = left(pool, [1], [Retention(priority=80)], 0)
    low = left(pool, [2], [Retention(priority=10)], 1)
    plain = left(pool, [3], [], 2)
    later = left(pool, [4], [], 3)
    assert pool.allocate(4) == [*low, *plain, *later, *high]


def test_what_has_been_kept_long_enough_is_worth_the_default_and_its_release_counts():
    """A is kept at 80 for 5 s from time 0; B, of the default, is released at time 3. Until 5 B goes first, from then on A."""
    pool = BlockPool(2, eviction="retention")
    a = left(pool, [1], [Retention(priority=80, duration_s=5.0)], 0)
    b = left(pool, [2], [], 3)
    pool.tick(5 * FS_PER_S - 1)
    assert pool.peek(2) == [*b, *a]
    assert pool.order_changes
    pool.tick(5 * FS_PER_S)
    assert pool.peek(2) == [*a, *b]
    assert not pool.order_changes


def test_a_block_that_was_found_again_gets_the_course_of_who_releases_it():
    pool = BlockPool(2, eviction="retention")
    a = left(pool, [1], [Retention(priority=80, duration_s=5.0)], 0)
    pool.acquire(a)
    pool.tick(9 * FS_PER_S)
    pool.retain(a, courses([Retention(priority=90)], 99, 1, 4, 9 * FS_PER_S))
    pool.release(a, "finder")
    b = left(pool, [2], [], 10)
    assert pool.allocate(2) == [*b, *a]


@settings(max_examples=200)
@given(RANGES, st.integers(1, 12), st.integers(0, 40), st.integers(0, 7))
def test_at_every_time_a_parent_is_worth_as_much_as_its_child(ranges, num_blocks, input_tokens, when_s):
    made = courses(ranges, input_tokens, num_blocks, 4, FS_PER_S)
    worth = [at(course, (when_s + 1) * FS_PER_S) for course in made]
    assert worth == sorted(worth, reverse=True)


@settings(max_examples=100)
@given(RANGES, RANGES, st.integers(0, 7))
def test_the_higher_of_two_courses_is_so_at_every_time(some, others, when_s):
    one, other = (courses(ranges, 9, 1, 4, 0)[0] for ranges in (some, others))
    time_fs = when_s * FS_PER_S
    assert at(higher(one, other), time_fs) == max(at(one, time_fs), at(other, time_fs))


@settings(max_examples=100)
@given(RANGES, st.integers(2, 10), st.integers(0, 10))
def test_leaves_go_before_their_parents_whatever_time_it_is(ranges, num_blocks, passed_s):
    pool = BlockPool(num_blocks, eviction="retention")
    chain = left(pool, list(range(num_blocks)), ranges, 0, input_tokens=13)
    pool.tick(passed_s * FS_PER_S)
    assert pool.allocate(num_blocks) == chain[::-1]


def served(retention: tuple[Retention, ...], own: tuple[Retention, ...] = ()) -> int:
    """Prompt tokens that the third request, at 60 s, finds of the first, after a second has taken six of eight blocks."""
    config = EngineConfig(num_gpu_blocks=8, block_size=4, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)
    named = {"content_ids": tuple("wxyz"), "content_block_tokens": 4}
    requests = [
        RequestSpec(request_id="A", arrival_s=0.0, input_tokens=17, output_tokens=1, retention=own, **named),
        RequestSpec(
            request_id="other",
            arrival_s=10.0,
            input_tokens=4,
            output_tokens=1,
            content_ids=("o",),
            content_block_tokens=4,
            retention=(Retention(priority=35),),
        ),
        RequestSpec(request_id="F", arrival_s=20.0, input_tokens=24, output_tokens=1),
        RequestSpec(request_id="A again", arrival_s=60.0, input_tokens=17, output_tokens=1, **named),
    ]
    policy = Policy(eviction="retention", retention=retention)
    record = run_world(config, FixedCost(1.0), requests, policy=policy, check=True)
    return record.requests[-1].prefix_hit_tokens


def test_a_kept_prefix_is_found_again_after_a_flood_and_not_once_its_time_is_over():
    """F takes the 2 blocks never used, A's last, which holds nothing findable, and 3 more. If all are worth the default, "other"'s one is
    newest: A's tail and all but its head go. Kept, A's two blocks of [0, 8) stay, and "other" goes; not if they were kept for 1.5 s."""
    assert served(()) == 4
    assert served((Retention(priority=90, end=8),)) == 8
    assert served((Retention(priority=90, end=8, duration_s=1.5),)) == 4


def test_a_request_says_itself_what_is_to_be_kept():
    assert served((Retention(priority=0),), own=(Retention(priority=90, end=8),)) == 8


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"priority": 101}, "from 0"),
        ({"priority": 50, "start": 4, "end": 4}, "at least one token"),
        ({"priority": 50, "duration_s": 0.0}, "above 0"),
    ],
)
def test_a_range_that_makes_no_sense_is_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        Retention(**fields)


def test_ranges_that_nothing_looks_at_are_refused():
    with pytest.raises(ConfigError, match="lru ignores them"):
        Policy(eviction="lru", retention=(Retention(priority=50),))
    with pytest.raises(ConfigError, match="known are lru, lfu, priority, retention"):
        Policy(eviction="mru")
