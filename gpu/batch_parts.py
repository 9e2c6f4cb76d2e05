"""BatchParts: the numbers of one batch, where they are packed and how the host writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sim.core.blocks import NO_BLOCK

from .group_rows import GroupParts, slots_of
from .packing import Packing

if TYPE_CHECKING:
    from .batch import Sampling, Work


class BatchParts:
    """The packing of one batch: `StepBatch` says what each part is."""

    def __init__(
        self, num_tokens: int, num_seqs: int, num_chunks: int, num_sampled: int, width: int, *, num_groups: int
    ) -> None:
        """`num_chunks` of the sequences are no decodes; `width` is the number of columns of the block tables."""
        self.sizes = (num_tokens, num_seqs, num_chunks, num_sampled, width)
        """What decides where the parts lie."""
        packing = self.packing = Packing()
        self.token_ids, self.positions = (packing.part(num_tokens, torch.int64) for _ in range(2))
        self.query_starts = packing.part(num_chunks + 1, torch.int32)
        self.sample_rows = packing.part(num_sampled, torch.int64)
        self.top_k = packing.part(num_sampled, torch.int32)
        self.temperature, self.top_p, self.uniform = (packing.part(num_sampled, torch.float32) for _ in range(3))
        self.groups = [
            GroupParts(packing, num_tokens=num_tokens, num_seqs=num_seqs, width=width) for _ in range(num_groups)
        ]
        self.sent_bytes = packing.num_bytes
        """Bytes that the host writes."""
        self.tokens_out = packing.part(num_sampled, torch.int64)
        """Behind them: the device writes it."""

    def put(self, order: Sequence[Work], num_decodes: int, block_size: int) -> list[int]:
        """Fill in what each sequence computes, `num_decodes` decodes first; returns the rows from which tokens are sampled.

        Raises:
            ValueError: a block table too short for its tokens, or another number of tables than there are groups.
        """
        self.query_starts.cells[0] = row = 0
        rows: list[int] = []
        for index, item in enumerate(order):
            end, last = row + item.num_tokens, item.context_tokens + item.num_tokens
            self.token_ids.cells[row:end] = item.token_ids
            self.positions.cells[row:end] = range(item.context_tokens, last)
            for group, table in zip(self.groups, item.tables, strict=True):
                slots = slots_of(item.name, table, item.context_tokens, last, block_size)
                group.put(index, row, slots, table, last - table.count(NO_BLOCK) * block_size)
            if index >= num_decodes:
                self.query_starts.cells[index - num_decodes + 1] = end - num_decodes
            if item.samples:
                rows.append(end - 1)
            row = end
        return rows

    def put_sampling(self, rows: Sequence[int], sampling: Sampling, uniform: Sequence[float]) -> None:
        """Fill in how tokens are chosen, from these rows."""
        count = len(rows)
        self.sample_rows.cells[:count] = rows
        self.temperature.cells[:count] = [sampling.temperature] * count
        self.top_k.cells[:count] = [sampling.top_k] * count
        self.top_p.cells[:count] = [sampling.top_p] * count
        self.uniform.cells[:count] = uniform

    def pad(self, first: int, end: int) -> None:
        """Rows `[first, end)` of a decode batch are nobody's: token 0 at position 0, without KV."""
        rows = end - first
        for part in (self.token_ids, self.positions, self.temperature, self.top_k, self.uniform):
            part.cells[first:end] = [0] * rows
        for group in self.groups:
            group.pad(first)
        self.sample_rows.cells[first:end] = range(first, end)
        self.top_p.cells[first:end] = [1.0] * rows
