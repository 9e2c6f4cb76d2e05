"""Limits: how much may be in the engine, be queued, run, or be held in the KV pool.

The first two are judged at the front door, where a request that is turned away is told when to come back; the others keep
the head of the queue waiting. Source of the first two: vLLM `--max-num-queued-reqs` and `--max-num-queued-tokens` (PR #49445, in 0.29),
which count on arrival and give no Retry-After. Here the check and the count are one call, so a burst cannot slip in between (vLLM
#58192).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from math import inf

from ..admission import AdmissionBase, Displacement, Rejection
from ..config import ConfigError
from ..look import RequestLook
from ..meters import Rate
from ..request import RequestSpec
from ..view import EngineView
from .promises import Drain, Promises


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """How full something is that an arrival would add to, and how fast it empties."""

    used: float
    asked: float
    """The arrival may enter if `used + asked`, and what is promised to others, is within `limit`."""
    limit: float
    units: float
    """What the arrival takes from those who come after it."""
    drain: Drain
    """How fast it empties."""
    most_held_back: float = inf
    """Most room that is kept for those who were told to come back: to hold back more would leave the engine idle, and it would not
    empty as fast as they were told."""


class FrontDoor(AdmissionBase):
    """A limit at the front door, with a line of those who were told when to come back.

    `first_wait_s` is what one departure is taken to need before two have been seen; `grace_s` is how long a promise is kept
    open for a client that is late. Steady: it says nothing about starting.
    """

    code = "queue_full"

    def __init__(self, *, first_wait_s: float = 1.0, grace_s: float = 2.0) -> None:
        if first_wait_s <= 0 or grace_s < 0:
            raise ConfigError(
                f"first_wait_s is {first_wait_s} and grace_s {grace_s}; both are seconds, the first above 0"
            )
        self.first_wait_s = first_wait_s
        self.promises = Promises(grace_s)

    def _judge(self, spec: RequestSpec, view: EngineView, level: Level, what: str) -> Rejection | None:
        """Let the arrival in, or give it a place in the line. `what` says in words how full it is."""
        now_fs, drain = view.now_fs, level.drain
        came_in_time = self.promises.claim(spec.request_id, now_fs)
        held_back = 0.0 if came_in_time else min(self.promises.held_back(now_fs, drain), level.most_held_back)
        if level.used + level.asked + held_back <= level.limit:
            self.promises.leave(spec.request_id)
            return None
        before = len(self.promises)
        wait_s = self.promises.promise(
            spec.request_id,
            level.units,
            excess=level.used + level.asked - level.limit,
            now_fs=now_fs,
            drain=drain,
        )
        line = f", {before} others were told to come back" if before else ""
        return Rejection(
            code=self.code,
            http_status=503,
            reason=f"the server is busy: {what}{line}; come back in {wait_s:.1f} s",
            retry_after_s=wait_s,
        )


class Places:
    """Who waits, least important first, of these the latest first."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, RequestSpec]] = []
        self._arrivals = 0
        self._given_up: tuple[str, tuple[int, int, RequestSpec]] | None = None

    def take(self, spec: RequestSpec, view: EngineView) -> None:
        """A request joins the queue."""
        self._arrivals += 1
        heappush(self._heap, (-spec.priority, -self._arrivals, spec))
        if len(self._heap) > 64 + 2 * view.num_waiting:  # most have long left the queue
            self._heap = [entry for entry in self._heap if entry[2] is spec or view.is_queued(entry[2].request_id)]
            heapify(self._heap)

    def give_up(self, spec: RequestSpec, view: EngineView) -> RequestSpec | None:
        """Take the place of the first that is less important than `spec`; None if nobody is."""
        while self._heap and not view.is_queued(self._heap[0][2].request_id):
            heappop(self._heap)
        if not self._heap or self._heap[0][2].priority <= spec.priority:
            return None
        entry = heappop(self._heap)
        self._given_up = (spec.request_id, entry)
        return entry[2]

    def take_back(self, spec: RequestSpec) -> str | None:
        """`spec` did not enter after all: returns who keeps its place, if anybody was to lose it."""
        if self._given_up is None or self._given_up[0] != spec.request_id:
            return None
        entry, self._given_up = self._given_up[1], None
        heappush(self._heap, entry)
        return entry[2].request_id


