"""When to come back: times promised to those who were turned away, spaced so that the promises can be kept.

Somebody who is turned away is told when there will be room, and takes a place in a line that stands outside the engine. Who
arrives later may not take the room that the line is waiting for, and everybody in the line is told a later time than the one
before. A client that comes back at its time is let in if the engine drained as fast as was expected.

The arithmetic. Room is given back at a measured rate of r units a second (requests, or prompt tokens), in pieces of g units. Taking the
pieces to leave independently of each other (a Poisson stream), and r itself to be known from n of them, what is given back over h
seconds has

    mean x = r*h,    variance x*g + x^2/n.

Pieces of different sizes s count as if all were of size g = E[s^2] / E[s].

A place behind k units is due when at least k have been given back with probability 95 %: at the larger root x of
x - z*sqrt(x*g + x^2/n) = k, z = 1.645. Newcomers are let in only if, at the time of every promise, the same low estimate still
covers what is promised until then; so the room that the margin leaves is filled by newcomers as a promise comes nearer, and not left
empty.

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
EARLY_FS = FS_PER_S // 1000
"""A client that comes a millisecond early is in time: it was told seconds, rounded."""
LOOK_AHEAD = 256
"""Promises that a newcomer is checked against; those after them are too far away to matter now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """How fast room is given back."""

    rate_per_s: float
    """Units a second."""
    piece: float = 1.0
    """Typical size of what leaves at once."""
    samples: int = 255
    """Departures that the rate was measured over; fewer than 8 are taken for 8."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", max(self.samples, 8))

    def surely(self, seconds: float) -> float:
        """Units given back within so many seconds, with probability 95 %."""
        mean = self.rate_per_s * seconds
        return max(0.0, mean - Z * sqrt(mean * self.piece + mean * mean / self.samples))

    def surely_after_s(self, units: float) -> float:
        """Seconds after which so many units have been given back, with probability 95 %: the inverse of `surely`."""
        # (x - k)^2 = z^2 (x*g + x^2/n), a quadratic in x.
        a, b = 1.0 - Z * Z / self.samples, 2.0 * units + Z * Z * self.piece
        return (b + sqrt(b * b - 4.0 * a * units * units)) / (2.0 * a) / self.rate_per_s


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
        return promise is not None and promise.due_fs <= now_fs + EARLY_FS

    def leave(self, request_id: str) -> None:
        """A request has left the line, because it was let in. Nothing happens if it was not in it."""
        promise = self._by_id.pop(request_id, None)
        if promise is not None:
            self._line.remove(promise)

    def held_back(self, now_fs: int, drain: Drain) -> float:
        """Units of today's room that the line needs: what is promised until some time beyond what surely drains until then."""
        self._lapse(now_fs)
        most = promised = 0.0
        for promise in self._line[:LOOK_AHEAD]:
            promised += promise.units
            most = max(most, promised - drain.surely(max(promise.due_fs - now_fs, 0) / FS_PER_S))
        return most

    def promise(self, request_id: str, units: float, *, excess: float, now_fs: int, drain: Drain) -> float:
        """Give a request a place in the line; returns the seconds after which it may come back.

        `excess` units, its own included, would have to drain if nobody stood before it (fewer than 0: that many are free). One that
        had a place and comes too early keeps it. One that came in time and found no room gets the first place that is not
        promised already: behind those who will have come by then.
        """
        had = self._by_id.get(request_id)
        if had is not None and had.due_fs > now_fs + EARLY_FS:
            return (had.due_fs - now_fs) / FS_PER_S
        self.leave(request_id)
        ahead = 0.0 if had is not None else sum(promise.units for promise in self._line)
        wait_s = drain.surely_after_s(max(excess + ahead, 0.0))
        for promise in self._line if had is not None else ():
            if promise.due_fs > now_fs + wait_s * FS_PER_S:
                break
            ahead += promise.units
            wait_s = drain.surely_after_s(max(excess + ahead, 0.0))
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
