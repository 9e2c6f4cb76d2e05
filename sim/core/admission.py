"""Who may enter: the verdict on an arrival, and on starting the request at the head of the queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .config import EngineConfig
from .need import admission_blocks, slots_needed
from .request import RequestSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Why an arrival is turned away."""

    code: str
    """For counting: `exceeds_max_model_len`, `exceeds_kv_pool`, `exceeds_token_budget`."""
    reason: str
    """For the client: a sentence with the numbers."""
    retry_after_s: float | None = None
    """When trying again can help; None when it never can."""


@dataclass(frozen=True, slots=True)
class PoolView:
    """What an admission policy may look at when the head of the queue could start."""

    num_blocks: int
    num_free: int
    num_running: int


class Admission(Protocol):
    """An admission policy."""

    def arrive(self, spec: RequestSpec) -> Rejection | None:
        """Judge an arrival; None lets it into the queue."""
        ...

    def may_start(self, need_blocks: int, view: PoolView) -> bool:
        """Whether a queued request that would take `need_blocks` from the free queue may start now.

        For a pool that only gets fuller the answer must not turn from no to yes: a stretch of decode steps relies on it.
        """
        ...


class DefaultAdmission:
    """Turn away at once what can never be served; start whoever is first as soon as its blocks are free.

    The first rule is what vLLM V1 lacks (a request longer than the pool blocks its queue for ever, #39734); the second is
    vLLM's, with the optional watermark of V0. The watermark is waived when nothing runs, or it could block for ever too.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config

    def arrive(self, spec: RequestSpec) -> Rejection | None:
        """Reject what exceeds the context, the pool, or (without chunked prefill) the token budget of a step."""
        config = self._config
        output_tokens = spec.max_tokens or 1  # without a cap only the first token is sure to come
        asked = spec.input_tokens + output_tokens
        if asked > config.max_model_len:
            return Rejection(
                code="exceeds_max_model_len",
                reason=(
                    f"{spec.input_tokens} prompt + {output_tokens} output tokens = {asked}, "
                    f"but max_model_len is {config.max_model_len} tokens"
                ),
            )
        slots = slots_needed(spec.input_tokens, output_tokens)
        need = admission_blocks(
            slots,
            config.block_size,
            window=config.sliding_window,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
        )
        if need > config.num_gpu_blocks:
            return Rejection(
                code="exceeds_kv_pool",
                reason=(
                    f"{spec.input_tokens} prompt + {output_tokens} output tokens need {need} KV blocks of {config.block_size} tokens, "
                    f"but the whole pool has {config.num_gpu_blocks} ({config.num_gpu_blocks * config.block_size} tokens)"
                ),
            )
        if not config.enable_chunked_prefill and slots > config.max_num_batched_tokens:
            return Rejection(
                code="exceeds_token_budget",
                reason=(
                    f"up to {slots} tokens must be (re)computed in one step, "
                    f"but max_num_batched_tokens is {config.max_num_batched_tokens}"
                ),
            )
        return None

    def may_start(self, need_blocks: int, view: PoolView) -> bool:
        """Enough blocks are free, beyond the watermark when others run."""
        spare = self._config.watermark_blocks if view.num_running else 0
        return need_blocks + spare <= view.num_free
