"""Where cached content is: on the device, or there and in the CPU tier; and how long a prefix a window can serve from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .blocks import BlockPool
from .need import skipped_blocks
from .tier import PrefixTier


class Cached(Protocol):
    """Where content may be found: on the device, or there and in other memory."""

    def run(self, keys: Sequence[int]) -> int:
        """How many of `keys`, from the first, are there one after the other."""
        ...

    def holds(self, key: int) -> bool:
        """Whether one is."""
        ...


class OnDevice:
    """What a pool's prefix index can find now."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def run(self, keys: Sequence[int]) -> int:
        """Of the leading keys."""
        return len(self._pool.find(keys))

    def holds(self, key: int) -> bool:
        """Of one key."""
        return bool(self._pool.find((key,)))


class OnDeviceOrTier:
    """What is on the device or in the tier, or also on its way there."""

    def __init__(self, device: OnDevice, tier: PrefixTier, *, coming: bool) -> None:
        self._device, self._tier, self._coming = device, tier, coming

    def run(self, keys: Sequence[int]) -> int:
        """First what is on the device, then what is in the tier."""
        first = self._device.run(keys)
        if not self._coming:
            return first + len(self._tier.find(keys[first:]))
        while first < len(keys) and keys[first] in self._tier.keys:
            first += 1
        return first

    def holds(self, key: int) -> bool:
        """In either."""
        if self._device.holds(key):
            return True
        return key in self._tier.keys if self._coming else bool(self._tier.find((key,)))


def served(keys: Sequence[int], tokens: int, unit: int, cached: Cached, block_size: int, window: int | None) -> int:
    """The longest prefix, up to `tokens` tokens and in whole `unit` tokens, of which all that the window covers is cached; looked for
    from the right. `keys` are those of its blocks of `block_size` tokens. Source: vLLM V1 `SlidingWindowManager.find_longest_cache_hit`.
    """
    index = tokens // block_size
    while index > skipped_blocks(tokens, block_size, window):
        index -= 1
        if not cached.holds(keys[index]):
            tokens = index * block_size // unit * unit
            index = min(index, tokens // block_size)
    return tokens
