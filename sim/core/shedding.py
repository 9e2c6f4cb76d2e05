"""Shedding: the rung of the ladder that sends waiting requests away, the least important first, wherever they stand in the queue.

What the queue's order is does not matter here: who waits below the guard and has never run is kept by priority, oldest first, from its
arrival on, and looked at only where it stands first. Who has left the queue by another way is dropped when it comes up.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from .admission import Rejection
from .clock import to_s
from .draft import Draft
from .request import Request, State

if TYPE_CHECKING:
    from .scheduler import Scheduler

_SLACK = 64
"""Entries beyond twice the queue's length from which on those that are no longer needed are dropped together."""


def _waits(request: Request) -> bool:
    """Whether nothing but its place is lost if the request is sent away now."""
    return request.state is State.WAITING and not request.num_preemptions and not request.computed_high


class BelowGuard:
    """Waiting requests that the ladder does not spare and that have never run."""

    def __init__(self) -> None:
        self._lines: dict[int, list[tuple[int, int, Request]]] = {}
        self._size = 0

    def note(self, request: Request, num_waiting: int) -> None:
        """A request has joined the queue, in which so many wait."""
        heappush(self._lines.setdefault(request.spec.priority, []), (request.arrival_fs, request.seq, request))
        self._size += 1
        if self._size > _SLACK + 2 * num_waiting:
            self._lines = {
                priority: left
                for priority, line in self._lines.items()
                if (left := [entry for entry in line if _waits(entry[2])])
            }
            self._size = sum(map(len, self._lines.values()))
            for line in self._lines.values():
                heapify(line)

    def oldest_fs(self) -> int | None:
        """When the first of them arrived; None if there is none."""
        return min((head[0] for priority in tuple(self._lines) if (head := self._head(priority))), default=None)

    def take(self, now_fs: int, limit_s: float) -> Iterator[Request]:
        """Take out those that have waited `limit_s` seconds: the least important first, of these the oldest."""
        for priority in sorted(self._lines, reverse=True):
            while (head := self._head(priority)) is not None and to_s(now_fs - head[0]) >= limit_s:
                heappop(self._lines[priority])
                self._size -= 1
                yield head[2]

    def _head(self, priority: int) -> tuple[int, int, Request] | None:
        line = self._lines[priority]
        while line and not _waits(line[0][2]):
            heappop(line)
            self._size -= 1
        return line[0] if line else None


def shed(scheduler: Scheduler, relief: Draft, now_fs: int) -> None:
    """Send away the queued requests that the ladder has given up on."""
    limit_s = scheduler.knobs.shed_after_s
    if limit_s is None:
        return
    assert scheduler.below_guard is not None  # the ladder has this rung
    for request in scheduler.below_guard.take(now_fs, limit_s):
        scheduler.waiting.discard(request)
        request.degrade("shed")
        ahead, rate = len(scheduler.waiting), scheduler.drain.requests_per_s()
        retry_s = None if rate is None else (ahead + 1) / rate
        again = (
            ""
            if retry_s is None
            else f"; {ahead} are ahead and {rate:.3g} leave a second, so try again in {retry_s:.1f} s"
        )
        waited_s = to_s(now_fs - request.arrival_fs)
        rejection = Rejection(
            code="shed",
            http_status=503,
            reason=f"the server is busy: waited {waited_s:.1f} s at priority {request.spec.priority}{again}",
            retry_after_s=retry_s,
        )
        relief.turned_away.append((request, rejection))
