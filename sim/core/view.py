"""What a policy may look at: a window on the engine that shows everything and opens nothing.

Built-in policies and a user's own get the same view. Its numbers are those between two steps, or, while a stretch is under
way, those that cannot change within it; so a policy's answer is the same whether the engine leaps or steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING

from .clock import to_s
from .look import Look
from .meters import DrainView
from .need import slots_needed
from .request import Request, RequestSpec, State

if TYPE_CHECKING:
    from .scheduler import Scheduler


class RunningView(Look):
    """One running request, as a policy sees it: what its client asked for and what it holds, not how long it will be."""

    __slots__ = ("_request", "_scheduler")

    _request: Request
    _scheduler: Scheduler

    def __init__(self, request: Request, scheduler: Scheduler) -> None:
        _set_request(self, request)
        _set_scheduler(self, scheduler)

    @property
    def what(self) -> str:
        """Which request."""
        return f"running request {self.request_id!r}"

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
    def lora(self) -> str:
        """Its adapter; empty for the base model."""
        return self._request.spec.namespace.lora

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

    @property
    def computed_tokens(self) -> int:
        """Tokens whose KV exists: less than `num_tokens` - 1 while its prompt is being computed."""
        return self._scheduler.decode.computed(self._request)


_set_request: Callable[[RunningView, Request], None] = RunningView.__dict__["_request"].__set__
_set_scheduler: Callable[[RunningView, Scheduler], None] = RunningView.__dict__["_scheduler"].__set__


class EngineView(Look):
    """The engine, as a policy sees it."""

    __slots__ = ("_drain", "_scheduler")
    _drain: DrainView
    _scheduler: Scheduler

    def __init__(self, scheduler: Scheduler) -> None:
        object.__setattr__(self, "_scheduler", scheduler)
        object.__setattr__(self, "_drain", DrainView(scheduler.drain))

    @property
    def now_fs(self) -> int:
        """Now, in femtoseconds."""
        return self._scheduler.viewed_at_fs

    @property
    def now_s(self) -> float:
        """Now, in seconds."""
        return to_s(self._scheduler.viewed_at_fs)

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
        """Blocks that the steadily decoding requests take within the next two blocks' worth of steps (2 x block_size): two each, in every
        attention group.
        """
        return 2 * len(self._scheduler.decode) * self.num_groups

    @property
    def blocks_to_copy(self) -> int:
        """Blocks that running requests share and must copy before they go on (forks). Only meaningful between steps."""
        return self._scheduler.families.blocks_to_copy() if self._scheduler.families else 0

    @property
    def oldest_wait_s(self) -> float:
        """How long the next request to be tried has waited since it was sent."""
        head = self._scheduler.waiting.head()
        return to_s(self.now_fs - head.arrival_fs) if head is not None else 0.0

    @property
    def longest_wait_s(self) -> float:
        """How long the request below the ladder's guard that has waited longest, and has not run, has waited, wherever it stands.
        Counted for a ladder that sheds; 0 without one.
        """
        below = self._scheduler.below_guard
        oldest_fs = None if below is None else below.oldest_fs()
        return 0.0 if oldest_fs is None else to_s(self.now_fs - oldest_fs)

    @property
    def num_running(self) -> int:
        """Admitted requests: those included that hold a slot a step longer with asynchronous scheduling, and whose prefix is loaded."""
        scheduler = self._scheduler
        loading = 0 if scheduler.offload is None else len(scheduler.offload.loads.waiting)
        return len(scheduler.running) + len(scheduler.departing) + loading

    @property
    def num_admissions(self) -> int:
        """Admissions so far, those after a preemption included. With `num_running` it tells whether the running requests are the same."""
        return self._scheduler.num_admissions

    @property
    def num_waiting(self) -> int:
        """Queued requests, preempted and swapped ones included, and those that will start as copies of another one."""
        return self._scheduler.num_queued

    def spares(self, priority: int) -> bool:
        """Whether the degradation ladder never touches requests of this priority."""
        return self._scheduler.knobs.spares(priority)

    def is_queued(self, request_id: str) -> bool:
        """Whether a request waits and has never run: nothing is lost but its place if it is sent away."""
        request = self._scheduler.requests.get(request_id)
        return (
            request is not None
            and request.state is State.WAITING
            and not request.num_preemptions
            and request.spec.forking is None
        )

    @property
    def num_in_flight(self) -> int:
        """Requests in the engine: running, queued, or served by the CPU executor."""
        server = self._scheduler.cpu_server
        return self.num_running + self.num_waiting + (0 if server is None else server.num_slots_taken)

    @property
    def waiting_prompt_tokens(self) -> int:
        """Prompt tokens of queued requests and of those still computing their prompt."""
        return self._scheduler.backlog_tokens

    @property
    def decode_clock(self) -> int:
        """Decode steps done since the engine started."""
        return self._scheduler.decode.clock

    @property
    def has_full_attention(self) -> bool:
        """Whether requests keep every block. With a sliding window they give back what is out of view while they run."""
        return not self._scheduler.holdings.windows

    @property
    def num_groups(self) -> int:
        """Attention groups: block tables that a request has."""
        return len(self._scheduler.config.kv_groups) or 1

    @property
    def decode_version(self) -> int:
        """Changes whenever a request starts or stops decoding; while it stands still, each of them gains a token a decode step."""
        return self._scheduler.decode.version

    @property
    def all_decoding(self) -> bool:
        """Whether every running request gains exactly one token a decode step: none is computing its prompt or catching up."""
        scheduler = self._scheduler
        return not scheduler.catching_up and (scheduler.offload is None or not scheduler.offload.loads.waiting)

    @property
    def drain(self) -> DrainView:
        """How fast prompts are computed and requests leave, and how long their outputs were."""
        return self._drain

    def running(self) -> Iterator[RunningView]:
        """The admitted requests, oldest admission first. Only meaningful between steps (in `may_start`)."""
        return (running for _, running in self.running_by_id())

    def running_by_id(self) -> Iterator[tuple[str, RunningView]]:
        """The same with their ids: a view of a request costs less than most questions to it."""
        scheduler = self._scheduler
        loading = () if scheduler.offload is None else scheduler.offload.loads.waiting
        return (
            (request.spec.request_id, RunningView(request, scheduler))
            for request in chain(scheduler.running.values(), loading)
        )

    def output_cap(self, spec: RequestSpec | RunningView) -> int:
        """Most output tokens a request can come to: its client's cap, or else what the context has room for."""
        room = self.max_model_len - spec.input_tokens
        return room if spec.max_tokens is None else min(spec.max_tokens, room)

    def blocks_to_finish(self, spec: RequestSpec | RunningView, output_tokens: int) -> int:
        """Blocks a request holds when it has produced `output_tokens` tokens, or, with a sliding window, the most it holds until then."""
        return self._scheduler.config.most_blocks(slots_needed(spec.input_tokens, max(output_tokens, 1)))

    def decoding_blocks(self, num_tokens: int) -> int:
        """Blocks that a request holds while it decodes its last of `num_tokens` tokens, in all attention groups."""
        return self._scheduler.config.blocks_at(num_tokens - 1, num_tokens)
