"""Which content the prefix cache forgets first, and that the order costs no exactness."""

from collections import OrderedDict, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core import BlockPool
from sim.core.eviction import EVICTIONS, LruQueue


def release_with_keys(pool, keys, worth=0.0):
    blocks = pool.allocate(len(keys))
    pool.index.add(blocks, keys)
    pool.release(blocks, "test", worth=worth)
    return blocks


def test_lru_forgets_what_was_released_longest_ago_tail_first():
    pool = BlockPool(4)
    first, second = release_with_keys(pool, [1, 2]), release_with_keys(pool, [3, 4])
    assert pool.allocate(3) == [first[1], first[0], second[1]]


def test_lru_counts_a_use_until_its_last_holder_leaves():
    pool = BlockPool(4)
    first, second = release_with_keys(pool, [1, 2]), release_with_keys(pool, [3, 4])
    pool.acquire(pool.find([1]))
    pool.release(first[:1], "finder")
    assert pool.peek(4) == [first[1], second[1], second[0], first[0]]


def test_lfu_keeps_what_was_found_most_often_though_it_is_oldest():
    pool = BlockPool(4, eviction="lfu")
    popular, other = release_with_keys(pool, [1, 2]), release_with_keys(pool, [3, 4])
    for _ in range(2):
        pool.acquire(pool.find([1, 2]))
        pool.release(popular, "finder")
    assert pool.peek(4) == [other[1], other[0], popular[1], popular[0]]
    taken = pool.allocate(4)
    pool.release(taken, "test")
    assert pool.find([1]) == []


def test_priority_keeps_what_important_requests_left():
    """Worth is minus the priority: 0 outranks 5."""
    pool = BlockPool(4, eviction="priority")
    important = release_with_keys(pool, [1, 2], worth=0.0)
    unimportant = release_with_keys(pool, [3, 4], worth=-5.0)
    assert pool.allocate(4) == [unimportant[1], unimportant[0], important[1], important[0]]


@pytest.mark.parametrize("eviction", ["lfu", "priority"])
def test_a_block_that_holds_nothing_findable_goes_first(eviction):
    pool = BlockPool(3, eviction=eviction)
    kept = release_with_keys(pool, [1])
    plain = pool.allocate(1)
    pool.release(plain, "test", worth=9.0)
    assert pool.allocate(3) == [3, plain[0], kept[0]]  # 3 was never used


@pytest.mark.parametrize("eviction", ["lfu", "priority"])
def test_a_block_whose_content_was_forgotten_goes_before_what_can_be_found(eviction):
    """It kept the rank of what it had held, and what could still be found was evicted instead of it."""
    pool = BlockPool(4, eviction=eviction)
    worthy = release_with_keys(pool, [1, 2], worth=9.0)
    for _ in range(3):
        pool.acquire(pool.find([1, 2]))
        pool.release(worthy, "finder", worth=9.0)
    plain = release_with_keys(pool, [3, 4], worth=1.0)
    pool.forget(worthy)
    assert pool.peek(4) == [worthy[1], worthy[0], plain[1], plain[0]]
    assert pool.allocate(4) == [worthy[1], worthy[0], plain[1], plain[0]]
    assert pool.num_cached == 0


def test_what_a_block_held_before_counts_for_nothing():
    """Found three times, forgotten while somebody held it, and filled with something else: nobody has found that yet."""
    pool = BlockPool(2, eviction="lfu")
    (block,) = release_with_keys(pool, [1])
    for _ in range(3):
        pool.acquire(pool.find([1]))
        pool.release([block], "finder")
    pool.acquire(pool.find([1]))
    pool.forget([block])
    pool.index.add([block], [2])
    pool.release([block], "writer")
    (other,) = release_with_keys(pool, [3])
    pool.acquire(pool.find([3]))
    pool.release([other], "finder")
    assert pool.peek(2) == [block, other]


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_leaves_go_before_their_parents(eviction):
    pool = BlockPool(3, eviction=eviction)
    chain = release_with_keys(pool, [1, 2, 3])
    pool.acquire(pool.find([1, 2, 3]))
    pool.release(chain, "again")
    assert pool.allocate(3) == chain[::-1]


@settings(max_examples=100)
@given(st.sampled_from(list(EVICTIONS)), st.lists(st.tuples(st.sampled_from("trfp"), st.integers(1, 4)), max_size=60))
def test_the_pool_adds_up_and_peek_tells_what_is_taken(eviction, operations):
    pool, held, keys = BlockPool(12, eviction=eviction), deque(), 0
    for kind, count in operations:
        if kind == "t":
            expected = pool.peek(count)
            blocks = pool.allocate(count)
            if blocks is not None:
                assert blocks == expected
                held.append(blocks)
        elif kind == "r" and held:
            pool.release(held.popleft(), "test", worth=float(count))
        elif kind == "f" and held:
            pool.index.add(held[-1], range(keys, keys + len(held[-1])))
            keys += len(held[-1])
        elif kind == "p" and (found := pool.find([max(keys - count, 0)])):
            pool.acquire(found)
            held.append(found)
        pool.check([(str(index), blocks) for index, blocks in enumerate(held)])


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["give", "pop", "hit", "aside", "back"]), st.integers(0, 40)), max_size=80))
def test_the_lru_queue_is_an_ordered_set_whatever_leaves_its_middle(operations):
    """Against an ordered dictionary: a hit takes a block out of the middle, and its return puts it at the end."""
    queue, model, out, aside = LruQueue(lambda block: True), OrderedDict(), deque(range(1, 200)), []
    for kind, count in operations:
        free = [block for block in model if block not in aside]
        if kind == "give":
            blocks = [out.popleft() for _ in range(min(count, len(out)))]
            queue.add(blocks, 0.0)
            model.update(dict.fromkeys(blocks))
        elif kind == "pop":
            taken = queue.pop(min(count, len(free)))
            assert taken == free[:count]
            out.extendleft(taken)
            for block in taken:
                del model[block]
        elif kind == "hit":
            for block in free[::3][:count]:
                queue.remove(block)
                del model[block]
                out.appendleft(block)
        elif kind == "aside":
            queue.set_aside(free[:count:2])
            aside += free[:count:2]
        else:
            queue.put_back(aside)
            aside = []
        free = [block for block in model if block not in aside]
        assert queue.peek(len(free)) == free
        assert queue.keys() == set(free)
        assert len(queue) == len(free)


def test_the_lru_queue_does_not_grow_when_the_same_blocks_are_found_again_and_again():
    queue = LruQueue(lambda block: True)
    queue.add([1, 2, 3], 0.0)
    for _ in range(1000):
        queue.remove(2)
        queue.add([2], 0.0)
    assert len(queue._queue) < 200
    assert queue.pop(3) == [1, 3, 2]
