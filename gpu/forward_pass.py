"""ForwardPass: the scheduled work of one step through the model, whole, in micro-batches, or by a captured graph."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from sim.core.plan import ScheduledRequest

from .batch import BatchBuffers, Sampling, StepBatch, Work
from .decode_graphs import Capture, DecodeGraphs
from .kernels.sampling import BrokenLogitsError, check_tokens
from .micro_batches import micro_batches
from .model import Decoder
from .pool import PagedKVPool, PoisonedReadError
from .tokens import TokenBook
from .workspace import Workspace, WorkspaceFullError

EAGER = "eager"
"""Served kernel by kernel."""


class ForwardPass:
    """Computes steps with one model over one pool."""

    def __init__(
        self,
        model: Decoder,
        pool: PagedKVPool,
        workspace: Workspace,
        buffers: BatchBuffers,
        tokens: TokenBook,
        *,
        sampling: Sampling | None = None,
        most_tokens: int | None = None,
    ) -> None:
        """`most_tokens`: a step of more is computed in several passes, each of at most so many."""
        self.model, self.pool, self.workspace, self.tokens = model, pool, workspace, tokens
        self.buffers = buffers
        self._sampling = Sampling() if sampling is None else sampling
        self._most_tokens = most_tokens
        self.graphs: DecodeGraphs | None = None
        """Captured decode batches; None where every step is eager."""
        self.served_by = EAGER
        """How the last step was: `eager`, `graph of N`, or `N micro-batches`."""
        self.num_passes = 1
        """In how many passes it was computed."""

    def warm_up(self) -> None:
        """Run every kind of pass once, so that no step of a run waits for a kernel to be compiled and loaded, or for a library's
        workspace. Before the first step: it leaves no block written, nothing in use and nothing on record.
        """
        before, blocks = self.model.ops.record(), (1,)
        tables = (blocks,) * self.model.groups.num_groups
        chunk = Work(
            name="warm-up", token_ids=(0, 0), context_tokens=0, block_table=blocks, samples=True, group_tables=tables
        )
        passes: list[tuple[list[Work], int | None]] = [([], size) for size in sorted({1, self._most_rows})]
        if self._most_rows > 1 and self.pool.layout.block_size > 1:  # else no pass has a chunk of more than one token
            passes.append(([chunk], None))
        for work, size in passes:
            self.workspace.reset()
            batch = self._fill(work, pad_to=size)
            with suppress(WorkspaceFullError):  # then no step is so large either
                self._compute(batch)
        if self.pool.checked:
            self.pool.poison(blocks)
        self.workspace.reset()
        self.model.ops.restore(before)

    @property
    def _most_rows(self) -> int:
        """Sequences of the largest pass."""
        most = self.buffers.max_seqs
        return most if self._most_tokens is None else min(most, self._most_tokens)

    def capture(self, sizes: Sequence[int], capture: Capture) -> None:
        """Capture decode batches of these sizes, those left out that are computed in several passes. Before the first step: it writes
        to no block and leaves nothing in use.
        """
        sizes = [size for size in sizes if size <= self._most_rows]
        if not sizes:
            return
        self.graphs = DecodeGraphs(sizes, self.model.ops, self.workspace, capture)
        self.graphs.capture(lambda size: partial(self._compute, self._fill([], pad_to=size)))

    def run(self, scheduled: Sequence[ScheduledRequest], parts: int = 1, *, eager: bool = False) -> dict[str, int]:
        """Compute a step in `parts` passes (more, if they would be too large); the sampled token of each request that gets one.

        Raises:
            WorkspaceFullError, OutOfMemoryError: it is too large; what it stored is beyond all contexts.
            PoisonedReadError, ForeignReadError, BrokenLogitsError: a request read what it should not.
        """
        work = [self._work(request) for request in scheduled]
        if self.pool.checked:
            for item in work:
                for table in item.tables:
                    self.pool.check_read(item.name, table)
        if self._most_tokens is not None:
            parts = max(parts, -(-sum(item.num_tokens for item in work) // self._most_tokens))
        size = None if self.graphs is None or eager or parts > 1 else self.graphs.choose(work)
        self.num_passes = 1
        if size is not None and self.graphs is not None:
            self.served_by = f"graph of {size}"
            batch = self._fill(work, pad_to=size)
            self.graphs.replay(size)
            return self._sampled(batch, work)
        drawn: dict[str, int] = {}
        passes = micro_batches(work, parts) if parts > 1 else [work]
        self.num_passes = len(passes)
        self.served_by = EAGER if len(passes) == 1 else f"{len(passes)} micro-batches"
        for index, part in enumerate(passes):
            if index:
                self.workspace.rewind()
            batch = self._fill(part)
            self._compute(batch)
            drawn |= self._sampled(batch, part)
        return drawn

    # -- parts ----------------------------------------------------------------------------------------------------

    def _fill(self, work: Sequence[Work], *, pad_to: int | None = None) -> StepBatch:
        uniform: list[float] = []
        if self._sampling.temperature > 0:
            uniform = [
                self.tokens.uniform(item.name, item.context_tokens + item.num_tokens) for item in work if item.samples
            ]
        return self.buffers.fill(work, self.pool.layout.block_size, self._sampling, uniform, pad_to=pad_to)

    def _compute(self, batch: StepBatch) -> None:
        logits = self.model.forward(batch, self.pool, self.workspace)
        if int(batch.tokens_out.shape[0]):
            self.model.sample(batch, logits)

    def _work(self, request: ScheduledRequest) -> Work:
        start = request.context_tokens
        return Work(
            name=request.request_id,
            token_ids=self.tokens.tokens(request.request_id, start, start + request.num_tokens),
            context_tokens=start,
            block_table=request.block_table,
            samples=request.samples,
            group_tables=request.group_tables,
        )

    def _sampled(self, batch: StepBatch, work: Sequence[Work]) -> dict[str, int]:
        """The sampled tokens, on the host.

        Raises:
            PoisonedReadError: a request read a block that holds nothing; BrokenLogitsError: logits broke for another reason.
        """
        if self.pool.checked:
            self._check_written(work)
        names = list(batch.sampled)
        if not names:
            return {}
        drawn = self.model.ops.staging.read("sampled tokens", batch.tokens_out[: len(names)])
        try:
            check_tokens(drawn, names)
        except BrokenLogitsError:
            self._name_culprit(work)
            raise
        return dict(zip(names, drawn, strict=True))

    def _check_written(self, work: Sequence[Work]) -> None:
        """Verify that the step stored the KV of all its tokens where their tables say. A chunk that samples nothing would
        otherwise hide a lost write until somebody reads it.
        """
        try:
            for item in work:
                last = item.context_tokens + item.num_tokens
                for table, layers in zip(item.tables, self.model.groups.layers, strict=True):
                    self.pool.check_content(item.name, table, last, item.context_tokens, list(enumerate(layers)))
        except PoisonedReadError:
            # NaN that was read is passed on: the first that is found need not be the first that was.
            self._name_culprit(work)
            raise

    def _name_culprit(self, work: Sequence[Work]) -> None:
        """Find the block that a request should not have read. What a layer reads is broken before what later layers make of it."""
        size, groups = self.pool.layout.block_size, self.model.groups
        for layer, (group, place) in enumerate(groups.places()):
            window = groups.windows[group]
            for item in work:
                table, last = item.tables[group], item.context_tokens + item.num_tokens
                first = 0 if window is None else max(item.context_tokens - window + 1, 0)
                for index in range(first // size, -(-last // size)):
                    if table[index]:
                        low, high = max(first, index * size), min(last, (index + 1) * size)
                        self.pool.check_content(item.name, table, high, low, [(place, layer)])
