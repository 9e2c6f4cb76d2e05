"""Admission by latency: turn away what would come too late, while there is still time to go elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

from ..admission import Rejection
from ..clock import FS_PER_S, to_fs, to_s
from ..config import ConfigError
from ..look import RequestLook
from ..request import RequestSpec
from ..view import EngineView
from .caps import FrontDoor, Level
from .promises import Drain


class TtftDeadline(FrontDoor):
    """Take a request only if its first token can be expected within its deadline.

    The first token is expected after `(prompt tokens before it + its own) / rate`, where the rate is that at which prompts have
    lately been computed while some waited (`DrainMeter.prefill_tokens_per_s`): it includes steps shared with decodes and waiting for
    blocks. Until a prompt has been computed, and when no prompt waits, everybody may enter. Holds for queues that are first come,
    first served: one that reorders keeps some promises better and others worse.

    `deadline_s` is one for all, or by priority; a priority that is not listed has none. With `shed_late` a request whose deadline has
    passed in the queue is sent away when its turn comes, instead of being served for nothing.

    Steady unless `shed_late`: then a request that waits for blocks is sent away when time has passed, so every step must be asked.
    """

    code = "too_late"

    def __init__(
        self, deadline_s: float | Mapping[int, float], *, shed_late: bool = False, grace_s: float = 2.0
    ) -> None:
        super().__init__(grace_s=grace_s)
        if isinstance(deadline_s, Mapping) and not deadline_s:
            raise ConfigError("deadlines for the first token are given by priority, but for none; give at least one")
        for limit_s in deadline_s.values() if isinstance(deadline_s, Mapping) else (deadline_s,):
            if limit_s <= 0:
                raise ConfigError(f"a deadline for the first token is {limit_s} s; it must be above 0")
        self._deadline_s = deadline_s
        self._shed_late = shed_late
        self.steady = not shed_late

    def deadline_s(self, spec: RequestSpec) -> float | None:
        """Seconds after arrival by which the first token should be there."""
        return self._deadline_s.get(spec.priority) if isinstance(self._deadline_s, Mapping) else self._deadline_s

    def arrive(self, spec: RequestSpec, view: EngineView) -> Rejection | None:
        """Compare the time that the prompts before it will take with its deadline."""
        deadline_s, rate = self.deadline_s(spec), view.drain.prefill_tokens_per_s()
        before = view.waiting_prompt_tokens
        if deadline_s is None or rate is None or not before:
            self.promises.leave(spec.request_id)
            return None
        level = Level(
            used=before,
            asked=spec.input_tokens,
            limit=deadline_s * rate,
            units=spec.input_tokens,
            drain=Drain(
                rate_per_s=rate,
                piece=view.drain.prompt_piece_tokens() or float(spec.input_tokens),
                samples=view.drain.num_prompts(),
            ),
        )
        return self._judge(
            spec,
            view,
            level,
            f"{before} prompt tokens are before its {spec.input_tokens}, and at {rate:.4g} a second its first token would come after "
            f"{(before + spec.input_tokens) / rate:.1f} s of the {deadline_s:g} s it has",
        )

    def may_start(self, request: RequestLook, need_blocks: int, view: EngineView) -> bool | Rejection:
        """Send away what has become too late; what has had its first token is past its deadline's reach."""
        deadline_s = self.deadline_s(request.spec)
        if not self._shed_late or deadline_s is None or request.first_token_fs is not None:
            return True
        waited_fs = view.now_fs - request.arrival_fs
        if waited_fs <= to_fs(deadline_s):
            return True
        rate = view.drain.prefill_tokens_per_s()
        again_s = view.waiting_prompt_tokens / rate if rate else waited_fs / FS_PER_S
        return Rejection(
            code="deadline_passed",
            http_status=503,
            reason=f"the server is busy: the request waited {to_s(waited_fs):.1f} s, and its first token was due after {deadline_s:g} s; "
            f"come back in {again_s:.1f} s",
            retry_after_s=again_s,
        )
