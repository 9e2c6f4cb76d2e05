"""Move blocks: copy whole blocks from rows of one buffer to rows of another, all layers, in one launch.

    target[target_ids[i], layer, :] = source[source_ids[i], layer, :]

Copy-on-write moves inside the pool, a gather from the pool into a staging buffer, a scatter back. A block is bytes here:
numbers and scales alike, whatever the format. No pair may read what another writes (the core never plans that); checked
by `check_moves`.

**Source:** `copy_blocks` and `swap_blocks`, vLLM; one kernel a batch instead of one memcpy a block and layer.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from .block_rows import BlockRows, check_moves
from .launch import Launch

WORDS = 2048
"""Words that one program moves: four 16-byte accesses a thread."""


@triton.jit
def move_blocks_kernel(
    source_ptr,  # int32 words: [rows, num_layers, chunk_words] in strides
    target_ptr,  # likewise
    source_ids_ptr,  # [num_blocks] int64: row of `source` of each block
    target_ids_ptr,  # [num_blocks] int64
    source_block_stride,  # words from a row to the next
    source_layer_stride,
    target_block_stride,
    target_layer_stride,
    chunk_words,  # words that one layer keeps of a block; a multiple of 4
    WORDS: tl.constexpr,
):
    """One program moves WORDS words of one layer of one block."""
    pair = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    words = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    source = tl.load(source_ids_ptr + pair) * source_block_stride + layer * source_layer_stride
    target = tl.load(target_ids_ptr + pair) * target_block_stride + layer * target_layer_stride
    # Sixteen bytes are in or out together: compare vectors, so that the compiler sees it.
    inside = words // 4 < chunk_words // 4
    tl.store(target_ptr + target + words, tl.load(source_ptr + source + words, mask=inside), mask=inside)


def move_blocks_launch(source: BlockRows, target: BlockRows, source_ids: Any, target_ids: Any) -> Launch | None:
    """The launch that `move_blocks` runs; None for no blocks."""
    num_blocks = check_moves(source, target, source_ids, target_ids)
    if num_blocks == 0:
        return None
    return Launch(
        kernel=move_blocks_kernel,
        grid=(num_blocks, source.num_layers, triton.cdiv(source.chunk_words, WORDS)),
        arguments=(
            source.words,
            target.words,
            source_ids,
            target_ids,
            source.block_stride,
            source.layer_stride,
            target.block_stride,
            target.layer_stride,
            source.chunk_words,
        ),
        constants={"WORDS": WORDS},
        num_warps=4,
    )


def move_blocks(source: BlockRows, target: BlockRows, source_ids: Any, target_ids: Any) -> None:
    """Copy block `source_ids[i]` of `source` to block `target_ids[i]` of `target`, for every i. Changes `target` only.

    Args:
        source: rows of blocks.
        target: rows of blocks of the same chunk; may be the same buffer.
        source_ids: `[num_blocks]` int64.
        target_ids: `[num_blocks]` int64.
    """
    launch = move_blocks_launch(source, target, source_ids, target_ids)
    if launch is not None:
        launch.run()
