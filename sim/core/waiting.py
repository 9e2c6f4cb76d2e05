"""The queue of requests that wait for admission, and the orders it can have.

A queue keeps those whom the degradation ladder spares (the important) apart from the others, so that it can name the first of them at
any time: while the ladder keeps the others out, those are passed over and keep their places.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, Protocol

from .look import RequestLook
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

    def head(self, *, important: bool = False) -> Request | None:
        """The next request to try; with `important`, the next of those whom the ladder spares (`EngineView.spares`)."""
        ...

    def pop(self, request: Request) -> None:
        """Take a request that `head` has just named."""
        ...

    def discard(self, request: Request) -> None:
        """Note that a queued request has ended."""
        ...


class _Lanes:
    """One order in two lanes, those whom the ladder spares and the others. An entry ends with its request, and entries compare by order;
    how a lane keeps its smallest entry first is its maker's.
    """

    steady = True

    def __init__(self, view: EngineView | None, important: Any, others: Any, take: Callable[[Any], Any]) -> None:
        self._view = view
        self._important, self._others = important, others
        self._take = take
        """Removes the first entry of a lane."""
        self._ended = 0

    def __len__(self) -> int:
        return len(self._important) + len(self._others) - self._ended

    def started(self, request: Request) -> None:
        """Nothing depends on it."""

    def head(self, *, important: bool = False) -> Request | None:
        """The request of the smallest entry; with `important`, of those whom the ladder spares."""
        if self._ended:
            self._drop_ended(self._important)
            self._drop_ended(self._others)
        first, other = self._important, self._others
        if not first or (other and other[0] < first[0]):
            first = self._important if important else other
        if not first:
            return None
        head: Request = first[0][-1]
        return head

    def pop(self, request: Request) -> None:
        """Take a request that `head` has just named."""
        self._take(self._lane(request))

    def discard(self, request: Request) -> None:
        """The request stays in place until it comes to the head."""
        self._ended += 1

    def _lane(self, request: Request) -> Any:
        spared = self._view is not None and self._view.spares(request.spec.priority)
        return self._important if spared else self._others

    def _drop_ended(self, lane: Any) -> None:
        while lane and lane[0][-1].state is State.ENDED:
            self._take(lane)
            self._ended -= 1


class FcfsQueue(_Lanes):
    """First come, first served; a preempted request goes to the front (vLLM V1)."""

    def __init__(self, view: EngineView | None = None) -> None:
        super().__init__(view, deque(), deque(), deque.popleft)  # of (place in the one queue, request)
        self._first = self._last = 0

    def add(self, request: Request) -> bool:
        """Queue at the back."""
        self._last += 1
        self._lane(request).append((self._last, request))
        return len(self) == 1

    def put_back(self, request: Request) -> None:
        """Queue at the front."""
        self._first -= 1
        self._lane(request).appendleft((self._first, request))


class KeyedQueue(_Lanes):
    """Smallest key first, ties by arrival; preempted requests take the place their key gives them. The key of a request is
    computed when it is queued and must not depend on when that is.
    """

    def __init__(self, key: Callable[[RequestLook], float], view: EngineView | None = None) -> None:
        super().__init__(view, [], [], heappop)  # of (key, arrival, number, request)
        self._key = key

    def add(self, request: Request) -> bool:
        """Queue by key."""
        self.put_back(request)
        return self.head() is request

    def put_back(self, request: Request) -> None:
        """Queue by key."""
        heappush(self._lane(request), (self._key(RequestLook(request)), request.arrival_fs, request.seq, request))


def priority_queue(view: EngineView | None = None) -> KeyedQueue:
    """Strictly by priority, smallest first (vLLM V1 priority scheduling)."""
    return KeyedQueue(lambda request: request.spec.priority, view)


def aging_queue(fs_per_level: int) -> Callable[[EngineView], KeyedQueue]:
    """Makes queues by priority, where waiting `fs_per_level` is worth one level: nobody starves.

    All requests age alike, so the order of two never changes and the key is fixed: arrival + priority x fs_per_level.
    """
    return lambda view: KeyedQueue(lambda request: request.arrival_fs + request.spec.priority * fs_per_level, view)
