"""Offload: the CPU prefix tier of one engine, and the copies between it and the device while steps go on.

Copies take time, and a fence says when one is done. `saves` says what goes to the tier, `loads` who waits for what comes from it, and
`tier` what lies in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from .config import EngineConfig
from .holdings import Holdings
from .loads import Load, Loading, Loads
from .request import Request
from .saves import Save, Saves
from .tier import PrefixTier


class Offload:
    """A tier with the copies to and from it."""

    def __init__(self, config: EngineConfig, holdings: Holdings) -> None:
        self.tier = PrefixTier(config.num_cpu_prefix_blocks)
        self.saves = Saves(config, holdings.pool, self.tier, self._new_fence)
        self.loads = Loads(config, holdings, self.tier, self._new_fence)
        self._fence = 0
        self._ended: list[
            tuple[int, int, bool]
        ] = []  # copies that have ended and are not heard of yet: fence, when, whether done
        self.failed_copies = 0
        """Copies that failed."""

    @property
    def in_flight(self) -> bool:
        """Whether a copy is under way."""
        return bool(self.saves.under_way or self.loads.under_way)

    @property
    def has_news(self) -> bool:
        """Whether copies have ended that the engine has not heard of."""
        return bool(self._ended)

    def is_under_way(self, fence: int) -> bool:
        """Whether a copy with this fence is, for all that has been told of it."""
        known = fence in self.saves.under_way or fence in self.loads.under_way
        return known and all(fence != ended for ended, _, _ in self._ended)

    def begin(
        self, completed: deque[tuple[int, int]], *, blocks_come: bool
    ) -> tuple[tuple[Save, ...], tuple[Load, ...]]:
        """Settle what a plan saves and loads; nothing is saved while a running request waits for blocks that are being saved."""
        saves = () if blocks_come else self.saves.begin(completed)
        if blocks_come:
            self.saves.put_off(completed)
        return saves, self.loads.take_new()

    def ended(self, fence: int, now_fs: int, *, done: bool) -> None:
        """A copy under way has ended, or failed; nothing moves before it is heard of."""
        self._ended.append((fence, now_fs, done))

    def hear(self, now_fs: int, until_fs: int) -> Iterator[Loading]:
        """Settle the copies that had ended by `until_fs`, one by one. Yields the loads that failed: their requests wait again, and whoever
        asks has to queue them.
        """
        heard = [ended for ended in self._ended if ended[1] <= until_fs]
        self._ended = [ended for ended in self._ended if ended[1] > until_fs]
        for fence, _, done in heard:
            self.failed_copies += not done
            self.saves.changed()
            if fence in self.saves.under_way:
                self.saves.end(fence, done=done)
            elif (failed := self.loads.end(fence, now_fs, done=done)) is not None:
                yield failed

    def forget(self, request: Request, private_keys: Iterable[int]) -> None:
        """A request has ended; what it left for itself nobody will look for."""
        self.loads.forget(request)
        self.tier.forget(private_keys)

    def _new_fence(self) -> int:
        """Fences of copies count down, so that no other fence of the pool is one of theirs."""
        self._fence -= 1
        return self._fence
