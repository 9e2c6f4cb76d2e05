"""The queue of requests that wait for admission."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import Protocol

from .request import Request, State


class WaitingQueue(Protocol):
    """Requests in the order in which they will be tried. Ended requests are passed over, so an abort costs nothing here."""

    def __len__(self) -> int: ...
    def add(self, request: Request) -> bool:
        """Queue a new arrival; True when it became the head."""
        ...

    def put_back(self, request: Request) -> None:
        """Queue a preempted request."""
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

    def __init__(self) -> None:
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


class PriorityQueue:
    """Smallest `(priority, arrival, seq)` first; preempted requests take the place their priority gives them (vLLM V1)."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Request]] = []
        self._ended = 0

    def __len__(self) -> int:
        return len(self._heap) - self._ended

    def add(self, request: Request) -> bool:
        """Queue by priority."""
        self.put_back(request)
        return self.head() is request

    def put_back(self, request: Request) -> None:
        """Queue by priority."""
        heappush(self._heap, (request.spec.priority, request.arrival_fs, request.seq, request))

    def head(self) -> Request | None:
        """The most important request, the oldest of them."""
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


QUEUES: dict[str, type[FcfsQueue] | type[PriorityQueue]] = {"fcfs": FcfsQueue, "priority": PriorityQueue}
"""Queue by scheduling policy."""
