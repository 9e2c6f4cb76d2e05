"""StepBatch: the work of one pass as tensors, in memory that is taken once.

Rows are tokens: first one of each decoding sequence, then the chunks of the others, sequence after sequence. The host writes them through
plain C arrays, so that a step makes no tensor and no allocator call.

On the host a pass is written into a leased buffer (`Staging`), as large as the batch wants it, because the device may still be copying
the last one. On the device there is one piece of memory for the input and the sampled tokens of all passes, into which each is packed
from the start: the next pass's copy is ordered after the kernels that read this one's, a captured graph needs the same addresses each
time, and leases in powers of two for every size would take up to four times as much of what the KV pool could have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sim.core.config import EngineConfig
from sim.core.need import blocks_for

from .batch_parts import BatchParts
from .group_rows import GroupRows
from .staging import Staging


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
    """One pass, on the device. Views of `BatchBuffers`, valid until the next batch is made."""

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


def batch_limits(engine: EngineConfig) -> dict[str, int]:
    """The widest pass of an engine, as arguments of `input_bytes` and `BatchBuffers`."""
    return {
        "max_tokens": engine.max_num_batched_tokens,
        "max_seqs": min(engine.max_num_seqs, engine.max_num_batched_tokens),
        "max_blocks": blocks_for(engine.max_model_len, engine.block_size),
        "num_groups": len(engine.groups),
    }


def input_bytes(*, max_tokens: int, max_seqs: int, max_blocks: int, num_groups: int = 1) -> int:
    """Bytes that `BatchBuffers` with these limits take on the device."""
    return BatchParts(max_tokens, max_seqs, max_seqs, max_seqs, max_blocks, num_groups=num_groups).packing.num_bytes


class BatchBuffers:
    """Room for the largest step that the engine may plan."""

    def __init__(
        self,
        *,
        max_tokens: int,
        max_seqs: int,
        max_blocks: int,
        device: Any,
        num_groups: int = 1,
        staging: Staging | None = None,
    ) -> None:
        """`max_blocks` is the length of the longest block table, `num_groups` how many a sequence has; `staging` is the device's."""
        self.max_tokens, self.max_seqs, self.max_blocks = max_tokens, max_seqs, max_blocks
        self._num_groups = num_groups
        self._staging = Staging(device) if staging is None else staging
        size = input_bytes(max_tokens=max_tokens, max_seqs=max_seqs, max_blocks=max_blocks, num_groups=num_groups)
        self.memory = torch.zeros(size, dtype=torch.uint8, device=device)
        """`[num_bytes]` uint8 on the device: a pass's input and, behind it, what it samples."""
        self._staging.warm(size)
        self._latest: BatchParts | None = None

    @property
    def held_bytes(self) -> tuple[int, int]:
        """Bytes of all buffers on the device, and on the host."""
        return int(self.memory.numel()) + self._staging.on_device.reserved_bytes, self._staging.host.reserved_bytes

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
        sampled = tuple(item.name for item in order if item.samples)
        num_decodes = sum(item.num_tokens == 1 for item in order)
        parts = self._room_for(order, num_decodes, len(sampled), pad_to)
        with self._staging.sending("step input", self.memory[: parts.sent_bytes]) as address:
            parts.packing.open(address)
            rows = parts.put(order, num_decodes, block_size)
            parts.put_sampling(rows, sampling, [drawn.get(name, 0.0) for name in sampled])
            if pad_to is not None:
                parts.pad(len(order), pad_to)
        return StepBatch(
            names=tuple(item.name for item in order),
            sampled=sampled,
            num_decodes=num_decodes if pad_to is None else pad_to,
            token_ids=parts.token_ids.on(self.memory),
            positions=parts.positions.on(self.memory),
            groups=tuple(group.on(self.memory) for group in parts.groups),
            query_starts=parts.query_starts.on(self.memory),
            sample_rows=parts.sample_rows.on(self.memory),
            temperature=parts.temperature.on(self.memory),
            top_k=parts.top_k.on(self.memory),
            top_p=parts.top_p.on(self.memory),
            uniform=parts.uniform.on(self.memory),
            tokens_out=parts.tokens_out.on(self.memory),
        )

    def _room_for(self, order: Sequence[Work], num_decodes: int, num_sampled: int, pad_to: int | None) -> BatchParts:
        """The packing of a batch. Raises ValueError for one that there is no room for."""
        num_tokens, num_seqs = sum(item.num_tokens for item in order), len(order)
        width = max(1, *(len(table) for item in order for table in item.tables)) if pad_to is None else self.max_blocks
        if pad_to is not None:
            num_tokens = num_seqs = num_decodes = num_sampled = pad_to
        if num_tokens > self.max_tokens or num_seqs > self.max_seqs or width > self.max_blocks:
            raise ValueError(
                f"a step of {num_tokens} tokens, {num_seqs} sequences and {width} blocks a table does not fit buffers "
                f"for {self.max_tokens}, {self.max_seqs} and {self.max_blocks}"
            )
        sizes = (num_tokens, num_seqs, num_seqs - num_decodes, num_sampled, width)
        if self._latest is None or self._latest.sizes != sizes:  # one decode step is like the one before it
            self._latest = BatchParts(*sizes, num_groups=self._num_groups)
        return self._latest
