"""Chains of content: numbers for everything that a sequence can begin with.

A chain is interned, not hashed: two have the same number only if every typed part of both is equal (invariant I7), so there is
nothing to collide. Contents that have only been seen one after the other are kept, and compared, in one piece: a tree of content
whose branches begin where sequences part. So a prompt that nobody has seen before costs one look-up, however long it is.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import groupby

from .request import Namespace


class _Run:
    """Contents that nothing has come between yet; `contents[i]` ends the chain number `first + i`."""

    __slots__ = ("contents", "first")

    def __init__(self, contents: tuple[Hashable, ...], first: int) -> None:
        self.contents = contents
        self.first = first


class KeyTable:
    """Gives every distinct chain of content a number, and every private continuation a number of its own."""

    def __init__(self) -> None:
        self._starts: dict[tuple[Namespace, int], int] = {}
        self._runs: dict[tuple[int, type, Hashable], _Run] = {}
        """Each run by the chain that it follows and its first content, with that one's class, because 1 == True == 1.0."""
        self._next = 1

    def chain(self, namespace: Namespace, span_tokens: int, contents: Iterable[Hashable]) -> list[int]:
        """For each of `contents`, which names `span_tokens` tokens, the chain that ends with it and starts in `namespace`."""
        last = self._starts.get((namespace, span_tokens))
        if last is None:
            last = self._starts[namespace, span_tokens] = self.private()
        contents, made = tuple(contents), [last]
        if len(set(map(type, contents))) == 1:
            self._follow(made, type(contents[0]), contents)
        else:
            for kind, alike in groupby(contents, type):
                self._follow(made, kind, tuple(alike))
        return made[1:]

    def private(self) -> int:
        """A chain that nothing else will ever equal."""
        self._next += 1
        return self._next - 1

    def _follow(self, made: list[int], kind: type, contents: tuple[Hashable, ...]) -> None:
        """Append the chains that go on from the last of `made` with `contents`, all of one class."""
        at = 0
        while at < len(contents):
            after = (made[-1], kind, contents[at])
            run = self._runs.get(after)
            if run is None:
                run = self._runs[after] = _Run(contents[at:], self._next)
                self._next += len(run.contents)
            same = common_prefix(run.contents, contents[at : at + len(run.contents)])
            made += range(run.first, run.first + same)
            at += same
            if same < len(run.contents) and at < len(contents):
                self._part(run, kind, same)

    def _part(self, run: _Run, kind: type, index: int) -> None:
        """A chain goes on in another way than `run` does before its content `index`, which now begins a run of its own."""
        rest = _Run(run.contents[index:], run.first + index)
        self._runs[rest.first - 1, kind, rest.contents[0]] = rest
        run.contents = run.contents[:index]


def common_prefix(first: Sequence[object], second: Sequence[object]) -> int:
    """How many leading items are equal in both; fast where one is wholly a prefix of the other. Both of one type."""
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:
        return shorter
    return next(index for index in range(shorter) if first[index] != second[index])
