"""The torch twins of what writes, moves and sums blocks. Exact: no tolerance, but for the quotient that fp8 rounds.

In fp8, kernel and twin divide in float32 and round to nearest even; a result may differ by one unit in the last place
where the two divisions differ by one unit of float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .block_rows import BlockRows, check_ids, check_moves
from .launch import E4M3, KVView
from .scratch import Allocating, Scratch

E4M3_MAX = 448.0


def store_kv_twin(key: Any, value: Any, cache: KVView, slot_mapping: Any, scratch: Scratch | None = None) -> None:
    """As `store_kv`."""
    cache.check_new_tokens(key, value, slot_mapping)
    work = Allocating(key.device) if scratch is None else scratch
    for start, end, block, offset in _runs(slot_mapping.tolist(), int(cache.kv.shape[2])):
        for half, vectors in ((0, key[start:end]), (1, value[start:end])):
            at = (block, half, slice(offset, offset + end - start))
            if cache.scale is None:
                cache.kv[at].copy_(vectors)
            else:
                with work.scope():
                    _quantise(vectors, cache.kv[at], cache.scale[at], cache.dynamic, work)


def _runs(slots: list[int], block_size: int) -> Iterator[tuple[int, int, int, int]]:
    """Tokens `[start, end)` that follow each other in one block, with block and first offset; padding is left out."""
    start = 0
    for end in range(1, len(slots) + 1):
        if end == len(slots) or slots[end] != slots[end - 1] + 1 or slots[end] % block_size == 0:
            block, offset = divmod(slots[start], block_size)
            if block > 0:
                yield start, end, block, offset
            start = end


def _quantise(vectors: Any, place: Any, scale: Any, dynamic: bool, work: Scratch) -> None:
    """Vectors `[tokens, num_kv_heads, head_dim]` into `place` (fp8) with `scale` `[tokens, num_kv_heads]`, which is written
    when `dynamic`.
    """
    shape = tuple(vectors.shape)
    wide = work.take("wide", shape, torch.float32)
    wide.copy_(vectors)
    if dynamic:
        size = torch.abs(wide, out=work.take("size", shape, torch.float32))
        torch.amax(size, 2, out=scale).mul_(1.0 / E4M3_MAX)
        zero = torch.eq(scale, 0.0, out=work.take("zero", shape[:2], torch.bool))
        scale.masked_fill_(zero, 1.0)
    place.copy_(wide.div_(scale[..., None]).clamp_(-E4M3_MAX, E4M3_MAX))


def gather_kv(cache: KVView, blocks: Any, heads_first: Any, half: int, scratch: Scratch | None = None) -> None:
    """The numbers of K (`half` 0) or V (1) of whole blocks, scales applied, in table order.

    Args:
        cache: one layer of the pool.
        blocks: `[n]` block ids.
        heads_first: `[num_kv_heads, n * block_size, head_dim]`, in the format to compute in; written.
        half: which of the two.
        scratch: where to put what is read.
    """
    work = Allocating(blocks.device) if scratch is None else scratch
    _, _, block_size, heads, head_dim = cache.kv.shape
    count = int(blocks.shape[0])
    target = heads_first.view(heads, count, block_size, head_dim)
    with work.scope():
        raw = work.take("blocks", (count, block_size, heads, head_dim), cache.bits.dtype)
        torch.index_select(cache.bits[:, half], 0, blocks, out=raw)
        target.copy_((raw.view(E4M3) if cache.scale is not None else raw).permute(2, 0, 1, 3))
        if cache.scale is not None:
            scales = work.take("scales", (count, block_size, heads), torch.float32)
            torch.index_select(cache.scale[:, half], 0, blocks, out=scales)
            target.mul_(scales.permute(2, 0, 1)[..., None])


def move_blocks_twin(source: BlockRows, target: BlockRows, source_ids: Any, target_ids: Any) -> None:
    """As `move_blocks`."""
    check_moves(source, target, source_ids, target_ids)
    reads, writes = source.strided, target.strided
    for read, written in zip(source_ids.tolist(), target_ids.tolist(), strict=True):
        writes[written].copy_(reads[read])


def block_checksum_twin(rows: BlockRows, block_ids: Any, out: Any) -> Any:
    """As `block_checksum`; in int64, whose lower half is right whatever overflows."""
    check_ids("block_ids", block_ids, rows)
    low = 0xFFFFFFFF
    place = torch.arange(rows.num_layers * rows.chunk_words, device=out.device) * 0x9E3779B9
    for index, block in enumerate(block_ids.tolist()):
        mixed = ((rows.strided[block].reshape(-1).to(torch.int64) ^ place) & low) * 0x85EBCA6B & low
        total = int(((mixed ^ (mixed >> 16)) * 0xC2B2AE35 & low).sum()) & low
        out[index] = total - (1 << 32) if total >= 1 << 31 else total
    return out
