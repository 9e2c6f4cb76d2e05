"""How an engine is set up: frozen values, each documented, checked for contradictions when made."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from .need import admission_blocks, blocks_for, skipped_blocks


class ConfigError(ValueError):
    """A setting, or two settings together, that no engine could run with. The message says what would be right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionGroup:
    """Layers of a model that keep the same tokens, and so share one block table. A block of any group has the same bytes."""

    block_size: int
    """Tokens a block: `EngineConfig.block_size`, or a multiple of it where the layers' tokens are smaller."""
    window: int | None = None
    """Attention window in tokens; blocks that left it are given back while the request runs. None for full attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of the decision core. Names and defaults are vLLM's where vLLM has one (server defaults, release 0.29)."""

    num_gpu_blocks: int
    """Usable KV blocks. Block ids are 1 to `num_gpu_blocks`; id 0 stands for "no block" (vLLM spends one block of its
    pool on that, kvtwin does not)."""
    block_size: int = 16
    """Tokens a block."""
    max_model_len: int = 131_072
    """Longest sequence, prompt and output together, in tokens."""
    max_num_seqs: int = 1024
    """Most sequences in one step (and most running requests)."""
    max_num_batched_tokens: int = 8192
    """Most tokens computed in one step."""
    enable_prefix_caching: bool = True
    """Keep full blocks for reuse after their request has released them."""
    enable_chunked_prefill: bool = True
    """Let a prompt be computed over several steps, in what is left of the token budget."""
    scheduling_policy: str = "fcfs"
    """`fcfs`, or `priority` (smaller is more important, ties by arrival)."""
    reserve_full_prompt: bool = True
    """Admit a request only if its whole prompt fits now (vLLM's `scheduler_reserve_full_isl`); off: only the next chunk must fit."""
    async_scheduling: bool = False
    """Plan a step while the one before it runs, with what was known when that one started (see `lag`)."""
    sliding_window: int | None = None
    """Attention window in tokens when every layer slides; blocks that left it are given back while the request runs."""
    kv_groups: tuple[AttentionGroup, ...] = ()
    """The groups of a model whose layers keep different tokens, at least two: all draw from one pool, and a request has one block
    table a group. Empty for a model with one kind of layer, which `sliding_window` describes."""
    in_flight_tokens: int = 0
    """Tokens that may be scheduled and not yet done, as the pool was sized for; never taken as less than one step's budget."""
    num_cpu_blocks: int = 0
    """Blocks of the CPU pool that swapped requests are saved to."""
    num_cpu_prefix_blocks: int = 0
    """Blocks of CPU memory for prefixes that may go from the device; a pool of its own, beside `num_cpu_blocks`."""
    cpu_prefix_mode: str = "write_through"
    """When prefix blocks are saved there: `write_through`, as soon as they are full, or `write_back`, when they are about to be
    evicted."""
    watermark: float = 0.0
    """Share of the pool that admission leaves free for the growth of running requests; waived when nothing runs."""

    def __post_init__(self) -> None:
        for name in ("num_gpu_blocks", "block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(
                f"sliding_window is {self.sliding_window}; it must be at least 1 token, or absent for full attention"
            )
        self._check_groups()
        if self.num_cpu_blocks < 0:
            raise ConfigError(f"num_cpu_blocks is {self.num_cpu_blocks}; it must be at least 0")
        self._check_tier()
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"watermark is {self.watermark}; it is a share of the pool, at least 0 and below 1")
        if self.scheduling_policy not in ("fcfs", "priority"):
            raise ConfigError(f"scheduling_policy is {self.scheduling_policy!r}; known are fcfs and priority")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs ({self.max_num_seqs}): every running "
                "sequence needs one token of the budget; raise the first or lower the second"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"without chunked prefill a whole prompt must fit in one step: max_num_batched_tokens ({self.max_num_batched_tokens}) "
                f"must be at least max_model_len ({self.max_model_len}), or enable chunked prefill"
            )

    def _check_tier(self) -> None:
        if self.num_cpu_prefix_blocks < 0:
            raise ConfigError(f"num_cpu_prefix_blocks is {self.num_cpu_prefix_blocks}; it must be at least 0")
        if self.cpu_prefix_mode not in ("write_through", "write_back"):
            raise ConfigError(
                f"cpu_prefix_mode is {self.cpu_prefix_mode!r}; known are write_through (save what is full) and write_back (save "
                "what is about to be evicted)"
            )
        if not self.num_cpu_prefix_blocks:
            return
        if not self.enable_prefix_caching:
            raise ConfigError(
                f"num_cpu_prefix_blocks is {self.num_cpu_prefix_blocks}, but without prefix caching no block is ever looked for again; "
                "enable prefix caching, or leave the CPU prefix tier out"
            )

    @property
    def watermark_blocks(self) -> int:
        """Blocks that admission leaves free."""
        return int(self.watermark * self.num_gpu_blocks)

    def _check_groups(self) -> None:
        groups = self.kv_groups
        if not groups:
            return
        if self.sliding_window is not None:
            raise ConfigError(
                f"sliding_window is {self.sliding_window} and there are {len(groups)} kv_groups: give each group its window, "
                "and leave sliding_window out"
            )
        if len(groups) < 2:
            raise ConfigError("kv_groups has 1 group; a model with one kind of layer needs none: set sliding_window")
        for number, group in enumerate(groups):
            if group.window is not None and group.window < 1:
                raise ConfigError(f"the window of kv_groups[{number}] is {group.window}; it must be at least 1 token")
            if group.block_size < 1 or group.block_size % self.block_size:
                raise ConfigError(
                    f"the block size of kv_groups[{number}] is {group.block_size}; it must be a multiple of block_size ({self.block_size})"
                )
        if self.block_size not in {group.block_size for group in groups}:
            raise ConfigError(f"block_size is {self.block_size}, but no kv_group has blocks of that many tokens")

    @property
    def groups(self) -> tuple[AttentionGroup, ...]:
        """The attention groups: `kv_groups`, or the one group of a model with one kind of layer."""
        return self.kv_groups or (AttentionGroup(block_size=self.block_size, window=self.sliding_window),)

    @property
    def slots_per_block(self) -> int:
        """Token slots of a block, in the unit of `slots_per_token`: `block_size`, unless groups have blocks of different sizes."""
        return lcm(*(group.block_size for group in self.kv_groups)) if self.kv_groups else self.block_size

    @property
    def slots_per_token(self) -> int:
        """Slots that a token which every group keeps fills: one a group, or less of a larger block's."""
        slots = self.slots_per_block
        return sum(slots // group.block_size for group in self.kv_groups) if self.kv_groups else 1

    def most_blocks(self, total_tokens: int) -> int:
        """Blocks that a request of so many tokens can come to hold at once: what the gate asks for, and the pool sizer counts (I5)."""
        return sum(self.most_blocks_by_group(total_tokens))

    def most_blocks_by_group(self, total_tokens: int) -> list[int]:
        """The same for each group."""
        in_flight = max(self.in_flight_tokens, self.max_num_batched_tokens)
        return [
            admission_blocks(
                total_tokens,
                block_size,
                window=window,
                max_num_batched_tokens=in_flight,
                max_model_len=self.max_model_len,
            )
            for block_size, window in self._kinds
        ]

    def blocks_at(self, computed_tokens: int, total_tokens: int) -> int:
        """Blocks that a request holds while it computes its tokens `[computed_tokens, total_tokens)`, nothing truncated."""
        return sum(
            blocks_for(total_tokens, block_size) - skipped_blocks(computed_tokens, block_size, window)
            for block_size, window in self._kinds
        )

    @property
    def _kinds(self) -> list[tuple[int, int | None]]:
        """Block size and window of each group."""
        if not self.kv_groups:
            return [(self.block_size, self.sliding_window)]
        return [(group.block_size, group.window) for group in self.kv_groups]
