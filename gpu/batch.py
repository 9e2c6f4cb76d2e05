"""StepBatch: the work of one step as tensors, in buffers that are taken once.

Rows are tokens: first one of each decoding sequence, then the chunks of the others, sequence after sequence. The buffers are
filled on the host through plain C arrays over the tensors' memory, so that a step makes no tensor and no allocator call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sim.core.blocks import NO_BLOCK

from .group_rows import GroupBuffers, GroupRows, slots_of
from .step_buffer import StepArena, StepBuffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one sequence computes in a step."""

    name: str
    """Whose it is, for error messages."""
    token_ids: Sequence[int]
    """The tokens computed now."""
    context_tokens: int
    """Tokens before them, whose KV exists."""
    block_table: Sequence[int]
    """Its blocks in token order; NO_BLOCK for one that was given up."""
    samples: bool
    """Whether a token is sampled from the last of them."""
    group_tables: tuple[Sequence[int], ...] = ()
    """Of a model with several attention groups the table of each; `block_table` is the first. Empty for a model with one."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed now."""
        return len(self.token_ids)

    @property
    def tables(self) -> tuple[Sequence[int], ...]:
        """The block table of each attention group."""
        return self.group_tables or (self.block_table,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen, for all requests."""

    temperature: float = 0.0
    """0 takes the largest logit."""
    top_k: int = 0
    """0 for all."""
    top_p: float = 1.0
    """1 for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """One step, on the device. Views of `BatchBuffers`, valid until the next batch is made."""

    names: tuple[str, ...]
    """The sequences, in the order of the rows."""
    sampled: tuple[str, ...]
    """Those of them that sample, in that order: the first rows of `tokens_out`."""
    num_decodes: int
    """Leading sequences of one token each, rows of padding included."""
    token_ids: Any
    """`[num_tokens]` int64."""
    positions: Any
    """`[num_tokens]` int64: places in the sequence, counting what was given up."""
    groups: tuple[GroupRows, ...]
    """Slots, block tables and lengths in each attention group."""
    query_starts: Any
    """`[num_seqs - num_decodes + 1]` int32: rows of each chunk, counted from the first chunk's first row."""
    sample_rows: Any
    """`[num_sampled]` int64: rows from which a token is sampled."""
    temperature: Any
    top_k: Any
    top_p: Any
    uniform: Any
    """`[num_sampled]` each, as `SampleCall` wants them."""
    tokens_out: Any
    """`[num_sampled]` int64; written by sampling."""


class BatchBuffers:
    """Room for the largest step that the engine may plan."""

    def __init__(self, *, max_tokens: int, max_seqs: int, max_blocks: int, device: Any, num_groups: int = 1) -> None:
        """`max_blocks` is the length of the longest block table, `num_groups` how many of them a sequence has."""
        self.max_tokens, self.max_seqs, self.max_blocks = max_tokens, max_seqs, max_blocks
        self._arena = arena = StepArena(device)
        self._query_starts = StepBuffer(max_seqs + 1, torch.int32, arena)
        self._sample_rows = StepBuffer(max_seqs, torch.int64, arena)
        self._temperature, self._top_p, self._uniform = (StepBuffer(max_seqs, torch.float32, arena) for _ in range(3))
        self._top_k = StepBuffer(max_seqs, torch.int32, arena)
        self._token_ids, self._positions = (StepBuffer(max_tokens, torch.int64, arena) for _ in range(2))
        rows = [GroupBuffers.rows(max_tokens, max_seqs, arena) for _ in range(num_groups)]
        self._groups = [GroupBuffers(*own, StepBuffer(max_seqs * max_blocks, torch.int32, arena)) for own in rows]
        arena.make()
        self._tokens_out = torch.zeros(max_seqs, dtype=torch.int64, device=device)

    @property
    def tensors(self) -> list[Any]:
        """The buffers, on host and device."""
        return [*self._arena.tensors, self._tokens_out]

    def fill(
        self,
        work: Sequence[Work],
        block_size: int,
        sampling: Sampling,
        uniform: Sequence[float] = (),
        *,
        pad_to: int | None = None,
    ) -> StepBatch:
        """The batch of `work`; `uniform` has one random number a sampling sequence, in the order of `work`.

        With `pad_to`, a decode batch of so many rows whose tensors have the shapes and places of every batch padded to it, as a
        captured graph needs. Rows beyond the work store into no slot, read no KV, and what they sample is nobody's.

        Raises:
            ValueError: more than the buffers have room for, a block table too short for its tokens, another number of block
                tables than there are groups, or something other than decodes to be padded.
        """
        if pad_to is not None and (len(work) > pad_to or any(item.num_tokens > 1 or not item.samples for item in work)):
            raise ValueError(f"{len(work)} sequences are no decode batch that could be padded to {pad_to} rows")
        drawn = dict(zip((item.name for item in work if item.samples), uniform, strict=bool(uniform)))
        order = sorted(work, key=lambda item: item.num_tokens > 1)  # stable: running order is kept among equals
        num_tokens = sum(item.num_tokens for item in order)
        width = max(1, *(len(table) for item in order for table in item.tables)) if pad_to is None else self.max_blocks
        if (
            max(num_tokens, pad_to or 0) > self.max_tokens
            or max(len(order), pad_to or 0) > self.max_seqs
            or width > self.max_blocks
        ):
            raise ValueError(
                f"a step of {num_tokens} tokens, {len(order)} sequences and {width} blocks a table does not fit buffers "
                f"for {self.max_tokens}, {self.max_seqs} and {self.max_blocks}"
            )
        num_decodes = sum(item.num_tokens == 1 for item in order)
        self._arena.refill()
        self._query_starts.cells[0] = 0
        row = 0
        rows: list[int] = []
        for index, item in enumerate(order):
            end = row + item.num_tokens
            last = item.context_tokens + item.num_tokens
            self._token_ids.cells[row:end] = item.token_ids
            self._positions.cells[row:end] = range(item.context_tokens, last)
            for group, table in zip(self._groups, item.tables, strict=True):
                slots = slots_of(item.name, table, item.context_tokens, last, block_size)
                group.put(index, row, slots, table, width, last - table.count(NO_BLOCK) * block_size)
            if index >= num_decodes:
                self._query_starts.cells[index - num_decodes + 1] = end - num_decodes
            if item.samples:
                rows.append(end - 1)
            row = end
        sampled = tuple(item.name for item in order if item.samples)
        count = len(sampled)
        self._sample_rows.cells[:count] = rows
        self._temperature.cells[:count] = [sampling.temperature] * count
        self._top_k.cells[:count] = [sampling.top_k] * count
        self._top_p.cells[:count] = [sampling.top_p] * count
        self._uniform.cells[:count] = [drawn.get(name, 0.0) for name in sampled]
        num_seqs = len(order)
        if pad_to is not None:
            self._pad(num_seqs, pad_to)
            num_decodes = num_seqs = num_tokens = count = pad_to
        batch = StepBatch(
            names=tuple(item.name for item in order),
            sampled=sampled,
            num_decodes=num_decodes,
            token_ids=self._token_ids.sent(num_tokens),
            positions=self._positions.sent(num_tokens),
            groups=tuple(group.sent(num_tokens, num_seqs, width) for group in self._groups),
            query_starts=self._query_starts.sent(num_seqs - num_decodes + 1),
            sample_rows=self._sample_rows.sent(count),
            temperature=self._temperature.sent(count),
            top_k=self._top_k.sent(count),
            top_p=self._top_p.sent(count),
            uniform=self._uniform.sent(count),
            tokens_out=self._tokens_out[:count],
        )
        self._arena.send()
        return batch

    def _pad(self, first: int, end: int) -> None:
        """Rows `[first, end)` of a decode batch are nobody's: token 0 at position 0, without KV."""
        rows = end - first
        for buffer in (self._token_ids, self._positions, self._temperature, self._top_k):
            buffer.cells[first:end] = [0] * rows
        for group in self._groups:
            group.pad(first, end, self.max_blocks)
        self._sample_rows.cells[first:end] = range(first, end)
        self._top_p.cells[first:end] = [1.0] * rows
        self._uniform.cells[first:end] = [0.0] * rows
