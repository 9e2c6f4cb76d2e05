"""Random batches on a paged cache: for proofs against the twins, on any device.

Whatever no sequence may read is NaN: slots behind a sequence's last token, blocks nobody owns, NO_BLOCK, and the blocks that
slid out of a window, whose table entries are NO_BLOCK as the core leaves them. An answer without NaN has read nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from gpu.kernels.attention import DecodeCall, PrefillCall
from gpu.kernels.blocks_twin import store_kv_twin
from gpu.kernels.launch import E4M3, KVView

Scaling = Literal["none", "static", "per_token_head"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes and formats of a batch."""

    num_kv_heads: int = 2
    group: int = 4
    """Query heads a KV head."""
    head_dim: int = 64
    block_size: int = 16
    dtype: Any = torch.float16
    scaling: Scaling = "none"
    """How the cache is stored: in `dtype`, or in fp8 with constant scales or one a vector."""
    window: int | None = None
    num_sink_tokens: int = 0
    sinks: bool = False
    """Whether each query head has a sink logit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedBatch:
    """Sequences whose KV is in a paged cache, and the flat KV that was written there."""

    shape: Shape
    lengths: tuple[int, ...]
    """Tokens of each sequence."""
    cache: KVView
    block_table: Any
    """`[num_seqs, max_blocks]` int32."""
    keys: tuple[Any, ...]
    """Per sequence `[length, num_kv_heads, head_dim]`, in `shape.dtype`, on the CPU."""
    values: tuple[Any, ...]
    sinks: Any
    """`[num_q_heads]` float32, or None."""
    generator: Any
    """Where further random numbers come from, on the CPU."""

    def _arguments(self, query: Any) -> dict[str, Any]:
        return {
            "query": query,
            "cache": self.cache,
            "block_table": self.block_table,
            "seq_lens": torch.tensor(self.lengths, dtype=torch.int32, device=query.device),
            "softmax_scale": self.shape.head_dim**-0.5,
            "window": self.shape.window,
            "num_sink_tokens": self.shape.num_sink_tokens,
            "sinks": self.sinks,
        }

    def _query(self, rows: int) -> Any:
        heads = self.shape.num_kv_heads * self.shape.group
        numbers = torch.randn((rows, heads, self.shape.head_dim), generator=self.generator)
        return numbers.to(self.cache.kv.device, self.shape.dtype)

    def decode(self, num_splits: int = 1) -> DecodeCall:
        """One query token a sequence; the output is NaN until it is written."""
        query = self._query(len(self.lengths))
        rows, heads, head_dim = query.shape
        part = torch.full((rows, heads, num_splits, head_dim), float("nan"), device=query.device)
        lse = torch.full((rows, heads, num_splits), float("nan"), device=query.device)
        out = torch.full_like(query, float("nan"))
        more = {"num_splits": num_splits, "partial_out": part, "partial_lse": lse}
        return DecodeCall(out=out, **self._arguments(query), **more)

    def prefill(self, query_tokens: Sequence[int]) -> PrefillCall:
        """The last `query_tokens[s]` tokens of each sequence; the output is NaN until it is written."""
        starts = [0]
        for tokens in query_tokens:
            starts.append(starts[-1] + tokens)
        query = self._query(starts[-1])
        at = torch.tensor(starts, dtype=torch.int32, device=query.device)
        return PrefillCall(out=torch.full_like(query, float("nan")), query_starts=at, **self._arguments(query))


def paged_batch(
    shape: Shape, lengths: Sequence[int], *, seed: int = 0, oldest_query: int = 1, device: Any = "cpu"
) -> PagedBatch:
    """A batch of sequences of these lengths, in blocks drawn at random; the same on every device. `oldest_query` is the most
    tokens a query will have: with a window, blocks that none of them sees are left out of the table.
    """
    generator = torch.Generator().manual_seed(seed)
    size = shape.block_size
    counts = [-(-length // size) for length in lengths]
    num_blocks = sum(counts) + 2
    order = (torch.randperm(num_blocks, generator=generator) + 1).tolist()
    table = torch.zeros((len(lengths), max([*counts, 1])), dtype=torch.int32)
    cache = empty_cache(shape, num_blocks)
    keys, values = [], []
    for seq, length in enumerate(lengths):
        blocks = [order.pop() for _ in range(counts[seq])]
        table[seq, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        new = (length, shape.num_kv_heads, shape.head_dim)
        keys.append(torch.randn(new, generator=generator).to(shape.dtype))
        values.append(torch.randn(new, generator=generator).to(shape.dtype))
        slots = [blocks[token // size] * size + token % size for token in range(length)]
        store_kv_twin(keys[-1], values[-1], cache, torch.tensor(slots, dtype=torch.int64))
        if shape.window is not None:  # what slid out of the window of the oldest query, sink tokens apart
            slid = max(length - oldest_query - shape.window + 1, 0) // size
            table[seq, -(-shape.num_sink_tokens // size) : slid] = 0
    heads = shape.num_kv_heads * shape.group
    return PagedBatch(
        shape=shape,
        lengths=tuple(lengths),
        cache=_moved(cache, device),
        block_table=table.to(device),
        keys=tuple(keys),
        values=tuple(values),
        sinks=torch.randn(heads, generator=generator).to(device) if shape.sinks else None,
        generator=generator,
    )


def empty_cache(shape: Shape, num_blocks: int, device: Any = "cpu") -> KVView:
    """One layer in which everything is NaN."""
    sizes = (num_blocks + 1, 2, shape.block_size, shape.num_kv_heads, shape.head_dim)
    if shape.scaling == "none":
        return KVView.of(torch.full(sizes, float("nan"), dtype=shape.dtype, device=device))
    kv = torch.full(sizes, 0xFF, dtype=torch.uint8, device=device).view(E4M3)
    if shape.scaling == "static":
        return KVView.of(kv, torch.tensor([0.0125, 0.02], device=device).view(1, 2, 1, 1).expand(sizes[:4]))
    return KVView.of(kv, torch.full(sizes[:4], float("nan"), device=device), dynamic=True)


def _moved(cache: KVView, device: Any) -> KVView:
    """The same cache on another device."""
    if torch.device(device).type == "cpu":
        return cache
    scale = None if cache.scale is None else cache.scale.to(device)
    return KVView.of(cache.kv.to(device), scale, dynamic=cache.dynamic)
