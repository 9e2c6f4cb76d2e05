"""Reach: how much of a waiting request's prefix would be on the device, if what the CPU tier has of it were loaded.

The longest prefix counts of which every attention group has what it needs. A group with full attention needs all its blocks: the leading
ones may be on the device, those from there on come from the tier. A group with a window needs the last ones that it covers, wherever
each of them is. Source: vLLM V1 `find_longest_cache_hit`, device first and the connector after it (engine-policies §1.1.7, §1.1.8).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .blocks import NO_BLOCK
from .cached import OnDeviceOrTier
from .holdings import Holdings
from .request import Request
from .tier import PrefixTier, TierBlock


@dataclass(slots=True, eq=False)
class Reach:
    """What a request would have."""

    hit_tokens: int
    """Leading tokens that the device alone can serve."""
    hits: list[list[int]]
    """By group, how its table begins: blocks on the device, NO_BLOCK for what is out of its window or is loaded."""
    moving: bool = False
    """Whether a copy that is under way brings what comes next: the request had better wait for that."""
    tokens: int = 0
    """Leading tokens that would be there. With one table and full attention not known before `Reaches.complete`."""
    num_passed: int = 0
    """Entries of all tables that are out of windows."""
    places: list[list[int]] = field(default_factory=list)
    """By group, which entries of its table are loaded."""
    blocks: list[TierBlock] = field(default_factory=list)
    """From where, group by group."""


class Reaches:
    """Finds them for the requests of one engine."""

    def __init__(self, holdings: Holdings, tier: PrefixTier) -> None:
        self._holdings = holdings
        self._pool = holdings.pool
        self._tier = tier
        self._one_run = len(holdings.config.groups) == 1 and not holdings.windows
        self._loaded = OnDeviceOrTier(holdings.tables.on_device, tier, coming=False)
        self._coming = OnDeviceOrTier(holdings.tables.on_device, tier, coming=True)

    def find(self, request: Request, hits: list[int]) -> Reach | None:
        """That of a request for which the device has `hits`; None if it ends there."""
        if self._one_run:
            return self._find_next(request, hits)
        tables = self._holdings.tables
        keys = request.keys.keys(0, self._holdings.findable_blocks(request))
        reach = Reach(tables.tokens_in(hits), [])
        reach.tokens = tables.longest(keys, self._loaded)
        if reach.tokens <= reach.hit_tokens:
            reach.moving = self._tier.num_busy > 0 and tables.longest(keys, self._coming) > reach.hit_tokens
            return reach if reach.moving else None
        for group, (passed, seen) in zip(self._holdings.config.groups, tables.seen(keys, reach.tokens), strict=True):
            self._locate(reach, passed, seen, in_order=group.window is None)
        return reach

    def _find_next(self, request: Request, hits: list[int]) -> Reach | None:
        """The same where the tier's part begins where the device's ends: whether there is one, the next block tells. Most often there is
        none, and it is asked again in every step.
        """
        if len(hits) >= self._holdings.findable_blocks(request):
            return None
        (following,) = request.keys.keys(len(hits), len(hits) + 1)
        if following not in self._tier.keys:
            return None
        return Reach(self._holdings.tables.tokens_in(hits), [hits], self._tier.is_moving(following))

    def complete(self, request: Request, reach: Reach) -> None:
        """Find out how far it goes, if that is not known."""
        if reach.tokens:
            return
        (hits,) = reach.hits
        keys = request.keys.keys(len(hits), self._holdings.findable_blocks(request))
        reach.blocks = self._tier.find(keys)
        stop = len(hits) + len(reach.blocks)
        reach.places = [list(range(len(hits), stop))]
        reach.tokens = stop * self._holdings.config.block_size

    def _locate(self, reach: Reach, passed: int, seen: Sequence[int], *, in_order: bool) -> None:
        """Where the blocks of one group are. If they go `in_order`, all behind the first that the device lacks come from the tier."""
        begins = [NO_BLOCK] * passed
        places: list[int] = []
        for place, key in enumerate(seen, passed):
            found = [] if in_order and places else self._pool.find((key,))
            begins += found or [NO_BLOCK]
            if not found:
                reach.moving |= not places and self._tier.is_moving(key)
                places.append(place)
        reach.hits.append(begins)
        reach.places.append(places)
        reach.num_passed += passed
        reach.blocks += self._tier.find([seen[place - passed] for place in places])
