"""What block tables promise on forks, cuts and copies; the stateful test keeps to it on purpose."""

from __future__ import annotations

import pytest

from sim.core.blocks import BlockPool
from sim.core.tables import BlockTable, BlockTables

BLOCK_SIZE = 4


def filled(tables: BlockTables, owner: str, tokens: int) -> BlockTable:
    """A table with room for `tokens` tokens."""
    table = BlockTable(owner)
    assert tables.grow(table, 0, tokens) is not None
    return table


def test_every_shared_block_that_will_be_written_is_copied_first() -> None:
    """A fork while the parent's next chunk is allocated but not written: both will write blocks 2 and 3, not the same tokens."""
    tables = BlockTables(BlockPool(10), BLOCK_SIZE)
    parent = filled(tables, "parent", 12)  # 4 tokens are computed, 8 more are about to be
    child = tables.fork(parent, "child")
    tables.grow(child, 4, 8)
    assert child.blocks[0] == parent.blocks[0]
    assert not set(child.blocks[1:]) & set(parent.blocks[1:])


def test_a_full_block_that_is_cut_and_written_again_is_not_found_under_its_old_key() -> None:
    """I7: after a truncation into a block, its tail gets other tokens."""
    tables = BlockTables(BlockPool(10), BLOCK_SIZE)
    table = filled(tables, "s", 8)
    tables.pool.index.add(table.blocks, [1, 2])
    tables.truncate(table, 5, "rejected draft")
    tables.grow(table, 5, 3)
    assert tables.pool.find([1, 2]) == table.blocks[:1]


def test_a_full_block_that_is_cut_but_not_written_again_may_still_be_found_by_others() -> None:
    """What a fork keeps whole stays findable when its sibling is cut and goes on differently: the sibling gets a copy."""
    tables = BlockTables(BlockPool(10), BLOCK_SIZE)
    table = filled(tables, "s", 8)
    tables.pool.index.add(table.blocks, [1, 2])
    sibling = tables.fork(table, "sibling")
    tables.truncate(sibling, 5, "rejected draft")
    allocation = tables.grow(sibling, 5, 3)
    assert allocation is not None
    assert allocation.copies == ((table.blocks[1], sibling.blocks[1]),)
    assert tables.pool.find([1, 2]) == table.blocks


@pytest.mark.parametrize("tokens", range(1, 14))
def test_a_copy_on_write_happens_only_inside_a_block(tokens: int) -> None:
    """A fork at a block boundary writes into a new block: nothing is copied."""
    tables = BlockTables(BlockPool(10), BLOCK_SIZE)
    parent = filled(tables, "parent", tokens)
    child = tables.fork(parent, "child")
    allocation = tables.grow(child, tokens, 1)
    assert allocation is not None
    assert len(allocation.copies) == (1 if tokens % BLOCK_SIZE else 0)
    assert len(allocation.new_blocks) == (0 if tokens % BLOCK_SIZE else 1)
    tables.pool.check([("parent", parent.blocks), ("child", child.blocks)])


def test_of_blocks_with_equal_content_the_first_registered_is_found_and_then_the_next() -> None:
    """Three requests computed the same block; the free queue takes them in the order of release, not of registration."""
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    assert blocks is not None
    pool.index.add(blocks, [7, 7, 7])
    assert pool.find([7]) == [1]
    for released, found in ((1, [2]), (2, [3]), (3, [])):
        pool.release([released], f"request {released}")
        assert pool.allocate(1) == [released]
        assert pool.find([7]) == found
