"""Delta debugging: from a load that fails to the smallest part of it that still does.

Everything here is pure: `fails(part)` is asked, and the order of the questions depends on the answers alone, so the same load
and the same answers end in the same place. **Source:** Zeller and Hildebrandt, "Simplifying and isolating failure-inducing
input", 2002 (ddmin); Junker, "QuickXplain", 2004 (prefixes).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Fails = Callable[[Sequence[Item]], bool]


def smallest_part(items: Sequence[Item], fails: Fails[Item]) -> list[Item]:
    """A part of `items`, in their order, that fails and from which no single item can be left out.

    When more load only makes things worse, each member costs one binary search: the shortest prefix that fails, with the members
    found so far, ends in the next. What that gives is checked, and ddmin does the rest, or everything when it does not fail.
    """
    found = _by_prefixes(items, fails)
    return _ddmin(list(items) if found is None else found, fails)


def _by_prefixes(items: Sequence[Item], fails: Fails[Item]) -> list[Item] | None:
    """The members of a minimal failing part by binary search; None when the answers do not fit together."""
    members: list[int] = []
    stop = len(items)
    while True:
        if members and fails([items[index] for index in sorted(members)]):
            return [items[index] for index in sorted(members)]

        def prefix_fails(end: int) -> bool:
            return fails([items[index] for index in sorted({*range(end), *members})])

        end = smallest_number(1, stop, prefix_fails) if stop else 0
        if not end or not prefix_fails(end):
            return None
        members.append(end - 1)
        stop = end - 1


def _ddmin(items: list[Item], fails: Fails[Item]) -> list[Item]:
    """Zeller's ddmin, without asking about the whole, which is known to fail."""
    parts = 2
    while len(items) >= 2:
        size = -(-len(items) // parts)
        chunks = [items[start : start + size] for start in range(0, len(items), size)]
        chosen = (
            next((chunk for chunk in chunks if len(chunk) < len(items) and fails(chunk)), None) if parts > 2 else None
        )
        if chosen is None and parts == 2:
            chosen = next((chunk for chunk in chunks if fails(chunk)), None)
        if chosen is not None:
            items, parts = chosen, 2
            continue
        rests = [items[:start] + items[start + size :] for start in range(0, len(items), size)] if parts > 2 else []
        smaller = next((rest for rest in rests if fails(rest)), None)
        if smaller is not None:
            items, parts = smaller, max(parts - 1, 2)
        elif parts >= len(items):
            break
        else:
            parts = min(len(items), 2 * parts)
    return items


def smallest_number(low: int, high: int, fails: Callable[[int], bool]) -> int:
    """The smallest number in [low, high] from which on everything fails, by binary search; `high` is known, or taken, to fail."""
    while low < high:
        middle = (low + high) // 2
        if fails(middle):
            high = middle
        else:
            low = middle + 1
    return high
