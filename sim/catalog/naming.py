"""Finding what a user meant: exact, case-insensitive lookup, and an error that lists the nearest names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TypeVar

from sim.core.config import ConfigError

T = TypeVar("T")


CLOSE = 0.6
"""Likeness from which on a name may have been meant, as difflib counts it: two thirds of the letters in the same order."""
SHORTEST_PART = 3
"""Letters from which on a name that contains what was typed counts as near."""


def nearest(name: str, known: Iterable[str], *, most: int = 3) -> list[str]:
    """The known names that may have been meant by `name`, best first; none where none is like it.

    >>> nearest("presure", ["pressure", "swaps"]), nearest("nope", ["pressure", "swaps"])
    (['pressure'], [])
    """
    names = list(known)
    lowered = name.lower()
    close = get_close_matches(lowered, [candidate.lower() for candidate in names], n=most, cutoff=CLOSE)
    found = [candidate for match in close for candidate in names if candidate.lower() == match]
    if len(lowered) >= SHORTEST_PART:
        found += [candidate for candidate in names if lowered in candidate.lower()]
    return list(dict.fromkeys(found))[:most]


def unknown(
    kind: str, name: str, known: Iterable[str], aliases: Iterable[str] = (), *, advice: str = ""
) -> ConfigError:
    """The error for a name that is not in a catalogue. It is returned, not raised.

    `kind` says what was looked up ("model"). When nothing is near, the `known` names are listed, without `aliases`.
    `advice` is a sentence for the end.
    """
    names = sorted(set(known))
    near = nearest(name, [*names, *sorted(aliases)])
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(names)}."
    return ConfigError(f"unknown {kind} {name!r}: {hint}{' ' + advice if advice else ''}")


def look_up(kind: str, name: str, table: Mapping[str, T], aliases: Mapping[str, str], *, advice: str = "") -> T:
    """The entry called `name`, by its own name or by an alias, without regard to case or to `_` against `-`.

    Raises:
        ConfigError: no such entry; the message names the nearest ones.
    """
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    key = aliases.get(key, key)
    if key in table:
        return table[key]
    raise unknown(kind, name, table, aliases, advice=advice)
