"""Limits by client: a budget of tokens a second for each tenant, and shares of the pool for each class of priority."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from ..admission import AdmissionBase, Rejection
from ..clock import FS_PER_S
from ..config import ConfigError, EngineConfig
from ..look import RequestLook
from ..request import RequestSpec
from ..view import EngineView
from .promises import EARLY_FS


@dataclass(slots=True)
class _Bucket:
    level: float
    at_fs: int
    promised: dict[str, tuple[float, int]]
    """Tokens kept for a request that was told when to come back, and that time in femtoseconds."""


class TokenBucket(AdmissionBase):
    """Each tenant may send `tokens_per_s` tokens a second, and `burst_tokens` at once after a pause; more is turned away with 429.

    A request costs its prompt tokens and, with `count_output`, its `max_tokens` (0 where it gave none). Who is turned away is told
    when the bucket will have filled for everybody of that tenant who was told so before, and this request; its tokens are kept for
    it until `grace_s` after that. Whether another policy then turns the request away is no fault of the tenant: its tokens are given
    back.

    Steady: it says nothing about starting.
    """

    def __init__(
        self, tokens_per_s: float, burst_tokens: float, *, count_output: bool = False, grace_s: float = 2.0
    ) -> None:
        if tokens_per_s <= 0 or burst_tokens <= 0 or grace_s < 0:
            raise ConfigError(
                f"tokens_per_s ({tokens_per_s}) and burst_tokens ({burst_tokens}) must be above 0, grace_s ({grace_s}) at least 0"
            )
        self.tokens_per_s = tokens_per_s
        self.burst_tokens = burst_tokens
        self._count_output = count_output
        self._grace_fs = round(grace_s * FS_PER_S)
        self._buckets: dict[str, _Bucket] = {}

    def cost(self, spec: RequestSpec) -> int:
        """Tokens that a request is charged."""
        return spec.input_tokens + ((spec.max_tokens or 0) if self._count_output else 0)

    def arrive(self, spec: RequestSpec, view: EngineView) -> Rejection | None:
        """Take the cost from the tenant's bucket, if it holds that much beyond what is promised."""
        now_fs, cost, bucket = view.now_fs, self.cost(spec), self._filled(spec.tenant, view.now_fs)
        who = f"tenant {spec.tenant!r}" if spec.tenant else "this client"
        if cost > self.burst_tokens:
            return Rejection(
                code="exceeds_tenant_burst",
                http_status=413,
                reason=f"the request costs {cost} tokens, and {who} may send at most {self.burst_tokens:g} at once",
            )
        mine = bucket.promised.get(spec.request_id)
        early = self.tokens_per_s * EARLY_FS / FS_PER_S  # what a millisecond brings: times told are rounded
        if mine is not None and mine[1] <= now_fs + EARLY_FS and bucket.level >= cost - 2 * early:
            del bucket.promised[spec.request_id]
            bucket.level -= cost
            return None
        kept = sum(tokens for name, (tokens, _) in bucket.promised.items() if name != spec.request_id)
        if mine is None and bucket.level - kept >= cost:
            bucket.level -= cost
            return None
        if mine is not None and mine[1] > now_fs + EARLY_FS:
            wait_s = (mine[1] - now_fs) / FS_PER_S
        else:
            wait_s = max(kept + cost - bucket.level, 0.0) / self.tokens_per_s
            bucket.promised[spec.request_id] = (cost, now_fs + ceil(wait_s * FS_PER_S))
        line = f" and {kept:g} are promised to its earlier requests" if kept else ""
        return Rejection(
            code="tenant_rate",
            http_status=429,
            reason=f"{who} may send {self.tokens_per_s:g} tokens a second: the request costs {cost}, {bucket.level:.0f} are left{line}; "
            f"come back in {wait_s:.1f} s",
            retry_after_s=wait_s,
        )

    def withdraw(self, spec: RequestSpec, view: EngineView) -> None:
        """Give the tokens back."""
        bucket = self._filled(spec.tenant, view.now_fs)
        bucket.level += self.cost(spec)

    def _filled(self, tenant: str, now_fs: int) -> _Bucket:
        """The tenant's bucket as it is now. Tokens that are promised do not overflow."""
        bucket = self._buckets.setdefault(tenant, _Bucket(self.burst_tokens, now_fs, {}))
        for name in [name for name, (_, due_fs) in bucket.promised.items() if due_fs + self._grace_fs < now_fs]:
            del bucket.promised[name]
        kept = sum(tokens for tokens, _ in bucket.promised.values())
        filled = bucket.level + self.tokens_per_s * (now_fs - bucket.at_fs) / FS_PER_S
        bucket.level = min(filled, self.burst_tokens + kept)
        bucket.at_fs = now_fs
        return bucket


class PriorityShares(AdmissionBase):
    """Each priority is guaranteed a share of the pool against less important ones; what nobody more important claims may be borrowed.

    A request starts if, after it has its blocks, those still free cover what every more important priority has not used of its
    share. So an important request finds its share at least as free as the growth of others left it, and an idle share costs only the
    less important. Less important requests are protected by nothing here; a queue with aging, or a fair one, sees to it that they
    come to the head. Waived when nothing runs.

    Steady: while requests only decode, a block that an important one takes comes from its own guarantee, or from what is free for all.
    """

    def __init__(self, config: EngineConfig, shares: Mapping[int, float]) -> None:
        if not shares or any(not 0 <= share <= 1 for share in shares.values()) or sum(shares.values()) > 1 + 1e-9:
            raise ConfigError(
                f"shares of the pool by priority must be 0 to 1 each and at most 1 together; got {dict(shares)}"
            )
        self._guaranteed = {priority: int(share * config.num_gpu_blocks) for priority, share in sorted(shares.items())}

    def may_start(self, request: RequestLook, need_blocks: int, view: EngineView) -> bool | Rejection:
        """Compare what would be left with what is guaranteed to the more important."""
        if not view.num_running:
            return True
        above = {p: blocks for p, blocks in self._guaranteed.items() if p < request.spec.priority}
        left = view.num_free_blocks - need_blocks
        if left < 0:
            return False
        if not above or left >= sum(above.values()):
            return True
        for running in view.running():
            if running.priority in above:
                above[running.priority] -= running.held_blocks
        return left >= sum(max(unused, 0) for unused in above.values())
