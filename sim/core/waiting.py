"""The queue of requests that wait for admission, and the orders it can have."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Protocol

from .request import Request, State

if TYPE_CHECKING:
    from .view import EngineView


class WaitingQueue(Protocol):
    """Requests in the order in which they will be tried. Ended requests are passed over, so an abort costs nothing here."""

    @property
    def steady(self) -> bool:
        """True if the order of those in the queue changes only when somebody enters or leaves it."""
        ...

    def __len__(self) -> int: ...
    def add(self, request: Request) -> bool:
        """Queue a new arrival; True when it became the head."""
        ...

    def put_back(self, request: Request) -> None:
        """Queue a preempted request."""
        ...

    def started(self, request: Request) -> None:
        """Hear that a request which was never queued has got its first token, as a copy of one that runs."""
        ...

    def head(self) -> Request | None:
        """The next request to try."""
        ...

    def pop(self) -> Request:
        """Take the head."""
        ...

    def discard(self, request: Request) -> None:
        """Note that a queued request has ended."""
        ...


class FcfsQueue:
    """First come, first served; a preempted request goes to the front (vLLM V1)."""

    steady = True

    def __init__(self, view: EngineView | None = None) -> None:
        self._queue: deque[Request] = deque()
        self._ended = 0

    def __len__(self) -> int:
        return len(self._queue) - self._ended

    def add(self, request: Request) -> bool:
        """Queue at the back."""
        self._queue.append(request)
        return len(self) == 1

    def put_back(self, request: Request) -> None:
        """Queue at the front."""
        self._queue.appendleft(request)

    def started(self, request: Request) -> None:
        """Nothing depends on it."""

    def head(self) -> Request | None:
        """The oldest arrival, or the request preempted last."""
        while self._queue and self._queue[0].state is State.ENDED:
            self._queue.popleft()
            self._ended -= 1
        return self._queue[0] if self._queue else None

    def pop(self) -> Request:
        """Take the head; call after `head` returned it."""
        return self._queue.popleft()

    def discard(self, request: Request) -> None:
        """The request stays in place until it comes to the head."""
        self._ended += 1


class KeyedQueue:
    """Smallest key first, ties by arrival; preempted requests take the place their key gives them. The key of a request is
    computed when it is queued and must not depend on when that is.
    """

    steady = True

    def __init__(self, key: Callable[[Request], float]) -> None:
        self._key = key
        self._heap: list[tuple[float, int, int, Request]] = []
        self._ended = 0

    def __len__(self) -> int:
        return len(self._heap) - self._ended

    def add(self, request: Request) -> bool:
        """Queue by key."""
        self.put_back(request)
        return self.head() is request

    def put_back(self, request: Request) -> None:
        """Queue by key."""
        heappush(self._heap, (self._key(request), request.arrival_fs, request.seq, request))

    def started(self, request: Request) -> None:
        """Nothing depends on it."""

    def head(self) -> Request | None:
        """The request with the smallest key, the oldest of them."""
        while self._heap and self._heap[0][3].state is State.ENDED:
            heappop(self._heap)
            self._ended -= 1
        return self._heap[0][3] if self._heap else None

    def pop(self) -> Request:
        """Take the head; call after `head` returned it."""
        return heappop(self._heap)[3]

    def discard(self, request: Request) -> None:
        """The request stays in place until it comes to the head."""
        self._ended += 1


def priority_queue(view: EngineView | None = None) -> KeyedQueue:
    """Strictly by priority, smallest first (vLLM V1 priority scheduling)."""
    return KeyedQueue(lambda request: request.spec.priority)


def aging_queue(fs_per_level: int) -> Callable[[EngineView], KeyedQueue]:
    """Makes queues by priority, where waiting `fs_per_level` is worth one level: nobody starves.

    All requests age alike, so the order of two never changes and the key is fixed: arrival + priority x fs_per_level.
    """
    return lambda view: KeyedQueue(lambda request: request.arrival_fs + request.spec.priority * fs_per_level)
