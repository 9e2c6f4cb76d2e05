"""How a KV pool is laid out over layers that keep different tokens, and how many blocks a request takes of it.

Layers are put into groups of equally many layers. One physical block holds one block of tokens of every layer of one group; all groups
draw from one pool. A model with one kind of attention has one group, and the arithmetic everybody knows.

**Source:** vLLM `unify_kv_cache_spec_page_size`, `get_kv_cache_groups`, `get_max_concurrency_for_kv_cache_config`, 0.10 to 0.29.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sim.catalog.shape import ModelShape
from sim.core.need import admission_blocks, blocks_for

from .settings import Settings

_ALIKE = 1.5
"""Kinds of layer whose counts differ by less than this factor are padded to the larger count, instead of split to the smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvGroup:
    """Layers that share one block table."""

    layers: int
    """Layers that keep tokens in it; padding not counted."""
    block_size: int
    """Tokens a block: more for kinds of layer with smaller tokens, so that all blocks have the same bytes."""
    window: int | None
    """Sliding window in tokens; None keeps every token."""

    def blocks(self, tokens: int, in_flight: int) -> int:
        """Most blocks that a sequence of `tokens` tokens holds at once, with up to `in_flight` tokens scheduled and not yet done."""
        return admission_blocks(
            tokens, self.block_size, window=self.window, max_num_batched_tokens=in_flight, max_model_len=tokens
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """The pool of one rank."""

    groups: tuple[KvGroup, ...]
    """Groups of layers; one for a model with one kind of attention."""
    block_bytes: int
    """Bytes of one physical block."""
    padding_layers: int
    """Places of a group that no layer fills: bytes of every block that are wasted."""
    layers_per_group: int
    """Places of a group."""

    @property
    def is_hybrid(self) -> bool:
        """True when sequences have several block tables."""
        return len(self.groups) > 1

    def request_blocks(self, tokens: int, in_flight: int) -> int:
        """Most blocks that one sequence of `tokens` tokens holds at once, over all groups."""
        return sum(group.blocks(tokens, in_flight) for group in self.groups)

    def longest(self, blocks: int, in_flight: int, limit: int) -> int:
        """Longest sequence, up to `limit` tokens, that `blocks` blocks hold; 0 when not even one token fits."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.request_blocks(middle, in_flight) <= blocks else (low, middle - 1)
        return low


def kv_layout(model: ModelShape, settings: Settings, layers: Sequence[int], draft: ModelShape | None) -> KvLayout:
    """The layout of one rank that holds `layers`, and the layers of a `draft` model where it has one."""
    kinds: Counter[tuple[int, int | None]] = Counter()
    for kind in map(model.attention_at, layers):
        size = kind.kv_bytes_per_token(settings.kv_cache_dtype, settings.dtype, settings.tensor_parallel_size)
        kinds[size, kind.window if settings.release.hybrid_groups or _all_windowed(model) else None] += 1
    extra = 0
    if draft is not None:
        extra = draft.kv_bytes_per_token(
            settings.kv_cache_dtype, settings.draft_tensor_parallel_size, dtype=settings.dtype
        )
    if len({window for _, window in kinds}) == 1:
        # Every layer keeps the same tokens: one table, and a block as wide as all layers together, the draft's among them.
        (window,) = {window for _, window in kinds}
        per_token = sum(size * count for (size, _), count in kinds.items()) + extra
        group = KvGroup(layers=kinds.total(), block_size=settings.block_size, window=window)
        return KvLayout(
            groups=(group,),
            block_bytes=per_token * settings.block_size,
            padding_layers=0,
            layers_per_group=kinds.total(),
        )
    return _hybrid(kinds, settings.block_size, extra)


def _all_windowed(model: ModelShape) -> bool:
    return all(kind.window is not None for kind in model.attention)


def _hybrid(kinds: Counter[tuple[int, int | None]], block_size: int, extra_bytes_per_token: int) -> KvLayout:
    """Several kinds of layer: pages made alike in bytes, groups alike in layers. A draft model's layers widen every block."""
    widest = max(size for size, _ in kinds)
    fewest, most = min(kinds.values()), max(kinds.values())
    places = most if most < fewest * _ALIKE else fewest
    groups = []
    padding = 0
    for (size, window), count in kinds.items():
        number = -(-count // places)
        padding += number * places - count
        # A page that does not divide the widest one is padded up to it and keeps its block size.
        tokens = block_size * (widest // size) if widest % size == 0 else block_size
        shares = [count // number + (index < count % number) for index in range(number)]
        groups += [KvGroup(layers=share, block_size=tokens, window=window) for share in shares]
    block_bytes = (widest * places + extra_bytes_per_token) * block_size
    return KvLayout(groups=tuple(groups), block_bytes=block_bytes, padding_layers=padding, layers_per_group=places)


def sequences_blocks(prompt_tokens: int, output_tokens: int, sequences: int, block_size: int) -> int:
    """Blocks of one request that generates `sequences` continuations of one prompt (n > 1, or a beam), at its end.

    Full blocks of the prompt are shared; from the prompt's last, partly filled block on, every sequence has its own. That block is
    copied when a second sequence writes to it.
    """
    shared = prompt_tokens // block_size if sequences > 1 else 0
    own = blocks_for(prompt_tokens + output_tokens, block_size) - shared
    return shared + sequences * own


def rounding_waste_tokens(tokens: int, block_size: int) -> int:
    """Tokens of a sequence's last block that stay empty."""
    return -tokens % block_size
