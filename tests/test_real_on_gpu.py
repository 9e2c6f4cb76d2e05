"""What only a GPU can show of the real executor. `pytest -m gpu`; with REQUIRE_GPU=1 a machine without one fails."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from experiments.validation import SCENARIOS, reference_answers, run_for_real
from experiments.validation.worlds import changed_answers, preset
from gpu.executor import TorchExecutor
from gpu.metering import allocation_meter
from gpu.readings import StepReading
from gpu.real_engine import RealEngine
from gpu.real_settings import RealSettings
from sim.catalog.models import model_shape
from sim.core.clock import to_fs
from sim.core.config import EngineConfig
from sim.core.engine import EngineCore
from sim.core.plan import StepPlan, StepResult
from sim.core.request import RequestSpec
from sim.costs import FixedCost
from sim.world.run import run_world

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["pressure-0", "swaps-0", "prefixes-0", "window-0"])
def test_the_cpu_and_the_gpu_give_the_same_answers(name, cuda_device):
    """In float32, with weights drawn on the CPU: only the order of sums differs."""
    run = run_for_real(SCENARIOS[name], preset("vllm-v1"), device=cuda_device)
    assert changed_answers(run, reference_answers(SCENARIOS[name])) == []
    assert run.fallbacks == 0


def test_a_decode_step_makes_no_allocator_call(cuda_device):
    requests = [RequestSpec(request_id=f"r{i}", arrival_s=0.0, input_tokens=9 + i, output_tokens=60) for i in range(4)]
    core = EngineCore(
        EngineConfig(num_gpu_blocks=80, block_size=16, max_model_len=96, max_num_seqs=4, max_num_batched_tokens=64)
    )
    executor = RealEngine(RealSettings(shape=model_shape("tiny-llama-test"), device=cuda_device), requests).executor(
        core
    )
    for spec in requests:
        core.add(spec, 0)
    meter = allocation_meter(cuda_device)
    for index in range(40):
        plan = core.plan(to_fs(float(index)), 1)
        if index < 8:  # prompts, and whatever libraries allocate when first used
            result = executor.execute(plan)
        else:
            with meter:
                result = executor.execute(plan)
        core.commit(plan, result, to_fs(float(index + 1)))
    assert meter.allocations == 0


@pytest.mark.slow
def test_ten_thousand_steps_under_pressure_leak_nothing(cuda_device):
    """The shape of an 8B model with random weights, in a pool too small for its load."""
    import torch

    draw, requests = random.Random(0), []
    for index in range(1200):  # all are there at once; sixty-four clients send them
        spec = RequestSpec(
            request_id=f"r{index}",
            arrival_s=0.0,
            input_tokens=draw.randint(50, 600),
            output_tokens=draw.randint(20, 400),
            cancel_after_s=draw.random() * 20 if draw.random() < 0.05 else None,
        )
        requests.append(replace(spec, content_ids=(draw.randrange(8),), content_block_tokens=32))
    config = EngineConfig(
        num_gpu_blocks=500,
        block_size=16,
        max_model_len=1024,
        max_num_seqs=32,
        max_num_batched_tokens=512,
        num_cpu_blocks=400,
    )
    readings: list[StepReading] = []
    reserved: list[int] = []

    def on_step(reading: StepReading) -> None:
        readings.append(reading)
        reserved.append(torch.cuda.memory_reserved())

    engine = RealEngine(RealSettings(shape=model_shape("llama-3.1-8b"), device=cuda_device), requests, on_step=on_step)
    meter = allocation_meter(cuda_device)

    class Metered:
        """Counts allocator calls of pure decode steps, moves of blocks apart, once everything has been used for the first time."""

        def __init__(self, inner: TorchExecutor) -> None:
            self.inner = inner

        def execute(self, plan: StepPlan) -> StepResult:
            moves = plan.copies or plan.swap_outs or plan.swap_ins
            if plan.step < 1000 or plan.shape.prefill or moves:
                return self.inner.execute(plan)
            with meter:
                return self.inner.execute(plan)

        def close(self, releases: Sequence[tuple[str, tuple[int, ...]]]) -> None:
            self.inner.close(releases)

    configured, policy = preset("vllm-v1")(config)
    record = run_world(
        configured,
        FixedCost(1.0),
        requests,
        executor=lambda core: Metered(engine.executor(core)),
        policy=policy,
        max_concurrency=64,
    )
    (executor,) = engine.executors
    assert len(readings) >= 10_000
    assert sum(request.num_preemptions for request in record.requests) > 100
    assert all(request.outcome is not None for request in record.requests)
    assert executor.leaked_blocks == 0
    assert executor.report()["fallbacks"] == []
    assert meter.allocations == 0
    assert sum(executor.report()["graphs"]["replays"].values()) > 5000
    assert max(reserved[1000:]) == min(reserved[1000:]), "what torch has reserved must not grow after the warm-up"
