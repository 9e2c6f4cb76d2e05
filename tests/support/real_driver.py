"""A decision core and a checked pool of real memory, driven step by step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from gpu.real_engine import RealEngine
from gpu.real_settings import RealSettings
from sim.catalog.models import model_shape
from sim.core.config import EngineConfig
from sim.core.engine import EngineCore
from sim.core.plan import ScheduledRequest, StepPlan
from sim.core.policies import preset_of
from sim.core.request import Request, RequestSpec

SHAPE = model_shape("tiny-llama-test")


def spec(name: str, input_tokens: int, output_tokens: int = 1, **fields: object) -> RequestSpec:
    return RequestSpec(request_id=name, arrival_s=0.0, input_tokens=input_tokens, output_tokens=output_tokens, **fields)


@dataclass(frozen=True, slots=True)
class Done:
    """One step that was planned, executed and committed."""

    plan: StepPlan
    shares: tuple[ScheduledRequest, ...]

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens computed by request."""
        return {share.request_id: share.num_tokens for share in self.shares}


class RealDriver:
    """A decision core and a checked pool, driven step by step."""

    def __init__(
        self,
        specs: list[RequestSpec],
        *,
        num_gpu_blocks: int,
        block_size: int,
        window: int | None = None,
        preset: str = "vllm-v1",
        settings: dict[str, object] | None = None,
        **engine: object,
    ) -> None:
        torch.set_num_threads(1)
        longest = max(item.input_tokens + item.output_tokens for item in specs)
        engine.setdefault("max_num_batched_tokens", 2048)
        engine.setdefault("max_num_seqs", min(256, engine["max_num_batched_tokens"]))
        config = EngineConfig(
            num_gpu_blocks=num_gpu_blocks,
            block_size=block_size,
            max_model_len=max(longest, block_size),
            sliding_window=window,
            **engine,
        )
        made = preset_of(preset, config, engine)
        policy = replace(made.policy, swap=True) if config.num_cpu_blocks else made.policy
        shape = SHAPE
        if window is not None:
            kinds = tuple(replace(kind, window=window) for kind in SHAPE.attention)
            shape = replace(SHAPE, architecture="mistral", attention=kinds)
        self.specs = {item.request_id: item for item in specs}
        self.core = EngineCore(made.config, policy=policy)
        settings = {"shape": shape, "checked": True, **(settings or {})}
        self.engine = RealEngine(RealSettings(**settings), specs)
        self.executor = self.engine.executor(self.core)
        self.requests: dict[str, Request] = {}
        self.now_fs = 0

    def add(self, *names: str) -> Request:
        """These requests (all, when none is named) arrive now; returns the last."""
        for name in names or self.specs:
            self.requests[name] = self.core.add(self.specs[name], self.now_fs).request
        return self.requests[name]

    def step(self) -> Done | None:
        """Plan, execute and commit one step; None when there is nothing to do."""
        plan = self.core.plan(self.now_fs, 1)
        if plan is None:
            return None
        done = Done(plan, plan.scheduled(0))
        result = self.executor.execute(plan)
        self.now_fs = plan.start_fs + result.durations.total_fs
        self.core.commit(plan, result, self.now_fs)
        return done

    def serve(self) -> list[Done]:
        """Step until nobody is left; what the last step released is told by the next plan."""
        steps = []
        while self.core.num_unfinished:
            done = self.step()
            assert done is not None
            steps.append(done)
        return steps

    def run(self) -> list[Done]:
        """The same, and then the run is over: nothing may be left on the device or in the core."""
        steps = self.serve()
        self.executor.close(self.core.untold)
        assert self.executor.leaked_blocks == 0
        assert self.core.pool.num_owned == self.core.pool.num_quarantined == 0
        return steps

    def answer(self, name: str) -> list[int]:
        return self.engine.tokens.answer(name, self.requests[name].num_output_tokens)

    def undisturbed(self, name: str) -> list[int]:
        """The same request's answer, alone in a pool with room to spare, as far as it got here."""
        own = replace(self.specs[name], max_tokens=None, cancel_after_s=None)
        length = own.input_tokens + own.output_tokens
        window = self.core.config.sliding_window
        alone = RealDriver(
            [own], num_gpu_blocks=length + 2, block_size=8, window=window, enable_prefix_caching=False,
            max_num_batched_tokens=length, max_num_seqs=1,
        )  # fmt: skip
        alone.add()
        alone.run()
        return alone.answer(name)[: len(self.answer(name))]

    def right_answers(self, *names: str) -> bool:
        return all(self.answer(name) == self.undisturbed(name) for name in names or self.requests)
