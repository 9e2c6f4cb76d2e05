"""Blocks as rows of 32-bit words: how moving and summing see a pool, a staging buffer and the CPU pool alike.

Needs torch, not triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gpu.check import ArgumentError, check_tensor
from gpu.layout import KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRows:
    """A buffer of blocks, seen as int32 words `[num_rows, num_layers, chunk_words]` in strides. Owns nothing."""

    words: Any
    """`[total words]` int32, dense: the whole buffer."""
    num_rows: int
    """Blocks in it."""
    num_layers: int
    """Layers of a block."""
    chunk_words: int
    """Words that a layer keeps of a block; a multiple of 4, so that they can be moved 16 bytes at a time."""
    block_stride: int
    """Words from a block to the next."""
    layer_stride: int
    """Words from a layer to the next."""

    @classmethod
    def of(cls, layout: KVLayout, buffer: Any, num_rows: int, *, dense: bool = False) -> BlockRows:
        """Rows of `buffer` (uint8, `num_rows * layout.block_bytes`), laid out like a pool of `layout`, or, with `dense`, block
        after block.
        """
        check_tensor("buffer", buffer, (num_rows * layout.block_bytes,), dtype=torch.uint8, contiguous=True)
        block, layer = layout.block_stride_bytes, layout.layer_stride_bytes(num_rows - 1)
        if dense:
            block, layer = layout.block_bytes, layout.chunk_bytes
        return cls(
            words=buffer.view(torch.int32),
            num_rows=num_rows,
            num_layers=layout.num_layers,
            chunk_words=layout.chunk_bytes // 4,
            block_stride=block // 4,
            layer_stride=layer // 4,
        )

    @property
    def strided(self) -> Any:
        """The words as `[num_rows, num_layers, chunk_words]`, a view."""
        shape = (self.num_rows, self.num_layers, self.chunk_words)
        return self.words.as_strided(shape, (self.block_stride, self.layer_stride, 1))


def check_ids(name: str, ids: Any, rows: BlockRows) -> int:
    """Verify block ids for `rows`; their values are checked where that costs nothing (on the CPU)."""
    num_blocks = int(ids.shape[0])
    check_tensor(name, ids, (num_blocks,), dtype=torch.int64, like=rows.words, contiguous=True)
    if num_blocks and ids.device.type == "cpu":
        low, high = min(ids.tolist()), max(ids.tolist())
        if low < 0 or high >= rows.num_rows:
            raise ArgumentError(f"{name} must lie in [0, {rows.num_rows}), but they span [{low}, {high}]")
    return num_blocks


def check_moves(source: BlockRows, target: BlockRows, source_ids: Any, target_ids: Any) -> int:
    """Verify the arguments of `move_blocks`; returns the number of blocks.

    Raises:
        ArgumentError: rows of different chunks, ids outside the rows, a target named twice, or a move that reads what
            another writes: the result would depend on the order.
    """
    if (source.num_layers, source.chunk_words) != (target.num_layers, target.chunk_words):
        raise ArgumentError(
            f"blocks of {source.num_layers} x {source.chunk_words} words cannot be moved to rows of "
            f"{target.num_layers} x {target.chunk_words}"
        )
    num_blocks = check_ids("source_ids", source_ids, source)
    check_tensor("target_ids", target_ids, (num_blocks,))
    check_ids("target_ids", target_ids, target)
    if num_blocks and target_ids.device.type == "cpu":
        targets = set(target_ids.tolist())
        if len(targets) != num_blocks:
            raise ArgumentError("target_ids names a block twice")
        overlap = targets & set(source_ids.tolist())
        if overlap and source.words.data_ptr() == target.words.data_ptr():
            raise ArgumentError(f"block {min(overlap)} is read and written by the same batch of moves")
    return num_blocks
