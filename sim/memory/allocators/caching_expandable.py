"""PyTorch's caching allocator, expandable segments: virtual ranges that grow and shrink page by page.

One range for each stream and pool is reserved as address space, 1 1/8 of the device. Memory is mapped into it in pages of
2 MiB (small pool) or 20 MiB (large pool) at the lowest address where it is needed, and free pages can be unmapped from the
middle. **Source:** c10/cuda/CUDACachingAllocator.cpp (Note [Expandable Segments], `try_allocate_expandable_block`,
`map_block`, `unmap_block`), PyTorch 2.5 to 2.13.
"""

from __future__ import annotations

from .base import round_up
from .caching_blocks import Block, BlockPool, VirtualRange
from .caching_state import CachingState, chain


def find_expandable_fit(pool: BlockPool, stream: int, size: int) -> Block | None:
    """Best fit among free blocks, where one at the mapped end of a range counts with what it could still grow to."""
    blocks = pool.fitting(stream, size)
    if not blocks:
        return None
    found = blocks[0]
    for following in blocks[1:]:
        if found.virtual is None or _expandable_size(following) >= _expandable_size(found):
            break
        found = following
    return found


def _expandable_size(block: Block) -> int:
    after = block.next
    return block.size + (after.size if after is not None and not after.mapped else 0)


def map_for(state: CachingState, pool: BlockPool, stream: int, size: int) -> Block | None:
    """Grow a range until it has a free block of `size`; the block is taken out of the pool.

    None if the device has no room; pages mapped before that was seen stay mapped, as in PyTorch.
    """
    block = _lowest_candidate(state, pool, stream, size)
    if not block.mapped and not _map(state, block, min(block.size, size)):
        return None
    while block.size < size:
        following = block.next
        assert following is not None, "a candidate is followed by address space"
        if not _map(state, following, min(size - block.size, following.size)):
            return None
        block = following  # which has swallowed the block before it
    pool.remove(block)
    return block


def _lowest_candidate(state: CachingState, pool: BlockPool, stream: int, size: int) -> Block:
    """The lowest free or unmapped block from which `size` bytes of address space can be had; a new range if there is none."""
    for block in pool.unmapped(stream):
        before = block.prev
        start = before if before is not None and not before.is_active else block
        room = 0
        walk: Block | None = start
        while walk is not None and not walk.is_active and room < size:
            room += walk.size
            walk = walk.next
        if room >= size:
            return start
    return reserve_range(state, pool, stream, state.new_address(_range_size(state, pool, size)), size)


def _range_size(state: CachingState, pool: BlockPool, size: int) -> int:
    # A model of an unlimited device still needs a range that holds what is asked for.
    return round_up(max(state.memory.total_bytes * 9 // 8, size), pool.page_bytes)


def reserve_range(state: CachingState, pool: BlockPool, stream: int, address: int, at_least: int) -> Block:
    """Reserve the address space of a new expandable segment: one unmapped block."""
    size = _range_size(state, pool, at_least)
    virtual = VirtualRange(address=address, size=size, page_bytes=pool.page_bytes)
    block = Block(address=address, size=size, stream=stream, pool=pool, virtual=virtual)
    block.mapped = False
    pool.insert_unmapped(block)
    state.heads[address] = block
    return block


def _map(state: CachingState, block: Block, size: int) -> bool:
    """Back the pages that hold the first `size` bytes of an unmapped block; False, changing nothing, if there is no room."""
    assert block.virtual is not None
    mapped = min(round_up(size, block.virtual.page_bytes), block.size)
    if mapped > state.device_free_bytes:
        return False
    map_pages(state, block, mapped)
    return True


def map_pages(state: CachingState, block: Block, mapped: int) -> None:
    """Back the first `mapped` bytes (whole pages) of an unmapped block and join them with free neighbours."""
    pool, address = block.pool, block.address
    pool.remove_unmapped(block)
    block.mapped = True
    if mapped < block.size:
        rest = Block(
            address=address + mapped, size=block.size - mapped, stream=block.stream, pool=pool, virtual=block.virtual
        )
        rest.mapped = False
        rest.insert_after(block, block.next)
        pool.insert_unmapped(rest)
        block.size = mapped
    state.merge(block, block.prev)
    state.merge(block, block.next)
    pool.insert(block)
    state.count_reserved(pool, mapped)
    state.stats.num_device_alloc += 1
    state.record("segment_map", address, mapped, stream=block.stream, pool_id=pool.pool_id)


def unmap(state: CachingState, block: Block) -> None:
    """Return the whole pages of a free block to the device; what lies in pages shared with others stays."""
    assert block.virtual is not None
    page, base, pool = block.virtual.page_bytes, block.virtual.address, block.pool
    start = base + round_up(block.address - base, page)
    end = base + (block.address + block.size - base) // page * page
    if start >= end:
        return
    pool.remove(block)
    for address, size, before in (
        (block.address, start - block.address, True),
        (end, block.address + block.size - end, False),
    ):
        if size:
            rest = Block(address=address, size=size, stream=block.stream, pool=pool, virtual=block.virtual)
            if before:
                rest.insert_after(block.prev, block)
                if address in state.heads:
                    state.heads[address] = rest
            else:
                rest.insert_after(block, block.next)
            pool.insert(rest)
    block.address, block.size, block.mapped = start, end - start, False
    state.merge(block, block.prev)
    state.merge(block, block.next)
    pool.insert_unmapped(block)
    state.count_reserved(pool, start - end)
    state.stats.num_device_free += 1
    state.record("segment_unmap", start, end - start, stream=block.stream, pool_id=pool.pool_id)
    if not block.is_split:  # nothing of the range is mapped any more
        pool.remove_unmapped(block)
        del state.heads[block.address]


def mapped_runs(head: Block) -> list[list[Block]]:
    """The contiguous mapped parts of a segment or virtual range: what a snapshot calls segments."""
    runs: list[list[Block]] = []
    for block in chain(head):
        if not block.mapped:
            continue
        if block.prev is not None and block.prev.mapped:
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs
