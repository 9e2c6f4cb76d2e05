"""What a policy may look at: a window on the engine that shows everything and opens nothing.

Built-in policies and a user's own get the same view. Its numbers are those between two steps, or, while a stretch is under
way, those that cannot change within it; so a policy's answer is the same whether the engine leaps or steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .clock import to_s
from .need import blocks_for, slots_needed
from .request import Request, RequestSpec

if TYPE_CHECKING:
    from .scheduler import Scheduler


class RunningView:
    """One running request, as a policy sees it: what its client asked for and what it holds, not how long it will be."""

    __slots__ = ("_request", "_scheduler")

    def __init__(self, request: Request, scheduler: Scheduler) -> None:
        self._request = request
        self._scheduler = scheduler

    @property
    def request_id(self) -> str:
        """Its client's name for it."""
        return self._request.request_id

    @property
    def priority(self) -> int:
        """Smaller is more important."""
        return self._request.spec.priority

    @property
    def tenant(self) -> str:
        """Who sent it."""
        return self._request.spec.tenant

    @property
    def input_tokens(self) -> int:
        """Prompt length."""
        return self._request.spec.input_tokens

    @property
    def max_tokens(self) -> int | None:
        """The client's cap on output tokens."""
        return self._request.spec.max_tokens

    @property
    def output_tokens(self) -> int:
        """Tokens sampled so far."""
        return self._scheduler.decode.known(self._request) - self._request.spec.input_tokens

    @property
    def num_tokens(self) -> int:
        """Prompt and sampled tokens."""
        return self._scheduler.decode.known(self._request)

    @property
    def held_blocks(self) -> int:
        """Blocks in its table."""
        return self._request.held_blocks


class EngineView:
    """The engine, as a policy sees it."""

    __slots__ = ("_scheduler", "now_fs")

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.now_fs = 0
        """Now, in femtoseconds."""

    @property
    def now_s(self) -> float:
        """Now, in seconds."""
        return to_s(self.now_fs)

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self._scheduler.config.block_size

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens."""
        return self._scheduler.config.max_model_len

    @property
    def max_num_seqs(self) -> int:
        """Most running requests."""
        return self._scheduler.config.max_num_seqs

    @property
    def max_num_batched_tokens(self) -> int:
        """Most tokens a step."""
        return self._scheduler.config.max_num_batched_tokens

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self._scheduler.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated, cached ones included. Only meaningful between steps (in `may_start`)."""
        return self._scheduler.pool.num_free

    @property
    def num_owned_blocks(self) -> int:
        """Blocks that somebody holds. Only meaningful between steps."""
        return self._scheduler.pool.num_owned

    @property
    def blocks_needed_soon(self) -> int:
        """Blocks that the steadily decoding requests take within the next two blocks' worth of steps (2 x block_size): two each."""
        return 2 * len(self._scheduler.decode)

    @property
    def oldest_wait_s(self) -> float:
        """How long the next request to be tried has waited since it was sent."""
        head = self._scheduler.waiting.head()
        return to_s(self.now_fs - head.arrival_fs) if head is not None else 0.0

    @property
    def num_running(self) -> int:
        """Admitted requests."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Queued requests, preempted and swapped ones included."""
        return len(self._scheduler.waiting) + len(self._scheduler.swapped)

    @property
    def waiting_prompt_tokens(self) -> int:
        """Prompt tokens of queued requests and of those still computing their prompt."""
        return self._scheduler.backlog_tokens

    @property
    def decode_clock(self) -> int:
        """Decode steps done since the engine started."""
        return self._scheduler.decode.clock

    @property
    def drain(self) -> DrainMeter:
        """How fast requests have been leaving lately."""
        return self._scheduler.drain

    def running(self) -> Iterator[RunningView]:
        """The running requests, oldest admission first. Only meaningful between steps (in `may_start`)."""
        return (RunningView(request, self._scheduler) for request in self._scheduler.running.values())

    def blocks_to_finish(self, spec: RequestSpec | RunningView, output_tokens: int) -> int:
        """Blocks a request holds when it has produced `output_tokens` tokens."""
        tokens = min(spec.input_tokens + output_tokens, self.max_model_len)
        return blocks_for(slots_needed(spec.input_tokens, max(tokens - spec.input_tokens, 1)), self.block_size)


class DrainMeter:
    """How fast the engine gives room back: the last completions and prompt tokens served, with their times."""

    _KEEP = 64

    def __init__(self) -> None:
        self._times_fs: list[int] = []
        self._tokens: list[int] = []
        self._blocks: list[int] = []

    def ended(self, now_fs: int, prompt_tokens: int, blocks: int) -> None:
        """A request has left after being served."""
        for values, value in ((self._times_fs, now_fs), (self._tokens, prompt_tokens), (self._blocks, blocks)):
            values.append(value)
            if len(values) > self._KEEP:
                del values[0]

    def _per_s(self, amount: int, now_fs: int) -> float | None:
        elapsed_fs = now_fs - self._times_fs[0] if len(self._times_fs) > 1 else 0
        return amount * 1e15 / elapsed_fs if elapsed_fs > 0 else None

    def requests_per_s(self, now_fs: int) -> float | None:
        """Requests that leave a second, over the last 64; None before two have left."""
        return self._per_s(len(self._times_fs) - 1, now_fs)

    def prompt_tokens_per_s(self, now_fs: int) -> float | None:
        """Prompt tokens of requests that leave a second."""
        return self._per_s(sum(self._tokens[1:]), now_fs)

    def blocks_per_s(self, now_fs: int) -> float | None:
        """KV blocks that requests give back a second as they leave."""
        return self._per_s(sum(self._blocks[1:]), now_fs)