class MaxInFlight(FrontDoor):
    """At most `limit` requests in the engine, running and queued together; 0 turns everybody away.

    The rate at which requests leave is counted from arrival to arrival, while the engine is full: somebody waits in it, or nine
    tenths of the limit are used. What leaves an engine that is not full says how few came, not how many it can serve.
    With `displace`, an arrival that finds no room takes the place of a queued request that is less important, if there is one: of
    the least important the latest, which is told when to come back.
    Source: vLLM 0.29 `--max-num-queued-reqs` (503 when count + 1 > limit); SGLang's `max_queued_requests` counts the queue alone, and
    displaces where priorities are on.
    """

    def __init__(self, limit: int, *, first_wait_s: float = 1.0, grace_s: float = 2.0, displace: bool = False) -> None:
        super().__init__(first_wait_s=first_wait_s, grace_s=grace_s)
        self._places = Places() if displace else None
        if limit < 0:
            raise ConfigError(f"the limit on requests in the engine is {limit}; it must be at least 0")
        self.limit = limit
        self._leaving = Rate(keep=256)
        self._last: tuple[int, int] | None = None
        """Time and number of finished requests at the last arrival, if the engine was full then."""

    def arrive(self, spec: RequestSpec, view: EngineView) -> Rejection | Displacement | None:
        """Count who is in the engine."""
        used = view.num_in_flight
        if not self.limit:
            return Rejection(code=self.code, http_status=503, reason="the server takes no requests: its limit is 0")
        rate = self._rate_per_s(view)
        beside_the_batch = (
            self.limit - view.max_num_seqs * 3 // 4
        )  # newcomers keep the batch that full; what is held is the queue
        level = Level(
            used=used,
            asked=1,
            limit=self.limit,
            units=1,
            drain=Drain(rate_per_s=rate),
            most_held_back=beside_the_batch if beside_the_batch > 0 else inf,
        )
        what = f"{used} requests are in it, the limit is {self.limit}, and {rate:.3g} leave a second"
        said = self._judge(spec, view, level, what)
        if self._places is None:
            return said
        if said is not None:
            victim = self._places.give_up(spec, view)
            if victim is None:
                return said
            self.promises.leave(spec.request_id)
            said = self._judge(victim, view, level, what)
            assert said is not None  # there is no more room than there was
            reason = f"a request of priority {spec.priority} took its place, it has {victim.priority}; {said.reason}"
            self._places.take(spec, view)
            return Displacement(((victim.request_id, replace(said, code="displaced", reason=reason)),))
        self._places.take(spec, view)
        return None

    def withdraw(self, spec: RequestSpec, view: EngineView) -> None:
        """Whoever was to go for this request stays."""
        if self._places is not None and (stays := self._places.take_back(spec)) is not None:
            self.promises.leave(stays)

    def _rate_per_s(self, view: EngineView) -> float:
        now = (view.now_fs, view.drain.outputs.num_finished)
        full = view.num_waiting > 0 or view.num_in_flight >= 0.9 * self.limit
        if self._last is not None and full:
            self._leaving.add(now[0] - self._last[0], now[1] - self._last[1])
        self._last = now if full else None
        return self._leaving.per_s() or view.drain.requests_per_s() or 1.0 / self.first_wait_s


class MaxQueuedTokens(FrontDoor):
    """Nobody enters while `limit` or more prompt tokens wait or are being computed; prefix hits are not subtracted.

    Source: vLLM 0.29 `--max-num-queued-tokens` (503 when tokens >= limit; the last one in may exceed it).
    """

    def __init__(self, limit: int, *, first_wait_s: float = 1.0, grace_s: float = 2.0) -> None:
        super().__init__(first_wait_s=first_wait_s, grace_s=grace_s)
        if limit < 0:
            raise ConfigError(f"the limit on queued prompt tokens is {limit}; it must be at least 0")
        self.limit = limit

    def arrive(self, spec: RequestSpec, view: EngineView) -> Rejection | None:
        """Count the prompt tokens that have no first token yet."""
        used, piece = view.waiting_prompt_tokens, view.drain.prompt_piece_tokens() or float(spec.input_tokens)
        if not self.limit:
            return Rejection(code=self.code, http_status=503, reason="the server takes no requests: its limit is 0")
        rate = view.drain.prefill_tokens_per_s() or piece / self.first_wait_s
        drain = Drain(rate_per_s=rate, piece=piece, samples=view.drain.num_prompts())
        level = Level(used=used, asked=1, limit=self.limit, units=spec.input_tokens, drain=drain)
        return self._judge(
            spec,
            view,
            level,
            f"{used} prompt tokens wait, the limit is {self.limit}, and {rate:.4g} are computed a second",
        )


class MaxRunning(AdmissionBase):
    """At most `limit` requests run at once; below `max_num_seqs` it leaves room in the batch unused, and in the pool.

    Steady: while requests only decode, none of them stops running.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ConfigError(f"the limit on running requests is {limit}; it must be at least 1")
        self.limit = limit

    def may_start(self, request: RequestLook, need_blocks: int, view: EngineView) -> bool | Rejection:
        """Count who runs."""
        return view.num_running < self.limit


class MaxKvBlocks(AdmissionBase):
    """Start the head of the queue only if at most `limit` blocks are then in use; waived when nothing runs.

    It is a watermark counted from the other end: what lies above the limit is for the growth of those who run.
    Steady: while requests only decode, the blocks in use do not get fewer.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ConfigError(f"the limit on KV blocks is {limit}; it must be at least 1")
        self.limit = limit

    def may_start(self, request: RequestLook, need_blocks: int, view: EngineView) -> bool | Rejection:
        """Compare what would be in use with the limit."""
        return not view.num_running or view.num_owned_blocks + need_blocks <= self.limit
