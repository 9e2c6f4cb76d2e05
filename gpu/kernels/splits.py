"""Over how many programs the tokens of a decoding sequence are spread, and the bytes that this takes.

Needs torch nowhere: sizes in, numbers out.
"""

from __future__ import annotations

MIN_TOKENS_PER_SPLIT = 128
"""A split shorter than this costs more to merge than it saves. **Source:** FlashInfer's smallest chunk."""
MOST_SPLITS = 64
"""More are not worth a merge."""
TILE_TOKENS = 32
"""Tokens are dealt out by tiles of so many (heads of 128 numbers of 16 bits)."""
RESIDENT = {(8, 0): 4, (8, 9): 2, (9, 0): 5, (10, 0): 5, (12, 0): 2}
"""Decode programs that a multiprocessor holds at once (heads of 128 numbers of 16 bits), by compute capability: what the compiled kernel's
registers and shared memory allow."""
BUSY = 3
"""Programs a multiprocessor that keep the memory busy: of the same kernel, 96 KiB under way."""
MERGE_TOKENS = 8
"""What writing and reading one split's result costs, in tokens whose K and V have as many bytes (four query heads a KV head)."""
GOOD = 0.9
"""With so much of the memory's time used well no further split is worth it."""


def resident_programs(capability: tuple[int, int]) -> int:
    """Decode programs that a multiprocessor holds at once; of a device that is not listed, what the oldest one holds."""
    return RESIDENT.get(capability, RESIDENT[8, 0])


def wave_share(*, programs: int, slots: int, enough: int) -> float:
    """Share of the time for which programs of equal work keep the memory busy, when `slots` run at once and `enough` of them fill it.

    Full waves do, if they are enough. The programs of the last wave run together, and when they are too few to fill the memory,
    it waits for them.
    """
    last = programs % slots
    full = programs - last
    return programs / (full * max(1.0, enough / slots) + (max(last, enough) if last else 0))


def split_share(*, num_splits: int, pairs: int, max_tokens: int, num_sms: int, programs_per_sm: int) -> float:
    """Share of the memory's time that decode attention uses well with `num_splits` for each of `pairs` (sequence, KV head): of waves that
    are full, tiles dealt out evenly, and bytes that a merge does not need.
    """
    enough = num_sms * min(BUSY, programs_per_sm)
    busy = wave_share(programs=pairs * num_splits, slots=num_sms * programs_per_sm, enough=enough)
    tiles = max(1, -(-max_tokens // TILE_TOKENS))
    even = tiles / (-(-tiles // num_splits) * num_splits)
    needed = max_tokens / (max_tokens + MERGE_TOKENS * num_splits) if num_splits > 1 else 1.0
    return busy * even * needed


def choose_splits(
    *, num_seqs: int, num_kv_heads: int, max_tokens: int, num_sms: int, programs_per_sm: int = RESIDENT[9, 0]
) -> int:
    """Programs that share one sequence and KV head in decode: as few as use the memory well, none shorter than `MIN_TOKENS_PER_SPLIT`.

    Depends on sizes that are fixed for a captured graph, never on the lengths of a step.
    """
    most = max(1, min(-(-max_tokens // MIN_TOKENS_PER_SPLIT), MOST_SPLITS))
    sizes = {"pairs": max(num_seqs * num_kv_heads, 1), "max_tokens": max(max_tokens, 1), "num_sms": num_sms}
    shares = {
        splits: split_share(num_splits=splits, programs_per_sm=programs_per_sm, **sizes)
        for splits in range(1, most + 1)
    }
    return next((splits for splits, share in shares.items() if share >= GOOD), max(shares, key=shares.__getitem__))


def split_bytes(*, num_seqs: int, num_q_heads: int, head_dim: int, num_splits: int) -> int:
    """Workspace of the partial results: `num_seqs * num_q_heads * num_splits * (head_dim + 1)` float32; none for one split.

    Asked before the KV pool is sized, so that a full batch cannot overflow it (vLLM #40023).
    """
    return 0 if num_splits == 1 else 4 * num_seqs * num_q_heads * num_splits * (head_dim + 1)
