"""The ledger: where every byte of a GPU goes before the first request, and how many KV blocks that leaves.

The identity it follows, line by line:
`KV pool = utilisation * total - weights - non-torch - peak activation - CUDA graphs`, on the poorest rank.
`build_ledger` draws it up; here is what it says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sim.catalog.gpus import GIB

from .ops import Op, Peak

if TYPE_CHECKING:
    from .kv_groups import KvLayout
    from .measured import MeasuredMemory
    from .settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLine:
    """One use of memory on one rank."""

    name: str
    """`weights`, `non_torch`, `peak_activation`, `kv_pool`, ...: see `sim.memory.lines`."""
    bytes: int
    """On one rank: what the engine or its allocator takes, after rounding."""
    formula: str
    """How the figure comes about, in words and symbols."""
    numbers: str
    """The same with its numbers."""
    inside_budget: bool
    """True for what `gpu_memory_utilization` budgets, False for what lies outside it."""
    ops: tuple[Op, ...] = ()
    """What the line adds up, where it has parts: their allocated bytes sum to `bytes`."""
    origin: str = ""
    """Where a measured line comes from; empty for one that the account counts."""
    low_bytes: int | None = None
    """Lower end of the 95 % interval of a measured line; None where it is not known."""
    high_bytes: int | None = None
    """Upper end of it."""

    @property
    def gib(self) -> float:
        """The figure in GiB."""
        return self.bytes / GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What one pipeline stage's log lines say; the poorest stage's account is the ledger."""

    pipeline_rank: int
    """The stage, from 0, whose first rank prints most engines' log lines."""
    weights_bytes: int
    """On one of its ranks, drafts and adapters included."""
    non_torch_bytes: int
    """Libraries and communication."""
    peak_activation_bytes: int
    """Its peak; stages without the sampler show only the forward pass."""
    num_blocks: int
    """Blocks that it would have room for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The account of the poorest rank, which sizes all. Its lines add up to the physical total."""

    model: str
    """Name of the model."""
    gpu: str
    """Name of the GPU."""
    engine: str
    """Engine whose behaviour is followed, `vllm` or `sglang`."""
    engine_version: str
    """Its release, as asked for."""
    tensor_parallel_size: int
    """Ranks a layer is split over."""
    pipeline_parallel_size: int
    """Stages the layers are split over."""
    pipeline_rank: int
    """The stage whose account this is: the poorest."""
    total_bytes: int
    """Physical memory of one GPU."""
    budget_bytes: int
    """What the engine gives itself: `gpu_memory_utilization` times the total."""
    gpu_memory_utilization: float
    """As asked for, or the release's default."""
    lines: tuple[LedgerLine, ...]
    """What the memory is spent on; together exactly `total_bytes` unless a warning says that it is overdrawn."""
    phases: tuple[Peak, ...]
    """Every candidate for the peak of temporary memory; the largest profiled one is the line `peak_activation`."""
    stages: tuple[Stage, ...]
    """Every pipeline stage in short, the first one first."""
    layout: KvLayout
    """How the pool is laid out over the layers."""
    num_gpu_blocks: int
    """Blocks of the KV pool, as the engine reports them (vLLM spends one of them on its null block)."""
    block_size: int
    """Tokens a block."""
    block_bytes: int
    """Bytes of one block on one rank."""
    kv_tokens: int
    """The engine's "KV cache size": `num_gpu_blocks * block_size`, or what a hybrid model's requests can share of it."""
    kv_bytes_per_token: int
    """On one rank, over all layers of its stage (and a draft model's). Window layers stop growing at their window."""
    max_model_len: int
    """Longest sequence, in tokens: as asked for, or what fits."""
    max_model_len_that_fits: int
    """Longest single sequence the pool can hold, in tokens."""
    max_concurrency: float
    """Requests of `max_model_len` tokens that fit at once."""
    max_num_seqs: int
    """As asked for, or the default for the GPU and release."""
    max_num_batched_tokens: int
    """As asked for, or the default for the GPU and release."""
    settings: Settings
    """Every setting that the account was drawn up for, as asked for or by default."""
    in_flight_tokens: int
    """Tokens that may be scheduled and not yet done: what sliding windows keep beyond their window."""
    warnings: tuple[str, ...] = ()
    """What a reader must know before trusting a figure."""
    measured: MeasuredMemory | None = None
    """Measured lines that took the place of counted ones; None when all are counted."""

    def request_blocks(self, tokens: int) -> int:
        """Most blocks that one sequence of `tokens` tokens holds at once."""
        return self.layout.request_blocks(tokens, self.in_flight_tokens)

    def line(self, name: str) -> LedgerLine:
        """The line called `name`.

        Raises:
            KeyError: no such line.
        """
        for line in self.lines:
            if line.name == name:
                return line
        raise KeyError(f"no ledger line {name!r}; there are {', '.join(line.name for line in self.lines)}")
