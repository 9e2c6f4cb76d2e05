"""When to come back: times promised to those who were turned away, spaced so that the promises can be kept.

Somebody who is turned away is told when there will be room, and takes a place in a line that stands outside the engine. Who
arrives later may not take the room that the line is waiting for, and everybody in the line is told a later time than the one
before. A client that comes back at its time is let in if the engine drained as fast as was expected.

The arithmetic. Room is given back at a measured rate of r units a second (requests, or prompt tokens), in pieces of g units. Over h
seconds that is a random amount; taking the pieces to leave independently (a Poisson stream) and the rate to be known from n = 63 gaps,

    mean r*h,    variance r*h*g + (r*h)^2 / n.

A place behind k units is due when the amount is at least k with probability 95 %: the smallest x = r*h with x - z*sqrt(x*g + x^2/n) >= k,
z = 1.645. Newcomers are let in only if, at the time of every promise, the same low estimate still covers what is promised until then.

Assumptions: the near future drains like the near past; the client that comes back is known by its request id (a server would hand
it a ticket in a header), and comes back once. A promise that nobody claims lapses `grace_s` after its time.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from math import sqrt

from ..clock import FS_PER_S

Z = 1.645
"""One-sided 95 % quantile of the normal distribution."""
GAPS = 63
"""Gaps between departures that a measured rate rests on (`DrainMeter` keeps 64 departures)."""
LOOK_AHEAD = 256
"""Promises that a newcomer is checked against; those after them are too far away to matter now."""


def surely_drained(rate_per_s: float, seconds: float, piece: float) -> float:
    """Units given back within `seconds` with probability 95 %, when they leave at `rate_per_s` in pieces of `piece`."""
    mean = rate_per_s * seconds
    return max(0.0, mean - Z * sqrt(mean * piece + mean * mean / GAPS))


def surely_drained_after_s(rate_per_s: float, units: float, piece: float) -> float:
    """Seconds after which `units` have been given back with probability 95 %: the inverse of `surely_drained`."""
    # With s = z^2: (x - k)^2 = s*(x*g + x^2/n), the larger root.
    square = Z * Z
    a, b = 1.0 - square / GAPS, 2.0 * units + square * piece
    return (b + sqrt(b * b - 4.0 * a * units * units)) / (2.0 * a) / rate_per_s


@dataclass(frozen=True, slots=True, order=True)
class Promise:
    """A place in the line."""

    due_fs: int
    request_id: str
    units: float


class Promises:
    """The line of those who were told when to come back, by the time they were told."""

    def __init__(self, grace_s: float = 2.0) -> None:
        self._grace_fs = round(grace_s * FS_PER_S)
        self._line: list[Promise] = []
        self._by_id: dict[str, Promise] = {}

    def __len__(self) -> int:
        return len(self._line)

    def claim(self, request_id: str, now_fs: int) -> bool:
        """Whether this request was told to come back, and not later than now. Its place is given up by `leave`."""
        self._lapse(now_fs)
        promise = self._by_id.get(request_id)
        return promise is not None and promise.due_fs <= now_fs

    def leave(self, request_id: str) -> None:
        """A request has left the line, because it was let in. Nothing happens if it was not in it."""
        promise = self._by_id.pop(request_id, None)
        if promise is not None:
            self._line.remove(promise)

    def held_back(self, now_fs: int, rate_per_s: float, piece: float) -> float:
        """Units of today's room that the line needs: what is promised until some time beyond what surely drains until then."""
        self._lapse(now_fs)
        most = promised = 0.0
        for promise in self._line[:LOOK_AHEAD]:
            promised += promise.units
            most = max(most, promised - surely_drained(rate_per_s, max(promise.due_fs - now_fs, 0) / FS_PER_S, piece))
        return most

    def promise(
        self, request_id: str, units: float, *, excess: float, now_fs: int, rate_per_s: float, piece: float
    ) -> float:
        """Give a request a place in the line; returns the seconds after which it may come back.

        `excess` units, its own included, would have to drain if nobody stood before it (fewer than 0: that many are free). One that
        had a place and found it too early keeps it; one that came in time and found no room stands before those who are due later.
        """
        had = self._by_id.get(request_id)
        if had is not None and had.due_fs > now_fs:
            return (had.due_fs - now_fs) / FS_PER_S
        self.leave(request_id)
        first = had is not None
        ahead = sum(promise.units for promise in self._line if not first or promise.due_fs <= now_fs)
        wait_s = surely_drained_after_s(rate_per_s, max(excess + ahead, 0.0), piece)
        made = Promise(now_fs + round(wait_s * FS_PER_S), request_id, units)
        insort(self._line, made)
        self._by_id[request_id] = made
        return wait_s

    def _lapse(self, now_fs: int) -> None:
        passed = 0
        while passed < len(self._line) and self._line[passed].due_fs + self._grace_fs < now_fs:
            del self._by_id[self._line[passed].request_id]
            passed += 1
        del self._line[:passed]
