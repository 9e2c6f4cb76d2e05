"""The pool's own alarms: double releases, and books that do not add up."""

from __future__ import annotations

import pytest

from sim.core.blocks import BlockPool, DoubleFreeError, IntegrityError
from sim.core.tables import BlockTable, BlockTables


def test_a_double_release_names_both_and_changes_nothing():
    pool = BlockPool(4)
    pool.allocate(2)
    pool.release([2], "A (finished)")
    with pytest.raises(
        DoubleFreeError, match=r"block 2 is released twice: first by A \(finished\), now by B"
    ) as caught:
        pool.release([1, 2], "B (aborted)")
    error = caught.value
    assert (error.block_id, error.first, error.second) == (2, "A (finished)", "B (aborted)")
    assert (pool.ref_cnt(1), pool.num_free) == (1, 3)
    pool.check([("A", [1])])


def test_a_release_behind_a_fence_is_a_release():
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.release(blocks, "A (aborted)", fence=1)
    with pytest.raises(DoubleFreeError, match=r"first by A \(aborted\), now by B"):
        pool.release(blocks, "B")
    pool.pass_fence(1)
    with pytest.raises(DoubleFreeError, match=r"first by A \(aborted\), now by B"):
        pool.release(blocks, "B")
    assert pool.num_free == 4


@pytest.mark.parametrize(("blocks", "name"), [([1, 1], "A"), ([1, 2, 1], "A")])
def test_a_list_that_names_a_block_twice_releases_it_twice(blocks, name):
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(DoubleFreeError, match="block 1 is released twice: first by A, now by A"):
        pool.release(blocks, name)
    assert pool.num_owned == 2


def test_a_block_that_was_never_given_cannot_be_released():
    pool = BlockPool(4)
    pool.allocate(1)
    with pytest.raises(DoubleFreeError, match=r"block 3 is released twice: first by nobody \(it was never allocated\)"):
        pool.release([3], "A")


def test_each_holder_of_a_shared_block_releases_it_once():
    tables = BlockTables(BlockPool(4), block_size=4)
    parent = BlockTable("parent")
    tables.grow(parent, 0, 4)
    child = tables.fork(parent, "child")
    tables.release(parent, "parent (finished)")
    assert tables.pool.num_owned == 1
    tables.release(child, "child (finished)")
    with pytest.raises(DoubleFreeError, match=r"first by child \(finished\), now by parent"):
        tables.pool.release([1], "parent")


def test_the_books_name_a_block_that_is_missing():
    """Held by reference count, by no table, in no queue."""
    pool = BlockPool(4)
    pool.allocate(2)
    pool.check([("A", [1, 2])])
    with pytest.raises(IntegrityError, match="1 faults in a pool of 4 blocks: block 2 is missing") as caught:
        pool.check([("A", [1])])
    assert "its reference count is 1, held by nobody" in str(caught.value)


def test_the_books_name_a_block_that_is_double():
    """In a table and in the free queue."""
    pool = BlockPool(4)
    pool.allocate(2)
    pool.release([2], "A (aborted)")
    with pytest.raises(IntegrityError, match="block 2 is double: held by") as caught:
        pool.check([("B", [1, 2])])
    assert "['B']" in str(caught.value)
    assert "last released by A (aborted)" in str(caught.value)


def test_the_books_name_a_block_held_by_more_tables_than_references():
    pool = BlockPool(4)
    pool.allocate(1)
    with pytest.raises(IntegrityError, match=r"block 1 is miscounted: its reference count is 1, held by \['A', 'B'\]"):
        pool.check([("A", [1]), ("B", [1])])


def test_the_books_name_a_block_nobody_ever_gave():
    pool = BlockPool(4)
    with pytest.raises(IntegrityError, match=r"block 3 is held by \['A'\] but was never allocated"):
        pool.check([("A", [3])])


def test_the_check_names_a_block_that_was_lost() -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(IntegrityError, match=r"block 2 is missing: its reference count is 1, held by nobody"):
        pool.check([("a", [1])])


def test_the_check_names_a_block_that_is_held_and_free() -> None:
    pool = BlockPool(4)
    pool.allocate(1)
    pool.release([1], "a")
    with pytest.raises(IntegrityError, match=r"block 1 is double: held by \['a'\] and in the free queue"):
        pool.check([("a", [1])])


def test_the_check_names_both_holders_of_a_block_that_is_counted_once() -> None:
    pool = BlockPool(4)
    pool.allocate(1)
    with pytest.raises(IntegrityError, match=r"block 1 is miscounted: .* is 1, held by \['a', 'b'\]"):
        pool.check([("a", [1]), ("b", [1])])


def test_the_check_names_a_block_that_was_never_allocated() -> None:
    with pytest.raises(IntegrityError, match=r"block 3 is held by \['a'\] but was never allocated"):
        BlockPool(4).check([("a", [3])])


def test_a_block_that_never_was_cannot_be_released() -> None:
    pool = BlockPool(4)
    with pytest.raises(DoubleFreeError, match="block 3 is released twice: first by nobody"):
        pool.release([3], "a")
    assert pool.peek(4) == [1, 2, 3, 4]
