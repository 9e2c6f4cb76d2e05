"""How an engine is set up: frozen values, each documented, checked for contradictions when made."""

from __future__ import annotations

from dataclasses import dataclass


class ConfigError(ValueError):
    """A setting, or two settings together, that no engine could run with. The message says what would be right."""


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
    sliding_window: int | None = None
    """Attention window in tokens when every layer slides; blocks that left it are given back while the request runs."""
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
        if self.sliding_window is not None:
            raise ConfigError(
                f"num_cpu_prefix_blocks is {self.num_cpu_prefix_blocks}, but with a sliding window ({self.sliding_window} tokens) the head "
                "of a prefix is not kept; the CPU prefix tier is for full attention"
            )

    @property
    def watermark_blocks(self) -> int:
        """Blocks that admission leaves free."""
        return int(self.watermark * self.num_gpu_blocks)
