"""What may share a step: prompts and decodes mixed, one before the other, or in turns, and how much of each a step takes.

Prompts (whatever has more than its last known token to compute) and decodes are two queues with budgets of their own. Who does not
take part in a step rests: it keeps its blocks, and goes on in a later step.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING

from .config import ConfigError, EngineConfig
from .request import Request

if TYPE_CHECKING:
    from .draft import Draft
    from .scheduler import Scheduler


class Batching(Enum):
    """What may share a step."""

    MIXED = "mixed"
    """Decodes and prompt chunks together, decodes first (vLLM V1, TensorRT-LLM in-flight batching, Sarathi-Serve)."""
    PREFILL_FIRST = "prefill_first"
    """While a prompt can start or go on, prompts only; decodes wait (vLLM V0, SGLang, nano-vllm)."""
    DECODE_FIRST = "decode_first"
    """In turns: after each step of prompts, `continuous_decode_steps` steps belong to the decodes; a prompt waits no longer than that,
    and not at all when nothing decodes (SGLang `--num-continuous-decode-steps`)."""
    STATIC = "static"
    """A batch is filled when nothing runs, and then runs to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """How much of prompts and decodes one step takes; None is as much as the engine's budgets allow."""

    max_prefill_tokens: int | None = None
    """Prompt tokens a step (SGLang `--chunked-prefill-size`); what is left of the token budget is for decodes alone."""
    max_prefill_seqs: int | None = None
    """Prompts computed in one step (vLLM `--max-num-partial-prefills`, for whole ones too)."""
    max_decode_seqs: int | None = None
    """Decodes a step: a micro-batch. If more run, those go first that have waited longest for their next token."""
    continuous_decode_steps: int | None = None
    """Steps that decodes have to themselves after each step of prompts, for `decode_first` (`DECODE_STEPS` if not given)."""

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1, or absent for no limit")


NO_LIMITS = BatchLimits()
DECODE_STEPS = 8
"""Steps of a turn of decodes unless something else is asked for: a prompt waits some tenths of a second on a large model."""


def check_batching(batching: Batching, limits: BatchLimits, config: EngineConfig) -> None:
    """Refuse limits that contradict each other or the engine's settings. Raises ConfigError with the reason."""
    if batching is not Batching.DECODE_FIRST and limits.continuous_decode_steps is not None:
        raise ConfigError(
            f"continuous_decode_steps is {limits.continuous_decode_steps}, but batching {batching.value} takes no turns; "
            "set batching decode_first, or leave it out"
        )
    tokens = limits.max_prefill_tokens
    if tokens is not None and not config.enable_chunked_prefill and tokens < config.max_model_len:
        raise ConfigError(
            f"without chunked prefill a whole prompt must fit in one step: max_prefill_tokens ({tokens}) must be at least "
            f"max_model_len ({config.max_model_len}), or enable chunked prefill"
        )
    if limits.max_decode_seqs is not None and limits.max_decode_seqs > config.max_num_seqs:
        raise ConfigError(
            f"max_decode_seqs ({limits.max_decode_seqs}) is above max_num_seqs ({config.max_num_seqs}): so many never run; lower it"
        )
    if limits.max_prefill_seqs is not None and limits.max_prefill_seqs > config.max_num_seqs:
        raise ConfigError(
            f"max_prefill_seqs ({limits.max_prefill_seqs}) is above max_num_seqs ({config.max_num_seqs}): so many never run; lower it"
        )


def is_prompt(request: Request) -> bool:
    """Whether what a request that is not in the decode set has to compute is a prompt, and not just its last token."""
    return request.num_tokens - request.num_computed_tokens > 1 or not request.num_output_tokens


def rest_prompts(scheduler: Scheduler, draft: Draft) -> None:
    """The step belongs to the decodes."""
    draft.resting |= {order for order, request in scheduler.catching_up.items() if is_prompt(request)}


def rest_decodes(scheduler: Scheduler, draft: Draft, most: int) -> None:
    """Let at most so many decodes into the step, those first whose last token is oldest, of them those with the fewest tokens.

    The decode set computes as one, so who rests leaves it. Of those who go on, whoever gets from the step just what growth of the set
    would give them joins it; the rest are served by themselves.
    """
    decode = scheduler.decode
    late = [
        request
        for order, request in scheduler.catching_up.items()
        if order not in draft.resting and not is_prompt(request)
    ]
    if len(decode) + len(late) <= most:
        return
    turns = [
        (request.last_token_fs or 0, request.num_tokens - request.spec.input_tokens, request.order, request)
        for request in late
    ]
    turns += [
        (decode.last_token_fs(request), decode.known(request) - request.spec.input_tokens, request.order, request)
        for request in decode
    ]
    turns.sort()
    draft.decodes_rest = True
    draft.resting |= {order for _, _, order, _ in turns[most:]}
    steady = {order for _, _, order, request in turns[:most] if _only_grows(scheduler, request)}
    catching_up: dict[int, Request] = {}
    somebody_is_alone = False
    for order, request in scheduler.running.items():
        if order in steady and not (somebody_is_alone and decode.needs_block(request)):
            if not request.decoding:
                decode.join(request)
            continue
        if request.decoding:
            decode.leave(request)
        catching_up[order] = request
        # Blocks are taken in order of admission, but by the set before all who are alone.
        somebody_is_alone = somebody_is_alone or order not in draft.resting
    scheduler.catching_up = catching_up


def _only_grows(scheduler: Scheduler, request: Request) -> bool:
    """Whether a decode neither copies a shared block, nor slides, nor fills a block that others may find, and has not ended."""
    holdings = scheduler.holdings
    if holdings.windows or request.spec.forking is not None or request.ended_fs is not None:
        return False
    return request.num_registered >= request.keys.num_shared or not holdings.has_to_register(
        request, scheduler.decode.computed(request) + 1
    )
