"""Whether it fits: blocks of the pool, the longest sequence, and what to change when the answer is no."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sim.catalog.gpus import GIB, Gpu
from sim.catalog.shape import ModelShape
from sim.catalog.size_text import size_text
from sim.core.config import ConfigError

from .account import RankAccount, account_rank, free_at_start_bytes
from .settings import Settings

_ADVISED_TOKENS = 8192
"""A change is advised when it makes room for a sequence of this length, where none was asked for."""


def poorest_rank(model: ModelShape, gpu: Gpu, settings: Settings) -> RankAccount:
    """The account of the rank with the fewest blocks: all ranks get a pool of its size."""
    return poorest(stage_accounts(model, gpu, settings))


def stage_accounts(model: ModelShape, gpu: Gpu, settings: Settings) -> tuple[RankAccount, ...]:
    """The account of every pipeline stage."""
    return tuple(account_rank(model, gpu, settings, stage) for stage in range(settings.pipeline_parallel_size))


def poorest(accounts: Sequence[RankAccount]) -> RankAccount:
    """The account with the fewest blocks."""
    return min(accounts, key=lambda account: (account.num_blocks, -account.used_bytes))


class NoRoomError(ConfigError):
    """Nothing of the budget is left for KV blocks: the engine does not start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One engine's settings and its poorest rank, to be asked what fits."""

    model: ModelShape
    """What is served."""
    gpu: Gpu
    """What it is served on."""
    settings: Settings
    """How."""
    account: RankAccount
    """The poorest rank's."""

    @property
    def in_flight_tokens(self) -> int:
        """Tokens that may be scheduled and not yet done."""
        return self.settings.max_num_batched_tokens * self.settings.release.overlapped_steps

    def longest(self, blocks: int) -> int:
        """Longest single sequence that `blocks` blocks hold, whatever length the model was made for; in whole blocks."""
        layout = self.account.layout
        if not layout.is_hybrid and layout.groups[0].window is None:
            return blocks * self.settings.block_size
        return layout.longest(blocks, self.in_flight_tokens, self.model.max_position_embeddings)

    def check_free_memory(self) -> None:
        """Refuse, as the engine does, a budget above what other processes leave free.

        Raises:
            ConfigError: with the numbers and the utilisation that would start.
        """
        others = self.settings.other_processes_bytes
        free = free_at_start_bytes(self.gpu, self.settings)
        if not others or self.account.budget_bytes <= free or self.settings.release.engine != "vllm":
            return
        share = max(0, free) * 100 // self.gpu.total_bytes / 100
        remedy = f"use --gpu-memory-utilization {share:g} or less" if share > 0 else "nothing is left for this engine"
        raise ConfigError(
            f"free memory on {self.gpu.name} at start ({max(0, free) / GIB:.2f}/{self.gpu.total_gib:.2f} GiB) is less than "
            f"gpu_memory_utilization {self.settings.gpu_memory_utilization:g} asks for ({self.account.budget_bytes / GIB:.2f} GiB): "
            f"other processes hold {others / GIB:.2f} GiB; {remedy}"
        )

    def blocks(self, override: int | None, length: int, warnings: list[str]) -> int:
        """Blocks of the pool: what the budget leaves, or `override`, with a warning where the device has less.

        Raises:
            ConfigError: no block fits, or more bytes are ordered than the device has; with the numbers and what would be right.
        """
        account, total = self.account, self.gpu.total_bytes
        spoken_for = f"{account.used_bytes / GIB:.2f} GiB for everything else"
        nominal = ", a nominal device that is the same on every machine" if self.gpu.nominal else ""
        has = f"the {self.gpu.total_gib:.2f} GiB of {self.gpu.name}{nominal}"
        ordered = self.settings.kv_cache_memory_bytes
        if override is not None:
            if ordered is not None:
                warnings.append(
                    f"kv_cache_memory_bytes {ordered} is not used: num_gpu_blocks_override {override} sets the pool, as in vLLM"
                )
            # Ordering more than there is is a fair question to a simulator (what would an unlimited cache hit?), so it is
            # answered, and said.
            if account.used_bytes + override * account.layout.block_bytes > total:
                warnings.append(
                    f"num_gpu_blocks_override {override} needs {override * account.layout.block_bytes / GIB:.2f} GiB for KV "
                    f"beside {spoken_for}, more than {has}: a what-if that no such GPU can run "
                    f"({max(0, account.num_blocks)} blocks fit the budget)"
                )
            elif override > account.num_blocks:
                warnings.append(
                    f"num_gpu_blocks_override {override} is above the {max(0, account.num_blocks)} blocks that fit the "
                    "budget: expect out-of-memory errors on a real GPU"
                )
            return override
        if ordered is not None:
            order = f"kv_cache_memory_bytes {ordered} ({ordered / GIB:.2f} GiB)"
            if account.used_bytes + ordered > total:
                raise ConfigError(f"{order} and {spoken_for} ({account.summary}) are more than {has}")
            if account.num_blocks < 1:
                raise ConfigError(f"{order} is less than one block of {account.layout.block_bytes} bytes")
        if account.num_blocks < 1:
            raise NoRoomError(
                f"{self.model.name} on {self.gpu.name}: {account.summary} exceed "
                f"{self.settings.gpu_memory_utilization:g} x {self.gpu.total_gib:.2f} GiB = "
                f"{account.budget_bytes / GIB:.2f} GiB: no memory is left for KV blocks; "
                f"{self.advice(min(length, _ADVISED_TOKENS))}"
            )
        return account.num_blocks

    def length(self, blocks: int, asked: int | None, overridden: bool, warnings: list[str]) -> int:
        """The longest sequence: as asked for, checked; or the model's own length, shortened to what fits.

        Raises:
            ConfigError: one sequence of the length asked for needs more than the pool.
        """
        length = asked or self.model.max_position_embeddings
        fits = self.longest(blocks)
        if length <= fits:
            return length
        width = self.account.layout.block_bytes
        needed = self.account.layout.request_blocks(length, self.in_flight_tokens) * width
        problem = f"one request of {length} tokens needs {_gib(needed)} of KV cache, the pool has {_gib(blocks * width)} ({fits} tokens)"
        if overridden:
            # The override exists to study pressure: requests that can never fit are rejected when they arrive.
            warnings.append(f"{problem}; longer requests are rejected when they arrive")
            return length
        if asked is not None:
            raise ConfigError(f"{problem}; use --max-model-len {fits} or less, or {self.advice(length)}")
        if fits < 1:
            raise ConfigError(f"{problem}: not even one token fits; {self.advice(_ADVISED_TOKENS)}")
        warnings.append(
            f"{problem}; max_model_len was lowered to {fits} "
            f"(vLLM itself would start only with --max-model-len {fits} or less, or -1)"
        )
        return fits

    def advice(self, tokens: int) -> str:
        """The smallest tensor parallelism that makes room for one request of `tokens` tokens, as a flag to set."""
        for size in (2, 4, 8, 16):
            if size <= self.settings.tensor_parallel_size:
                continue
            try:
                self.model.check_parallel(size, self.settings.pipeline_parallel_size)
            except ConfigError:
                continue
            account = poorest_rank(self.model, self.gpu, self.settings.with_tensor_parallel(size))
            if account.num_blocks >= account.layout.request_blocks(tokens, self.in_flight_tokens):
                pool = account.num_blocks * account.layout.block_bytes
                return f"use --tensor-parallel-size {size} (KV pool {pool / GIB:.1f} GiB a GPU then)"
        return "use a GPU with more memory or a quantised model"


def _gib(size: int) -> str:
    """In GiB, as engines write it; what is too little for that in a smaller unit."""
    return f"{size / GIB:.2f} GiB" if size >= GIB // 100 else size_text(size)
