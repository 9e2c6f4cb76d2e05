"""How many blocks something needs: the one place where that is computed.

The pool sizer, the admission gate, the per-step predictor and the allocator all ask here (I5), because engines whose
gate and allocator disagreed have hung or died of it (vLLM #39734, #40946, #41282).
"""

from __future__ import annotations


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // block_size)


def slots_needed(input_tokens: int, output_tokens: int) -> int:
    """Tokens whose KV must be kept to finish a request: the last sampled token is never fed back, so its KV is never written."""
    return input_tokens + output_tokens - 1


def skipped_blocks(computed_tokens: int, block_size: int, window: int | None) -> int:
    """Leading blocks that no later token attends to: those wholly below `computed_tokens - window + 1`.

    Source: vLLM V1 sliding-window manager (engine-policies §1.1.7).
    """
    if window is None:
        return 0
    return max(computed_tokens - window + 1, 0) // block_size


def new_blocks(
    *,
    total_tokens: int,
    block_size: int,
    held: int = 0,
    hits: int = 0,
    unreferenced_hits: int = 0,
    skipped: int = 0,
    copied: int = 0,
) -> int:
    """Blocks that leave the free queue when a table grows to cover `total_tokens` tokens.

    `held` and `hits` count table entries, NO_BLOCK included; `unreferenced_hits` are the real blocks among the hits that
    nobody holds (taking them costs capacity: golden trace T3); `copied` are shared blocks that must be duplicated first.
    Source: vLLM V1 `allocate_slots` (engine-policies §1.1.4).
    """
    return (
        new_blocks_for_whole(blocks_for(total_tokens, block_size), max(skipped, held + hits), unreferenced_hits)
        + copied
    )


def new_blocks_for_whole(whole: int, had: int, unreferenced_hits: int) -> int:
    """Blocks that leave the free queue when a table of `had` entries grows to `whole`, hits that nobody holds included."""
    return max(whole - had, 0) + unreferenced_hits


def admission_blocks(
    total_tokens: int, block_size: int, *, window: int | None, max_num_batched_tokens: int, max_model_len: int
) -> int:
    """Blocks that one attention group of a request can come to hold at once, for the admission gate and the pool sizer.

    Full attention keeps everything. A sliding window recycles, so it is capped by the window plus one step's chunk.
    Source: vLLM V1 after #40946 (golden trace T5).
    """
    blocks = blocks_for(min(total_tokens, max_model_len), block_size)
    if window is None:
        return blocks
    return min(blocks, blocks_for(min(window - 1 + max_num_batched_tokens, max_model_len), block_size) + 1)
