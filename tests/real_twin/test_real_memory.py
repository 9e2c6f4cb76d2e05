"""Running out of memory for real: a step is taken back, the engine goes on smaller, and every block comes home."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from experiments.validation import SCENARIOS, reference_answers, replay, run_for_real
from experiments.validation.worlds import changed_answers, first_difference, preset
from gpu.batch import Sampling
from gpu.metering import CpuOutOfMemoryError, allocation_meter
from gpu.out_of_memory import oom_report
from gpu.readings import StepReading
from gpu.real_engine import RealEngine
from gpu.real_settings import RealSettings
from gpu.workspace import Workspace, WorkspaceFullError
from sim.core.clock import to_fs
from sim.core.config import EngineConfig
from sim.core.engine import EngineCore
from sim.core.request import Outcome, RequestSpec
from tests.support.scenarios import with_engine

pytestmark = pytest.mark.usefixtures("steady_time")

PROMPTS = with_engine(SCENARIOS["chunks-0"], max_num_batched_tokens=48, max_num_seqs=6, num_gpu_blocks=40)
MESSAGE = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.19 GiB of which 1.50 MiB is free."


def served(run) -> None:
    """Every request ended in a typed outcome, every block is back, and the other world agrees."""
    assert all(request.outcome is not None for request in run.requests)
    assert run.leaked_blocks == 0


def test_a_step_too_large_for_the_workspace_is_halved_until_it_fits():
    run = run_for_real(PROMPTS, preset("vllm-v1"), workspace_bytes=120_000)
    served(run)
    assert run.report["oom_steps"] > 0
    assert run.outcomes == {"finished": len(run.requests)}
    assert changed_answers(run, reference_answers(PROMPTS)) == []
    assert first_difference(run.decisions, replay(PROMPTS, preset("vllm-v1"), run.recording)) is None


def test_a_device_too_small_for_a_single_token_ends_every_request():
    run = run_for_real(PROMPTS, preset("vllm-v1"), workspace_bytes=1024)
    served(run)
    assert run.outcomes == {"failed": len(run.requests)}
    assert all("out of memory in forward pass" in request.reason for request in run.requests)
    assert first_difference(run.decisions, replay(PROMPTS, preset("vllm-v1"), run.recording)) is None


def test_a_pool_beyond_the_limit_is_refused_before_it_is_taken():
    with pytest.raises(CpuOutOfMemoryError, match="Asked for by KV pool"):
        run_for_real(PROMPTS, preset("vllm-v1"), memory_limit_bytes=PROMPTS.shape.weight_bytes("float32") + 50_000)


def test_a_run_within_the_limit_is_none_the_wiser():
    run = run_for_real(PROMPTS, preset("vllm-v1"), memory_limit_bytes=20_000_000)
    assert run.report["oom_steps"] == 0
    assert changed_answers(run, reference_answers(PROMPTS)) == []


@pytest.mark.parametrize("share", [0.02, 0.9])
@pytest.mark.parametrize("name", ["chunks-0", "swaps-1", "samples-0", "hybrid-swaps-1"])
def test_steps_beyond_a_hard_limit_of_bytes_end_nobody_but_their_requests(name, share):
    """Weights, pool and buffers fit; the workspace gets what is left: less than the largest step needs, or a part of what all steps needed.
    Whoever checks the run takes nothing of it: it goes the same way.
    """
    scenario = SCENARIOS[name]
    taken = run_for_real(scenario, preset("vllm-v1")).report["bytes"]
    left = int(share * taken["workspace_high_water"])
    kept = taken["weights"] + taken["kv_cache"] + taken["buffers"] + scenario.engine.max_model_len * 16 * 4
    runs = [
        run_for_real(scenario, preset("vllm-v1"), memory_limit_bytes=kept + left, checked=checked)
        for checked in (True, False)
    ]
    run = runs[0]
    served(run)
    assert left - 512 < run.report["bytes"]["workspace"] <= left + 512
    assert run.report["oom_steps"] > 0
    assert run.outcomes.get("failed", 0) < len(run.requests) or share < 0.5
    assert all("out of memory" in r.reason for r in run.requests if r.outcome is Outcome.FAILED)
    assert changed_answers(run, reference_answers(scenario)) == []
    assert first_difference(run.decisions, replay(scenario, preset("vllm-v1"), run.recording)) is None
    assert first_difference(run.decisions, runs[1].decisions) is None
    assert runs[1].answers == run.answers


OPERATIONS = (
    "store_kv",
    "decode_attention",
    "prefill_attention",
    "move_blocks",
    "rms_norm",
    "rope",
    "silu_mul",
    "sample",
)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    "name", ["swaps-1", "prefixes-1", "leavers-2", "samples-0", "beams-1", "hybrid-swaps-1", "hybrid-beams-1"]
)
def test_a_failure_in_any_operation_is_survived(operation, name):
    """One call in twenty runs out of memory, moves of blocks included."""
    scenario = SCENARIOS[name]
    draw, failures = random.Random(f"{operation}-{name}"), []
    share = 0.3 if operation in ("move_blocks", "prefill_attention", "sample") else 0.05  # these have fewer calls

    def faulty(inner):
        works = getattr(inner.model.ops, operation)

        def fails_sometimes(*arguments, **named):
            if draw.random() < share:
                failures.append(operation)
                raise torch.OutOfMemoryError(MESSAGE)
            return works(*arguments, **named)

        setattr(inner.model.ops, operation, fails_sometimes)
        return inner

    run = run_for_real(scenario, preset("vllm-v1"), wrap=faulty)
    served(run)
    assert run.report["oom_steps"] == len(failures)
    assert changed_answers(run, reference_answers(scenario)) == []
    assert first_difference(run.decisions, replay(scenario, preset("vllm-v1"), run.recording)) is None
    if operation != "move_blocks":
        assert failures
    for request in run.requests:
        if request.outcome is Outcome.FAILED:
            assert "20971520 bytes wanted, 1572864 free" in request.reason


class FailsAt(TorchDispatchMode):
    """The torch operation number `place` of a run is out of memory, whatever it is: a product, a copy, a look-up, a twin's scratch. Not
    counted are views, and fills in place (the checks' poison), which take nothing.
    """

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place, self.seen, self.failed = place, 0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += not func.is_view and func is not torch.ops.aten.fill_.Scalar
        if self.seen == self.place:
            self.failed = str(func)
            self.place = 0
            raise torch.OutOfMemoryError(MESSAGE)
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_a_failure_of_any_torch_operation_of_a_step_is_survived():
    """One after the other, over the moves, the prompts and the decodes of the first steps: the step is taken back, and nothing is lost."""
    scenario = SCENARIOS["swaps-1"]
    reference, failed = reference_answers(scenario), set()
    for place in range(1, 1500, 127):
        mode = FailsAt(place)

        def watched(inner, mode=mode):
            inner._watch = mode
            return inner

        run = run_for_real(scenario, preset("vllm-v1"), wrap=watched)
        served(run)
        assert run.report["oom_steps"] == 1, (place, mode.failed)
        assert changed_answers(run, reference) == [], (place, mode.failed)
        assert first_difference(run.decisions, replay(scenario, preset("vllm-v1"), run.recording)) is None
        failed.add(mode.failed)
    assert len(failed) > 3


@pytest.mark.parametrize(
    ("error", "wanted", "free"),
    [
        (CpuOutOfMemoryError(3 << 20, 5 << 20, 6 << 20, "aten.mm"), 3 << 20, 1 << 20),
        (torch.OutOfMemoryError(MESSAGE), 20 << 20, 1_572_864),
        (torch.OutOfMemoryError("no numbers at all"), 0, 0),
    ],
)
def test_the_report_has_the_numbers_of_the_error(error, wanted, free):
    report = oom_report(error, "forward pass", "cpu")
    assert (report.op, report.requested_bytes, report.free_bytes) == ("forward pass", wanted, free)


def test_a_full_workspace_is_reported_with_its_numbers():
    work = Workspace(1024)
    work.take("first", (512,), torch.uint8)
    with pytest.raises(WorkspaceFullError) as raised:
        work.take("second", (600,), torch.uint8)
    report = oom_report(raised.value, "forward pass", "cpu")
    assert (report.requested_bytes, report.free_bytes) == (600, 512)


# -- steady state ----------------------------------------------------------------------------------------------------------


def decoding_engine(readings: list[StepReading]):
    """Four requests that have been decoding for a while."""
    requests = [RequestSpec(request_id=f"r{i}", arrival_s=0.0, input_tokens=9 + i, output_tokens=60) for i in range(4)]
    config = EngineConfig(num_gpu_blocks=80, block_size=16, max_model_len=96, max_num_seqs=4, max_num_batched_tokens=64)
    core = EngineCore(config)
    settings = RealSettings(shape=SCENARIOS["pressure-0"].shape, num_threads=1)
    engine = RealEngine(settings, requests, on_step=readings.append)
    executor = engine.executor(core)
    for spec in requests:
        core.add(spec, 0)

    def step(max_repeat: int = 1) -> int:
        plan = core.plan(to_fs(step.now_s), max_repeat)
        result = executor.execute(plan)
        step.now_s += 1.0
        core.commit(plan, result, to_fs(step.now_s))
        return result.steps

    step.now_s = 0.0
    for _ in range(3):
        step()
    return core, executor, step


def test_a_decode_step_makes_no_allocator_call():
    readings: list[StepReading] = []
    _, _, step = decoding_engine(readings)
    meter = allocation_meter("cpu")
    for _ in range(6):
        with meter:
            step()
    assert meter.allocations == 0, getattr(meter, "by_operation", None)
    assert {reading.phase for reading in readings[-6:]} == {"decode"}
    assert len({reading.workspace_bytes for reading in readings[-6:]}) <= 2  # one more block of context at most


def test_the_memory_curve_is_flat_after_the_run():
    readings: list[StepReading] = []
    core, executor, step = decoding_engine(readings)
    while core.num_unfinished:
        step(max_repeat=64)
    executor.close(core.untold)
    assert executor.leaked_blocks == 0
    assert executor.workspace.high_water_bytes <= executor.workspace.num_bytes
    assert executor.report()["blocks"] == {"allocated": 0, "quarantined": 0, "free": 80}
    assert sum(reading.num_tokens for reading in readings) == executor.computed_tokens


def test_a_stretch_ends_before_a_block_that_may_be_somebody_s_cached_prefix():
    """The world may cut a stretch after the fact, so steps that might not count write only where they do no harm."""
    readings: list[StepReading] = []
    _, executor, step = decoding_engine(readings)
    held = executor.pool.tags.num_held
    steps = step(max_repeat=64)
    assert 1 <= steps <= 16
    assert executor.pool.tags.num_held == held


def test_a_sampled_answer_does_not_depend_on_the_neighbours():
    """Temperature sampling draws from the request's own random numbers."""
    scenario = SCENARIOS["pressure-1"]
    sampling = Sampling(temperature=1.0, top_k=40, top_p=0.9)
    run = run_for_real(scenario, preset("vllm-v1"), sampling=sampling)
    assert changed_answers(run, reference_answers(scenario, sampling=sampling)) == []
    assert changed_answers(run, reference_answers(scenario))
    assert changed_answers(run, reference_answers(replace(scenario, seed=9), sampling=sampling))
