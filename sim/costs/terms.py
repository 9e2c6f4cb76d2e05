"""What a fitted profile comes to for one model on one GPU: the terms of a step, each a small table in seconds.

    step = host(step, sequences) + gaps between kernels + dense(tokens) + all_reduce(tokens) + rows(sampled)
         + prefill attention(chunk x context) + decode attention(batch x context) x skew + copies + swaps

where a step that holds both kinds of attention overlaps them as far as the GPU has room.

Every term is non-negative. Where the numbers come from (a file fitted to one model, or a GPU's kernel terms put together
for any model) is not known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .piecewise import Field, Grid, Line

TILE = 64
"""Queries of one head that a tile of the attention kernels holds. **Source:** FlashAttention 2, heads of 128 over a paged KV."""
NO_SKEW = Line((1.0,), (0.0,))
"""Contexts count by their mean."""
NO_OVERLAP = Line((1.0,), (1.0,))
"""Prefill and decodes take their sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTerms:
    """The terms of a step on one rank, all layers together. Times in seconds."""

    dense: Line
    """By tokens computed: every matrix, norm, activation and rotary embedding, and the token embedding."""
    rows: Line
    """By rows sampled: LM head and sampler."""
    all_reduce: Line | None = None
    """By tokens computed: all collectives of a step; None on one rank."""
    prefill: Grid
    """Attention of one chunk: tokens of the chunk x tokens cached before it."""
    decode: Grid
    """Attention of a step of decodes only: sequences x mean KV length, the new token included."""
    mixed: Grid
    """Attention of the decodes of a step that also has prefill chunks, axes as `decode`. Engines run both in one call, whose kernel
    is made for long queries: a decode costs more in it."""
    overlap: Line = NO_OVERLAP
    """Exponent q by tiles of queries in the call (one a decode, one a `TILE` tokens of chunk): prefill p and decodes d take
    `(p^q + d^q)^(1/q)` together beyond one launch, from the longer of both (large q, an emptier GPU) to their sum (1)."""
    mixed_ratio: Field | None = None
    """Factor on the attention of such a step, by tokens in chunks, their mean context, decodes and their mean KV length: what the
    terms above leave unexplained. None: 1."""
    wave_tiles: float = 0.0
    """Tiles of one head that the GPU runs at once, its multiprocessors over the heads: chunks that fit together take the time of the
    longest. 0: not known, chunks take their sum."""
    mixed_tile_s: float = 0.0
    """What each decode adds to such a step for every token of its longest chunk: the kernel's grid is (sequences x longest query)."""
    chunk_launch_s: float = 0.0
    """Part of a chunk's attention that several chunks in one call pay once."""
    decode_skew: Line = NO_SKEW
    """By sequences: share of its attention time that a batch gains for each unit by which its longest context exceeds its mean.

    Work is spread over the GPU sequence by sequence, so that the longest are finished last.
    """
    mixed_skew: Line = NO_SKEW
    """The same in steps with prefill chunks."""
    excess_token_s: float = 0.0
    """What a decode costs for every token by which its context falls short of the longest of its batch; besides skew, which states
    it as a share."""
    gap_s: float = 0.0
    """Gaps between the kernels of a step: the device's, whatever the host does."""
    step_s: float = 0.0
    """Host time of a step, which planning ahead may hide."""
    seq_s: float = 0.0
    """The same a sequence."""
    token_s: float = 0.0
    """What a token computed takes beyond its kernels: clocks that sustained work lowers, collectives of long messages."""
    copy_block_s: float = 0.0
    """Copying one KV block on the device."""
    swap_block_s: float = 0.0
    """Moving one KV block between the device and the host."""
    samples: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """How far a term may be off as a whole: draws of the factor that makes it right, by `dense`, `rows`, `prefill`, `decode` and `mixed`.
    A term that is missing is taken to be right."""
    drawn: tuple[Mapping[str, Any], ...] = ()
    """Draws of all tables together, as a file has them (`profile_file.tables_of` reads one), where whole steps were timed. They say more
    than `samples` then: where one term is too dear because another is too cheap, both are."""
    spreads: Mapping[str, float] = field(default_factory=dict)
    """Standard deviations of logarithms of factors, by what is not known: `step`, what the fit leaves of a whole step; `composition`, of
    another model's shape; `gap`, of the stated gaps between kernels."""
    host_samples: tuple[tuple[float, float, float], ...] = ()
    """Draws of `step_s`, `seq_s` and `token_s` together, where they were fitted to a run."""
    padded_sizes: tuple[int, ...] = ()
    """Token counts for which CUDA graphs exist: a smaller step is padded up to the next one. Empty: never padded."""
    max_tokens: int
    """Most tokens a step had where these terms were measured."""
    max_seqs: int
    """Most decodes."""
    max_context_tokens: int
    """Longest mean KV length."""
