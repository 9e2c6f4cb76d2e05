"""Put a recorded layout into the caching allocator: the same segments, the same blocks, at the recorded addresses."""

from __future__ import annotations

from collections.abc import Sequence

from .caching import CachingAllocator
from .caching_blocks import Block, BlockPool
from .caching_expandable import map_pages, reserve_range
from .caching_sizes import SMALL_LIMIT_BYTES, round_size
from .caching_state import CachingState, chain
from .snapshot_start import StartBlock, StartSegment, StartState


def start_id(block: StartBlock) -> str:
    """The allocation id of a block that lives when the history begins."""
    return f"{block.address:#x}@start"


def restore(allocator: CachingAllocator, start: StartState) -> dict[str, int]:
    """Fill a new allocator with the state at the beginning of a history; nobody is asked whether the device has room.

    Returns the requested bytes of what is alive, by allocation id.
    """
    core = allocator.core
    core.keep_clear_of(max((segment.address + segment.size_bytes for segment in start.segments), default=0))
    ranges: dict[tuple[int, tuple[int, int], bool], list[StartSegment]] = {}
    for segment in start.segments:
        pool = core.pool(segment.pool_id, small=segment.small)
        if segment.expandable:
            ranges.setdefault((segment.stream, segment.pool_id, segment.small), []).append(segment)
        else:
            whole = core.add_segment(pool, segment.stream, segment.size_bytes, segment.address)
            pool.insert(whole)
            _place(allocator, whole, segment)
    for (stream, pool_id, small), parts in ranges.items():
        _restore_range(allocator, core.pool(pool_id, small=small), stream, parts)
    return {allocation_id: block.requested for allocation_id, block in allocator.alive.items()}


def _restore_range(allocator: CachingAllocator, pool: BlockPool, stream: int, parts: Sequence[StartSegment]) -> None:
    """One expandable segment: its lowest mapped page is taken for its beginning."""
    core = allocator.core
    base = parts[0].address
    end = parts[-1].address + parts[-1].size_bytes
    head = reserve_range(core, pool, stream, base, end - base)
    core.keep_clear_of(head.address + head.size)
    for part in parts:
        block = _block_at(chain(core.heads[base]), part.address)
        map_pages(core, _cut_unmapped(block, part.address), part.size_bytes)
        for live in part.blocks:
            _place_block(allocator, _block_at(chain(core.heads[base]), live.address), part, live)


def _cut_unmapped(block: Block, address: int) -> Block:
    """The part of an unmapped block from `address` on."""
    if block.address == address:
        return block
    pool = block.pool
    pool.remove_unmapped(block)
    right = Block(
        address=address,
        size=block.address + block.size - address,
        stream=block.stream,
        pool=pool,
        virtual=block.virtual,
    )
    right.mapped = False
    right.insert_after(block, block.next)
    block.size = address - block.address
    pool.insert_unmapped(block)
    pool.insert_unmapped(right)
    return right


def _place(allocator: CachingAllocator, whole: Block, segment: StartSegment) -> None:
    free = whole  # the free block that holds the rest of the segment
    for live in segment.blocks:
        _place_block(allocator, free, segment, live)
        free = chain(allocator.core.heads[segment.address])[-1]


def _block_at(blocks: Sequence[Block], address: int) -> Block:
    return next(block for block in blocks if block.address <= address < block.address + block.size)


def _place_block(allocator: CachingAllocator, free: Block, segment: StartSegment, live: StartBlock) -> None:
    """Make a live block out of a part of a free one."""
    core = allocator.core
    size = live.size_bytes or _size_of(core, segment, live)
    pool = free.pool
    pool.remove(free)
    if live.address > free.address:
        left = core.split(free, live.address - free.address)
        pool.insert(left)
        if left.virtual is None:
            core.stats.add("inactive_split", 1, small=pool.small)
            core.stats.add("inactive_split_bytes", left.size, small=pool.small)
        pool.remove(free)
    was_split, splits = free.is_split, size < free.size
    block = core.split(free, size) if splits else free
    core.activate(
        block, live.requested_bytes, was_split=was_split and not splits, allocation_id=start_id(live), tag=live.tag
    )
    if live.pending:
        core.deactivate(block)
        allocator.pending.add_observed(start_id(live), block)
    else:
        allocator.adopt(start_id(live), block)


def _size_of(core: CachingState, segment: StartSegment, live: StartBlock) -> int:
    """The size of a block that was freed before the snapshot was taken: rounded, with the rest that was not split off.

    In the large pool a rest of 1 MiB or less is never a block of its own, so a gap that small belongs to the block before it.
    A larger gap is taken for free memory, although up to 1 MiB of it may have belonged to the block.
    """
    following = [other.address for other in segment.blocks if other.address > live.address]
    room = min([*following, segment.address + segment.size_bytes]) - live.address
    size = min(round_size(live.requested_bytes, core.settings), room)
    if not segment.small and not segment.expandable and room - size <= SMALL_LIMIT_BYTES:
        return room
    return size
