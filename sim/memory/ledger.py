"""The ledger: where every byte of a GPU goes before the first request, and how many KV blocks that leaves.

The identity it follows, line by line:
`KV pool = utilisation * total - weights - non-torch - peak activation - CUDA graphs`, on the poorest rank.
`build_ledger` draws it up; here is what it says.
"""

from __future__ import annotations

from dataclasses import dataclass

from sim.catalog.gpus import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLine:
    """One use of memory on one rank."""

    name: str
    """`weights`, `non_torch`, `peak_activation`, `cuda_graphs`, `kv_pool`, `unused` or `outside_budget`."""
    bytes: int
    """On one rank."""
    formula: str
    """How the figure comes about, in words and symbols."""
    numbers: str
    """The same with its numbers."""
    inside_budget: bool
    """True for what `gpu_memory_utilization` budgets, False for what lies outside it."""

    @property
    def gib(self) -> float:
        """The figure in GiB."""
        return self.bytes / GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The account of the poorest rank, which sizes all. Its lines add up to the physical total."""

    model: str
    """Name of the model."""
    gpu: str
    """Name of the GPU."""
    engine_version: str
    """vLLM release whose behaviour is followed."""
    tensor_parallel_size: int
    """Ranks a layer is split over."""
    pipeline_parallel_size: int
    """Stages the layers are split over."""
    total_bytes: int
    """Physical memory of one GPU."""
    budget_bytes: int
    """`gpu_memory_utilization` times the total."""
    lines: tuple[LedgerLine, ...]
    """What the memory is spent on; together exactly `total_bytes` unless a warning says that it is overdrawn."""
    num_gpu_blocks: int
    """Blocks of the KV pool, as the engine reports them (vLLM spends one of them on its null block)."""
    block_size: int
    """Tokens a block."""
    kv_tokens: int
    """`num_gpu_blocks * block_size`."""
    kv_bytes_per_token: int
    """On one rank, all layers of its pipeline stage."""
    max_model_len: int
    """Longest sequence, in tokens: as asked for, or what fits."""
    max_concurrency: float
    """Requests of `max_model_len` tokens that fit at once."""
    max_num_seqs: int
    """As asked for, or the default for the GPU."""
    max_num_batched_tokens: int
    """As asked for, or the default for the GPU."""
    warnings: tuple[str, ...] = ()
    """What a reader must know before trusting a figure."""

    @property
    def max_model_len_that_fits(self) -> int:
        """Longest single sequence the pool can hold, in tokens."""
        return self.kv_tokens

    def line(self, name: str) -> LedgerLine:
        """The line called `name`.

        Raises:
            KeyError: no such line.
        """
        for line in self.lines:
            if line.name == name:
                return line
        raise KeyError(f"no ledger line {name!r}; there are {', '.join(line.name for line in self.lines)}")


def blocks_for_tokens(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` tokens of one sequence: the one rule that sizing and admission share."""
    return -(-tokens // block_size)
