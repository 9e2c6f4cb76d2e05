"""A user's own order of the queue, and own choice of a victim: shown looks in place of requests, they cannot touch them."""

from __future__ import annotations

from .look import RequestLook, RunningLooks
from .preemption import VICTIMS, KnownTokens, VictimPolicy
from .request import Request
from .waiting import WaitingQueue


def own_victim(policy: VictimPolicy) -> VictimPolicy:
    """`policy` itself if it is one of kvtwin's, else a victim policy that asks it."""
    if policy in VICTIMS.values():
        return policy

    def victim(running: dict[int, Request], known: KnownTokens) -> Request:
        looks = RunningLooks((order, RequestLook(request)) for order, request in running.items())
        said: object = policy(looks, lambda look: known(look._request))  # type: ignore[arg-type,attr-defined]  # it sees looks only
        return said._request if isinstance(said, RequestLook) else said  # type: ignore[return-value]  # whoever asked will see

    return victim


def own_queue(queue: WaitingQueue) -> WaitingQueue:
    """`queue` itself if it is one of kvtwin's, else a queue that keeps its order."""
    return queue if type(queue).__module__.startswith("sim.core.") else OwnQueue(queue)


class OwnQueue:
    """A queue with the order of a user's, which holds looks. The look of a request is the same object as long as it is queued."""

    def __init__(self, queue: WaitingQueue) -> None:
        self._queue = queue
        self._looks: dict[Request, RequestLook] = {}

    @property
    def steady(self) -> bool:
        """As the user's says."""
        return self._queue.steady

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, request: Request) -> bool:
        """Queue a new arrival."""
        return self._queue.add(self._look(request))  # type: ignore[arg-type]  # it sees looks only

    def put_back(self, request: Request) -> None:
        """Queue a preempted request."""
        self._queue.put_back(self._look(request))  # type: ignore[arg-type]

    def started(self, request: Request) -> None:
        """A request that was never queued runs."""
        self._queue.started(RequestLook(request))  # type: ignore[arg-type]

    def head(self, *, important: bool = False) -> Request | None:
        """The next to try."""
        look: object = self._queue.head(important=important)
        return look._request if isinstance(look, RequestLook) else None

    def pop(self, request: Request) -> None:
        """Take a request that `head` has just named."""
        self._queue.pop(self._looks.pop(request))  # type: ignore[arg-type]

    def discard(self, request: Request) -> None:
        """Note that a queued request has ended."""
        self._queue.discard(self._looks.pop(request))  # type: ignore[arg-type]

    def _look(self, request: Request) -> RequestLook:
        look = self._looks[request] = RequestLook(request)
        return look
