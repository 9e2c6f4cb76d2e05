"""A request: what a client asked for, the state it is in, and what it got."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from .forking import Forking
from .retention import Retention

if TYPE_CHECKING:
    from .prefix import BlockKeys
    from .sharing import Run
    from .tables import BlockTable


@dataclass(frozen=True, slots=True)
class Namespace:
    """What must be equal, besides the tokens, for KV to be reusable. Typed fields: a LoRA never equals a salt (vLLM #44701)."""

    model: str = ""
    lora: str = ""
    salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """Everything about a request that is fixed when it is created, by a trace or by named random streams.

    Policies see `max_tokens`; `output_tokens`, the length the model will really produce, is for the executor and
    the bookkeeping of a simulation only.
    """

    request_id: str
    arrival_s: float
    """Seconds after the start of the run."""
    input_tokens: int
    """Prompt length, at least 1."""
    output_tokens: int
    """Tokens the model will produce unless something ends the request sooner, at least 1."""
    max_tokens: int | None = None
    """The client's cap on output tokens; None when the client gave none."""
    priority: int = 0
    """Smaller is more important, as in vLLM."""
    tenant: str = ""
    content_ids: tuple[Hashable, ...] = ()
    """Identity of the content, one id for each `content_block_tokens` tokens from the first; equal ids after equal ids mean
    equal tokens. May be shorter than the prompt (the rest is private to this request) or longer (it then names the output)."""
    content_block_tokens: int = 0
    """Tokens named by one content id: 512 in the Mooncake traces, the block size when ids are made from real tokens."""
    namespace: Namespace = Namespace()
    retention: tuple[Retention, ...] = ()
    """What of it is to be kept for how long once it has ended, where the engine's eviction order is `retention`."""
    n: int = 1
    """Samples of this prompt to produce; see `samples`."""
    sample_of: str = ""
    """Requests with the same value here have the same prompt, named or not."""
    slot: int = 0
    """Place among the requests that are samples of one."""
    forking: Forking | None = None
    """How the samples come from each other by forks; None when each is a request of its own that finds their prompt in the cache."""
    cancel_after_s: float | None = None
    """The client goes away this long after arrival, if it is not served by then."""
    timeout_s: float | None = None
    """The client gives up this long after arrival, if it is not served by then."""

    def __post_init__(self) -> None:
        for name in ("input_tokens", "output_tokens", "max_tokens", "n"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"request {self.request_id}: {name} is {value}; it must be at least 1")
        if self.forking is not None and self.n not in (1, self.forking.width):
            raise ValueError(
                f"request {self.request_id}: n is {self.n}, but it forks into {self.forking.width} sequences"
            )
        if self.content_ids and self.content_block_tokens < 1:
            raise ValueError(
                f"request {self.request_id}: content_block_tokens is {self.content_block_tokens}; ids name at least 1 token"
            )

    @property
    def target_tokens(self) -> int:
        """Output tokens this request ends with when nothing interferes."""
        return self.output_tokens if self.max_tokens is None else min(self.output_tokens, self.max_tokens)

    @property
    def named_tokens(self) -> int:
        """Leading tokens, prompt and output, whose content `content_ids` names: what others may share."""
        named = len(self.content_ids) * self.content_block_tokens
        if named and len(self.content_ids) <= -(-self.input_tokens // self.content_block_tokens):
            named = min(named, self.input_tokens)  # the last id names a part of its span: what follows it is output
        return named


def samples(spec: RequestSpec) -> tuple[RequestSpec, ...]:
    """The `n` requests that stand for one request with `n` samples, as in vLLM V1: each is scheduled on its own, all share the
    full blocks of their prompt, and all leave when the client leaves. They are called `id#0`, `id#1`, …. With `forking` the
    first computes the prompt and the others start as copies of it (`families`).
    """
    if spec.n == 1:
        return (spec,)
    return tuple(
        replace(spec, request_id=f"{spec.request_id}#{index}", n=1, sample_of=spec.request_id, slot=index)
        for index in range(spec.n)
    )


class State(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    SWAPPED = "swapped"
    ON_CPU = "on_cpu"
    ENDED = "ended"


class Outcome(Enum):
    """How a request ended. Every request ends in exactly one of these."""

    FINISHED = "finished"
    REJECTED = "rejected"
    ABORTED = "aborted"
    TIMED_OUT = "timed_out"
    FAILED = "failed"


class Request:
    """A request in an engine: the mutable twin of its `RequestSpec`.

    While a request is in the decode set (`decoding`), its token counts follow from the set's clock and are not stored;
    read them with `DecodeSet.computed`. Otherwise `num_computed_tokens` and `num_tokens` are kept here.
    """

    __slots__ = (
        "abort_fs",
        "anchor",
        "arrival_fs",
        "computed_high",
        "cpu_blocks",
        "decode_spans",
        "decoding",
        "degraded",
        "dropped_tokens",
        "emptied_slots",
        "ended_fs",
        "finish_clock",
        "finish_reason",
        "first_token_fs",
        "kv_block_fs",
        "held_blocks",
        "held_since_fs",
        "keys",
        "last_token_fs",
        "num_computed_tokens",
        "num_preemptions",
        "num_registered",
        "num_tokens",
        "order",
        "other_gaps_fs",
        "outcome",
        "peak_blocks",
        "prefix_hit_tokens",
        "reason",
        "recomputed_tokens",
        "retry_after_s",
        "scheduled_fs",
        "seq",
        "settled_clock_fs",
        "settled_fs",
        "shared_fs",
        "shared_runs",
        "spec",
        "state",
        "table",
        "target_tokens",
        "token_fs",
    )

    def __init__(self, spec: RequestSpec, seq: int, arrival_fs: int, keys: BlockKeys, table: BlockTable) -> None:
        self.spec = spec
        self.seq = seq
        """Order of arrival at this engine; breaks ties."""
        self.order = -1
        """Order of the latest admission; running requests are served in this order."""
        self.arrival_fs = arrival_fs
        self.state = State.WAITING
        self.outcome: Outcome | None = None
        self.finish_reason = ""
        """`stop` or `length` of a finished request, the code of a rejection, else empty."""
        self.reason = ""
        """In words, with numbers, why the request ended as it did."""
        self.retry_after_s: float | None = None
        self.keys = keys
        self.table = table
        self.num_tokens = spec.input_tokens
        """Known tokens: the prompt and what was sampled so far."""
        self.num_computed_tokens = 0
        """Tokens whose KV exists."""
        self.target_tokens = spec.input_tokens + spec.target_tokens
        """Known tokens at which the request is finished."""
        self.num_registered = 0
        """Leading blocks that are in the prefix index."""
        self.computed_high = 0
        """Most tokens ever computed: below it, computing is recomputing."""
        self.decoding = False
        self.anchor = 0
        self.finish_clock = 0
        self.decode_spans: list[tuple[int, int]] = []
        """Intervals [start, end) of the decode set's clock in which every step gave this request a token, one step's time after
        the token before."""
        self.other_gaps_fs: list[int] = []
        """The remaining inter-token gaps: the first in the decode set, and those that span missed steps."""
        self.abort_fs: int | None = None
        """When the client went away while a step with this request was out."""
        self.scheduled_fs: int | None = None
        self.first_token_fs: int | None = None
        self.last_token_fs: int | None = None
        self.ended_fs: int | None = None
        self.prefix_hit_tokens = 0
        self.num_preemptions = 0
        self.recomputed_tokens = 0
        self.peak_blocks = 0
        self.degraded: list[str] = []
        """Rungs of the ladder that touched it, in order of first touch."""
        self.dropped_tokens = 0
        """Tokens in the middle of its context whose KV was given up (`truncate`)."""
        self.emptied_slots = 0
        """Of a decoding request: token slots of the blocks that it has given back out of its tables."""
        self.cpu_blocks: list[int] = []
        """Blocks of the CPU pool that hold its KV while it is swapped out."""
        self.held_blocks = 0
        self.held_since_fs = 0
        self.kv_block_fs = 0
        """Integral of blocks held over time; a shared block counts for each holder."""
        self.shared_fs: dict[int, int] = {}
        """Part of it by the number of holders the blocks had, from two on."""
        self.shared_runs: list[Run] = []
        """Shared blocks that it holds now."""
        self.token_fs = 0
        """Integral over time of the filled slots of its blocks, which for one table are its tokens (of a decoding request, up to
        `settled_fs`)."""
        self.settled_fs = 0
        self.settled_clock_fs = 0
        """The decode set's `busy_fs` and `clock_fs` up to which `token_fs` is counted."""

    @property
    def request_id(self) -> str:
        """The name its client knows it by."""
        return self.spec.request_id

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far (not while `decoding`)."""
        return self.num_tokens - self.spec.input_tokens

    def degrade(self, action: str) -> None:
        """Note that a rung of the ladder touched this request, unless it has ended for its client."""
        if action not in self.degraded and self.ended_fs is None:
            self.degraded.append(action)

    def hold(self, change: int, now_fs: int) -> None:
        """Account for `change` blocks added to the table (or, when negative, given back)."""
        if now_fs > self.held_since_fs:  # what is taken and taken back in one decision was never held
            self.kv_block_fs += self.held_blocks * (now_fs - self.held_since_fs)
            if self.held_blocks > self.peak_blocks:
                self.peak_blocks = self.held_blocks
        self.held_blocks += change
        self.held_since_fs = now_fs
