"""What only a GPU can show of the real executor. `pytest -m gpu`; with REQUIRE_GPU=1 a machine without one fails."""

from __future__ import annotations

import pytest

from experiments.acceptance.pressure import PressureSettings, run_pressure
from experiments.validation import SCENARIOS, reference_answers, run_for_real
from experiments.validation.worlds import changed_answers, preset
from gpu.metering import allocation_meter
from gpu.real_engine import RealEngine
from gpu.real_settings import RealSettings
from sim.catalog.models import model_shape
from sim.core.clock import to_fs
from sim.core.config import EngineConfig
from sim.core.engine import EngineCore
from sim.core.request import RequestSpec

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
    figures, missed = run_pressure(PressureSettings.of(cuda_device, small=False))
    assert missed == []
    assert sum(figures["executor"]["graphs"]["replays"].values()) > 5000
