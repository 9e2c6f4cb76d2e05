"""A decision core driven by hand, and short ways to say what is put into it and what came out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sim.core.clock import FS_PER_S, to_s
from sim.core.config import EngineConfig
from sim.core.durations import Durations
from sim.core.engine import EngineCore
from sim.core.facts import Committed
from sim.core.plan import StepPlan, StepResult
from sim.core.policies import preset_of
from sim.core.policy import Policy
from sim.core.request import Outcome, Request, RequestSpec


def content(*names: str, tokens: int) -> dict[str, object]:
    """A prompt whose content is named, `tokens` a name."""
    return {"content_ids": names, "content_block_tokens": tokens}


@dataclass(frozen=True, slots=True)
class DrivenStep:
    """One step that was planned and committed."""

    plan: StepPlan
    tokens: dict[str, int]
    """Tokens computed in it by request, in running order."""
    tables: dict[str, tuple[int, ...]]
    """The block tables it was given."""


class EngineDriver:
    """A decision core driven by hand, a second a step; its books are checked after every event. `preset` names its policy,
    which has the settings that are not given as its engine has them."""

    def __init__(
        self,
        num_gpu_blocks: int,
        block_size: int,
        *,
        policy: Policy | None = None,
        preset: str | None = None,
        **settings: object,
    ) -> None:
        settings.setdefault("max_num_seqs", min(1024, settings.get("max_num_batched_tokens", 1024)))
        config = EngineConfig(num_gpu_blocks=num_gpu_blocks, block_size=block_size, **settings)
        if preset is not None:
            made = preset_of(preset, config, settings)
            config, policy = made.config, made.policy
        self.log: list[dict[str, object]] = []
        self.ended: list[Request] = []
        self.now_fs = 0
        self.core = EngineCore(
            config,
            policy=policy,
            decision_sink=lambda entry, start_fs: self.log.append(entry),
        )
        self.pool = self.core.pool

    def add(self, request_id: str, input_tokens: int, output_tokens: int = 1, **fields: object) -> Request:
        """A request arrives now."""
        spec = RequestSpec(
            request_id=request_id,
            arrival_s=to_s(self.now_fs),
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            **fields,
        )
        arrived = self.core.add(spec, self.now_fs)
        self._settle()
        return arrived.request

    def abort(self, request_id: str, outcome: Outcome = Outcome.ABORTED) -> bool:
        """A client goes away now."""
        known = self.core.abort(request_id, self.now_fs, outcome)
        self._settle()
        return known

    def plan(self, max_repeat: int | None = None) -> StepPlan | None:
        """Decide, and leave the plan out."""
        plan = self.core.plan(self.now_fs, max_repeat)
        self._settle()
        return plan

    def commit(self, plan: StepPlan, steps: int | None = None, stopped: tuple[str, ...] = ()) -> Committed:
        """Commit a plan that was out; `steps` of it if its stretch was cut."""
        durations = Durations.affine(plan.repeat if steps is None else steps, FS_PER_S, 0)
        self.now_fs = plan.start_fs + durations.total_fs
        committed = self.core.commit(plan, StepResult(durations=durations, stopped=frozenset(stopped)), self.now_fs)
        self._settle()
        return committed

    def step(self) -> DrivenStep | None:
        """Plan and commit a single step; None when there is nothing to do."""
        plan = self.plan(max_repeat=1)
        if plan is None:
            return None
        scheduled = plan.scheduled(0)
        self.commit(plan)
        tokens = {share.request_id: share.num_tokens for share in scheduled}
        return DrivenStep(plan, tokens, {share.request_id: share.block_table for share in scheduled})

    def run(self, limit: int = 10_000) -> list[DrivenStep]:
        """Step until there is nothing to do."""
        steps: list[DrivenStep] = []
        while (step := self.step()) is not None:
            steps.append(step)
            assert len(steps) <= limit, f"still busy after {limit} steps"
        return steps

    def close(self) -> None:
        """The run is over."""
        self.core.close(self.now_fs)

    def occupy(self, num_blocks: int, fence: int) -> None:
        """Let somebody else still read `num_blocks` blocks, until `pool.pass_fence(fence)`."""
        blocks = self.pool.allocate(num_blocks)
        assert blocks is not None
        self.pool.release(blocks, "somebody else", fence)
        self._settle()

    def _settle(self) -> None:
        self.ended += self.core.take_ended()
        self.core.check()


def tokens_of(steps: Iterable[DrivenStep]) -> list[dict[str, int]]:
    """What each step computed, by request."""
    return [step.tokens for step in steps]
