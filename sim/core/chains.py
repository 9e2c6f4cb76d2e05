"""Chains of content: keys for the blocks of everything that a sequence can begin with.

Chains are interned, not hashed: two blocks have the same key only if every typed part of their chains is equal (invariant I7), so
there is nothing to collide. They are kept as a tree whose branches begin where sequences part: contents that have only been
seen one after the other are kept, and compared, in one piece, and their blocks have consecutive keys. So a prompt that nobody has
seen before costs one look-up, however long it is.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import groupby

from .request import Namespace

_Branches = dict[tuple[type, Hashable], "_Run"]
"""Runs by their first content, with its class, because 1 == True == 1.0."""


class _Run:
    """Contents of one class that nothing has come between yet, and what has come after them."""

    __slots__ = ("after", "contents", "first_key")

    def __init__(self, contents: tuple[Hashable, ...], first_key: int) -> None:
        self.contents = contents
        self.first_key = first_key
        """Of the first block that ends in them; the others have those that follow."""
        self.after: _Branches = {}


class KeyTable:
    """Gives the blocks of every distinct chain of content keys, and every private continuation a number of its own."""

    def __init__(self) -> None:
        self._starts: dict[tuple[Namespace, int, int], _Branches] = {}
        self._prompts: dict[Hashable, int] = {}
        self._next = 1

    def shared(
        self, namespace: Namespace, span_tokens: int, block_size: int, contents: tuple[Hashable, ...]
    ) -> list[range]:
        """The keys of the blocks that end in `contents`, which name `span_tokens` tokens each and start in `namespace`; in order, in
        pieces of consecutive keys.
        """

        def blocks(start: int, stop: int) -> int:
            """How many end in contents [start, stop)."""
            return stop * span_tokens // block_size - start * span_tokens // block_size

        after = self._starts.setdefault((namespace, span_tokens, block_size), {})
        keys: list[range] = []
        at = 0
        for kind, stop in _classes(contents):
            while at < stop:
                run = after.get((kind, contents[at]))
                if run is None:
                    run = after[kind, contents[at]] = _Run(contents[at:stop], self._next)
                    self._next += blocks(at, stop)
                same = common_prefix(run.contents, contents[at : min(at + len(run.contents), stop)])
                num_keys = blocks(at, at + same)
                if same < len(run.contents) and at + same < len(contents):
                    run = _part(after, run, same, num_keys)
                keys.append(range(run.first_key, run.first_key + num_keys))
                after, at = run.after, at + same
        return keys

    def private(self) -> int:
        """A number that nothing else will ever have."""
        self._next += 1
        return self._next - 1

    def prompt(self, namespace: Namespace, contents: tuple[Hashable, ...], sample_of: str) -> int:
        """The number that all samples of one request have for their prompt."""
        prompt = (namespace, tuple(map(type, contents)), contents, sample_of)
        if prompt not in self._prompts:
            self._prompts[prompt] = self.private()
        return self._prompts[prompt]


def _part(branches: _Branches, run: _Run, index: int, num_keys: int) -> _Run:
    """Somebody goes on in another way than `run` does after its first `index` contents, in which `num_keys` blocks end: those become a
    run of their own, which is returned.
    """
    head = _Run(run.contents[:index], run.first_key)
    run.contents = run.contents[index:]
    run.first_key += num_keys
    kind = type(head.contents[0])
    branches[kind, head.contents[0]] = head
    head.after[kind, run.contents[0]] = run
    return head


def _classes(contents: tuple[Hashable, ...]) -> list[tuple[type, int]]:
    """The stretches of contents of one class: the class, and where it ends."""
    if len(set(map(type, contents))) == 1:
        return [(type(contents[0]), len(contents))]
    ends: list[tuple[type, int]] = []
    for kind, alike in groupby(contents, type):
        ends.append((kind, (ends[-1][1] if ends else 0) + len(list(alike))))
    return ends


def common_prefix(first: Sequence[object], second: Sequence[object]) -> int:
    """How many leading items are equal in both; fast where one is wholly a prefix of the other. Both of one type."""
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:
        return shorter
    return next(index for index in range(shorter) if first[index] != second[index])
