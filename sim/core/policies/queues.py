"""Orders of the queue beyond first come, first served: shortest predicted output first, earliest deadline first, and variants.

Each is made with the engine's view (`Policy.queue`), of which most need nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..clock import to_fs
from ..config import ConfigError
from ..look import RequestLook
from ..request import Request, RequestSpec
from ..view import EngineView
from ..waiting import FcfsQueue, KeyedQueue, WaitingQueue

QueueFactory = Callable[[EngineView], WaitingQueue]
"""Makes an engine's queue."""


class BackOfTheQueue(FcfsQueue):
    """First come, first served; a preempted request queues again at the back (SGLang `retract_decode`)."""

    def put_back(self, request: Request) -> None:
        """Queue at the back."""
        self.add(request)


def arrival_queue(view: EngineView | None = None) -> KeyedQueue:
    """By arrival, whoever was preempted included (TensorRT-LLM keeps its requests in that order)."""
    return KeyedQueue(lambda request: request.arrival_fs, view)


def shortest_predicted_queue(view: EngineView) -> KeyedQueue:
    """Smallest predicted output first: the mean of the tenant's finished requests, or of everybody's, at most `max_tokens`.

    Without any history the cap alone orders. A preempted request is judged by what it lacks. Steady: the prediction is made when a
    request is queued. Long requests starve as long as short ones keep coming; add a deadline or a cap where that matters.
    """

    def predicted(request: RequestLook) -> float:
        cap = view.output_cap(request.spec)
        mean = view.drain.outputs.mean(request.spec.tenant)
        return max(min(cap, cap if mean is None else mean) - request.num_output_tokens, 1)

    return KeyedQueue(predicted, view)


def deadline_queue(deadline_s: float | Mapping[int, float], *, late_last: bool = True) -> QueueFactory:
    """Earliest deadline for the first token first; deadlines are one for all or by priority, and a priority not listed has none.

    With `late_last`, what has missed its deadline is deferred: it goes behind everything that can still meet its own, and does not
    drag others into lateness after it (EDF alone does, under overload).
    """
    values = deadline_s.values() if isinstance(deadline_s, Mapping) else (deadline_s,)
    if not values or any(value <= 0 for value in values):
        raise ConfigError(f"deadlines are seconds above 0, at least one; got {deadline_s}")

    def due_fs(spec: RequestSpec, arrival_fs: int) -> int:
        given_s = deadline_s.get(spec.priority) if isinstance(deadline_s, Mapping) else deadline_s
        return arrival_fs + (to_fs(given_s) if given_s is not None else NEVER_FS)

    def key(request: RequestLook) -> float:
        # What has had its first token is late for nothing, and was the longest here.
        return -1 if request.first_token_fs is not None else due_fs(request.spec, request.arrival_fs)

    if not late_last:
        return lambda view: KeyedQueue(key, view)
    return lambda view: DeferringQueue(view, key)


NEVER_FS = 1 << 80
"""Farther away than any deadline."""


class DeferringQueue:
    """Earliest deadline first among those that can still meet it, then the others by arrival.

    Not steady: time alone moves a request from the first part to the second.
    """

    steady = False

    def __init__(self, view: EngineView, due_fs: Callable[[RequestLook], float]) -> None:
        self._view = view
        self._due_fs = due_fs
        self._hopeful = KeyedQueue(due_fs, view)
        self._late = KeyedQueue(lambda request: request.arrival_fs, view)
        self._in_late: set[int] = set()

    def __len__(self) -> int:
        return len(self._hopeful) + len(self._late)

    def add(self, request: Request) -> bool:
        """Queue by deadline. Whether it is the head will be known when the next step is planned, so it may be."""
        self._hopeful.add(request)
        return True

    def put_back(self, request: Request) -> None:
        """A preempted request has had its first token, or keeps its deadline."""
        self._hopeful.put_back(request)

    def started(self, request: Request) -> None:
        """Nothing depends on it."""

    def head(self, *, important: bool = False) -> Request | None:
        """The most urgent that is not late; of the late ones the oldest."""
        while (request := self._hopeful.head(important=important)) is not None:
            if not 0 <= self._due_fs(RequestLook(request)) < self._view.now_fs:
                return request
            self._hopeful.pop(request)
            self._late.put_back(request)
            self._in_late.add(request.seq)
        return self._late.head(important=important)

    def pop(self, request: Request) -> None:
        """Take a request that `head` has just named."""
        if request.seq in self._in_late:
            self._in_late.discard(request.seq)
            self._late.pop(request)
        else:
            self._hopeful.pop(request)

    def discard(self, request: Request) -> None:
        """The request stays in place until it comes to the head."""
        if request.seq in self._in_late:
            self._in_late.discard(request.seq)
            self._late.discard(request)
        else:
            self._hopeful.discard(request)
