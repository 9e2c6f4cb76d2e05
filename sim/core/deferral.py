"""Requests set aside for a reason of their own: they hold nothing, take no sequence slot, and nobody waits behind them.

An admission policy may say of the head of the queue that it cannot start now for a reason that has nothing to do with room (its
adapter is not loaded, its KV has not arrived). The head of a queue that waits for room blocks those behind it; this one steps out of
the line, is asked again at every step before anybody else, and is sent away when its time is up. Engines that counted such requests as
running, or ended their scan at them, stopped for ever (vLLM #53130). Source: vLLM V1 `skipped_waiting` (engine-policies §1.1.2).
"""

from __future__ import annotations

from dataclasses import dataclass

from .admission import Deferral, Rejection
from .clock import to_fs, to_s
from .request import Request
from .view import EngineView
from .waiting import WaitingQueue


@dataclass(slots=True)
class _Aside:
    deferral: Deferral
    since_fs: int

    @property
    def due_fs(self) -> int:
        return self.since_fs + to_fs(self.deferral.give_up_after_s)


class QueueWithAside:
    """A queue, and those set aside from it. In each round these are first, in the order in which they were set aside."""

    def __init__(self, queue: WaitingQueue, view: EngineView) -> None:
        self._queue = queue
        self._view = view
        self._aside: dict[Request, _Aside] = {}
        self._to_ask: list[Request] = []

    @property
    def steady(self) -> bool:
        """Nobody is set aside: their reasons, and their time, may pass at any step."""
        return self._queue.steady and not self._aside

    @property
    def wake_fs(self) -> int | None:
        """When the first of those set aside must be sent away; None if nobody is."""
        return min((aside.due_fs for aside in self._aside.values()), default=None)

    def by_reason(self) -> dict[str, int]:
        """How many are set aside, by reason."""
        counts: dict[str, int] = {}
        for aside in self._aside.values():
            counts[aside.deferral.reason] = counts.get(aside.deferral.reason, 0) + 1
        return counts

    def begin_round(self) -> None:
        """Everybody who was set aside is asked again."""
        self._to_ask = list(reversed(self._aside))

    def set_aside(self, request: Request, deferral: Deferral, now_fs: int) -> Rejection | None:
        """Put the head aside, or leave it there; a Rejection if it has been there too long. Then it must be taken by `pop`."""
        aside = self._aside.get(request)
        if aside is None:
            self._queue.pop(request)
            self._aside[request] = _Aside(deferral, now_fs)
            return None
        aside.deferral = deferral
        if now_fs < aside.due_fs:
            self._to_ask.pop()
            return None
        return Rejection(
            code=f"deferred_{deferral.reason}",
            http_status=503,
            reason=f"waited {to_s(now_fs - aside.since_fs):.1f} s aside: {deferral.why}",
        )

    def __len__(self) -> int:
        return len(self._queue) + len(self._aside)

    def add(self, request: Request) -> bool:
        """Queue a new arrival."""
        return self._queue.add(request)

    def put_back(self, request: Request) -> None:
        """Queue a preempted request."""
        self._queue.put_back(request)

    def started(self, request: Request) -> None:
        """A request that was never queued runs."""
        self._queue.started(request)

    def head(self, *, important: bool = False) -> Request | None:
        """The next to try: of those set aside who has not been asked in this round, else the queue's. Who is set aside and not `important`
        is not asked in this round then.
        """
        while important and self._to_ask and not self._view.spares(self._to_ask[-1].spec.priority):
            self._to_ask.pop()
        return self._to_ask[-1] if self._to_ask else self._queue.head(important=important)

    def pop(self, request: Request) -> None:
        """Take a request that `head` has just named."""
        if self._aside.pop(request, None) is None:
            self._queue.pop(request)
        else:
            self._to_ask.pop()

    def discard(self, request: Request) -> None:
        """Note that a queued request has ended."""
        if self._aside.pop(request, None) is None:
            self._queue.discard(request)
        elif request in self._to_ask:
            self._to_ask.remove(request)
