"""Offload: the CPU prefix tier of one engine, and the copies between it and the device while steps go on.

Copies take time, and a fence says when one is done. `saves` says what goes to the tier, `loads` who waits for what comes from it, and
`tier` what lies in it.
"""

from __future__ import annotations

from collections.abc import Iterable

from .config import EngineConfig
from .holdings import Holdings
from .loads import Loading, Loads
from .request import Request
from .saves import Saves
from .tier import PrefixTier


class Offload:
    """A tier with the copies to and from it."""

    def __init__(self, config: EngineConfig, holdings: Holdings) -> None:
        self.tier = PrefixTier(config.num_cpu_prefix_blocks)
        self.saves = Saves(config, holdings.pool, self.tier, self._new_fence)
        self.loads = Loads(config, holdings, self.tier, self._new_fence)
        self._fence = 0
        self.failed_copies = 0
        """Copies that failed."""

    @property
    def in_flight(self) -> bool:
        """Whether a copy is under way."""
        return bool(self.saves.under_way or self.loads.under_way)

    def is_under_way(self, fence: int) -> bool:
        """Whether a copy with this fence is."""
        return fence in self.saves.under_way or fence in self.loads.under_way

    def pass_fence(self, fence: int, now_fs: int, *, done: bool) -> Loading | None:
        """A copy under way has ended; `done` is False if it failed. Returns a load that failed: its request waits again, and whoever asks
        has to queue it.
        """
        self.failed_copies += not done
        self.saves.changed()
        if fence not in self.saves.under_way:
            return self.loads.end(fence, now_fs, done=done)
        self.saves.end(fence, done=done)
        return None

    def forget(self, request: Request, private_keys: Iterable[int]) -> None:
        """A request has ended; what it left for itself nobody will look for."""
        self.loads.forget(request)
        self.tier.forget(private_keys)

    def _new_fence(self) -> int:
        """Fences of copies count down, so that no other fence of the pool is one of theirs."""
        self._fence -= 1
        return self._fence
