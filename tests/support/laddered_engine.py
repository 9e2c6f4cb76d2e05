"""An engine on a degradation ladder, driven by hand."""

from __future__ import annotations

from sim.core.cpu_server import CpuExecutor
from sim.core.policy import Policy
from sim.core.preemption import worst_priority
from sim.core.request import Request
from sim.core.rungs import LadderConfig, Rung
from sim.core.waiting import priority_queue
from tests.support.engine_driver import DrivenStep, EngineDriver


class LadderedEngine(EngineDriver):
    """Twenty blocks of four and these rungs, unless something else is asked for; who is least important gives way."""

    def __init__(
        self, *rungs: Rung, guard: int = 0, swap: bool = False, cpu: CpuExecutor | None = None, **config: object
    ) -> None:
        settings = {"num_gpu_blocks": 20, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64} | config
        policy = Policy(
            queue=priority_queue,
            victim=worst_priority,
            swap=swap,
            cpu_executor=cpu,
            ladder=LadderConfig(rungs=rungs, guard_priority=guard),
        )
        super().__init__(**settings, policy=policy)

    def add(
        self, request_id: str, input_tokens: int, output_tokens: int = 20, priority: int = 1, **fields: object
    ) -> Request:
        """A request that says how much it wants, unless it asks for more, arrives now."""
        fields.setdefault("max_tokens", output_tokens)
        return super().add(request_id, input_tokens, output_tokens, priority=priority, **fields)

    def run(self, limit: int = 10_000) -> list[DrivenStep]:
        """Step until there is nothing to do, which is when everybody is gone."""
        steps = super().run(limit)
        assert self.core.num_unfinished == 0
        assert self.core.pool.num_owned == 0
        return steps

    def ladder_log(self) -> list[tuple[object, ...]]:
        """Every change of a rung, with its step."""
        return [(entry["step"], *change) for entry in self.log for change in entry["ladder"]]
