"""Faults that real engines had, on the real pool: rows of the public-bugs reference that are marked P. One test a row, or more.

Memory beside the pool: peaks, captures, the allocator.

row  test
B33  test_b33_partial_results_of_splits_are_sized_before_the_pool; test_gpu_workspace: …are_counted_before_the_pool_is_sized
B34  test_b34_only_rows_that_are_sampled_have_logits; test_gpu_workspace: …sampling_needs_memory_for_one_row_however_many_there_are
B35  test_b35_the_sampler_has_its_memory_before_the_first_request
B37  test_b37_captures_come_after_the_pool_and_before_the_first_step; …take_what_the_ledger_says (`gpu`)
B38  test_b38_the_device_is_measured_once_before_anything_is_taken
B42  test_b42_a_prompt_twice_as_long_takes_twice_the_memory; test_gpu_workspace: …never_to_its_square
B43  test_b43_logits_of_steps_gone_by_are_not_kept
B44  test_kernels_blocks: test_blocks_beyond_two_to_the_31_elements_are_found
B45  test_b45_an_allocation_that_failed_beside_free_memory_is_made_again_once
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from experiments import real_run
from gpu import device as device_module
from gpu import executor as executor_module
from gpu import real_engine, run_room
from gpu.device import DeviceFacts
from gpu.metering import StorageMeter
from gpu.op_timeline import OpTimeline
from gpu.pool import PagedKVPool
from gpu.real_engine import RealEngine
from gpu.real_settings import RealSettings
from sim.catalog.gpus import GPUS
from sim.catalog.models import model_shape
from sim.core.config import EngineConfig
from sim.core.engine import EngineCore
from sim.memory.graphs import estimated_graph_bytes, graph_plan
from sim.memory.non_torch import context_bytes
from sim.resolve import resolve
from sim.scenario import Scenario
from tests.support.real_driver import SHAPE, RealDriver, spec

MESSAGE = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.19 GiB of which 1.50 MiB is free."


# -- C. peaks ----------------------------------------------------------------------------------------------------------


def test_b33_partial_results_of_splits_are_sized_before_the_pool(monkeypatch):
    """With four programs a sequence the workspace is larger by rows x heads x splits x (head_dim + 1) x 4 bytes, and suffices."""
    specs = [spec(f"r{i}", 6, 8) for i in range(4)]
    sizes = {}
    for splits in (1, 4):
        monkeypatch.setattr(run_room, "decode_splits", lambda *given, splits=splits: splits)
        driver = RealDriver(specs, num_gpu_blocks=40, block_size=4, max_num_seqs=64, max_num_batched_tokens=64)
        driver.add()
        driver.run()
        assert driver.executor.oom_events == 0
        assert driver.right_answers()
        sizes[splits] = driver.executor.workspace.num_bytes
    partials = 64 * SHAPE.num_attention_heads * 4 * (SHAPE.head_dim + 1) * 4
    assert sizes[4] - sizes[1] <= partials + 512
    assert sizes[4] > sizes[1]


def followed(driver: RealDriver, step: int) -> OpTimeline:
    driver.executor.timeline = timeline = OpTimeline(step)
    driver.add()
    driver.run()
    return timeline


def test_b34_only_rows_that_are_sampled_have_logits():
    """A prompt of 600 tokens has one row of logits, not 600: none of [tokens, vocabulary] is ever made."""
    driver = RealDriver([spec("r", 600)], num_gpu_blocks=60, block_size=16)
    timeline = followed(driver, 0)
    (logits,) = {size for event in timeline.events for name, size in event.live if name == "logits"}
    row = SHAPE.vocab_size * torch.empty(0, dtype=driver.executor.model.dtype).element_size()
    assert logits == -(-row // 256) * 256
    assert max(event.allocated_bytes for event in timeline.events) < 600 * row


def test_b35_the_sampler_has_its_memory_before_the_first_request():
    """The very first step that samples takes nothing from the allocator: its memory is in the workspace, sized before the pool."""
    from gpu.batch import Sampling

    driver = RealDriver(
        [spec(f"r{i}", 5 + i, 3) for i in range(8)],
        num_gpu_blocks=40,
        block_size=4,
        settings={"checked": False, "sampling": Sampling(temperature=0.8, top_k=20, top_p=0.9)},
    )
    driver.add()
    plan = driver.core.plan(driver.now_fs, 1)
    meter = StorageMeter()
    with meter:
        result = driver.executor.execute(plan)
    assert len(result.tokens) == 8
    assert meter.by_operation == {}
    assert driver.executor.workspace.high_water_bytes <= driver.executor.workspace.num_bytes


def test_b37_captures_come_after_the_pool_and_before_the_first_step(monkeypatch):
    """An estimate made with a small pool is too small. Here graphs are captured over the pool that serves, and what they took is
    known before the first request."""
    trace: list[str] = []

    class Traced(PagedKVPool):
        def __init__(self, *given, **named):
            trace.append("pool")
            super().__init__(*given, **named)

    capture = real_engine.ForwardPass.capture
    monkeypatch.setattr(real_engine, "PagedKVPool", Traced)
    monkeypatch.setattr(
        real_engine.ForwardPass, "capture", lambda self, *given: (trace.append("graphs"), capture(self, *given))
    )
    driver = RealDriver([spec("r", 6, 3)], num_gpu_blocks=8, block_size=4, settings={"decode_graphs": True})
    trace.append("serving")
    driver.add()
    driver.run()
    assert trace == ["pool", "graphs", "serving"]


@pytest.mark.gpu
@pytest.mark.alone  # what the driver takes for graphs shows only in the free memory of the device
def test_b37_captures_take_no_more_than_the_ledger_says(cuda_device):
    shape = model_shape("llama-3.2-1b")
    config = EngineConfig(
        num_gpu_blocks=2000, block_size=16, max_model_len=2048, max_num_seqs=64, max_num_batched_tokens=2048
    )
    engine = RealEngine(RealSettings(shape=shape, device=cuda_device), [spec("r", 6, 3)])
    executor = engine.executor(EngineCore(config))
    plan = graph_plan(64, 2048, enforce_eager=False)
    estimate = estimated_graph_bytes(replace(plan, piecewise_sizes=()), shape.num_layers, executor.workspace.num_bytes)
    assert 0 < executor.report()["graphs"]["captured_bytes"] <= estimate


def test_b38_the_device_is_measured_once_before_anything_is_taken(monkeypatch):
    """What is free is read with this process's context loaded and before its first tensor; who else is there counts as others."""
    gpu, trace = GPUS["h100-sxm-80gb"], []
    taken = 11 << 30

    def facts(device):
        trace.append("measure")
        return DeviceFacts(
            name="NVIDIA H100 80GB HBM3",
            compute_capability=gpu.compute_capability,
            sm_count=gpu.sm_count,
            total_bytes=gpu.total_bytes,
            free_bytes=gpu.total_bytes - context_bytes(gpu) - taken,
        )

    class Stop(Exception):
        pass

    seen = {}

    class Engine:
        def __init__(self, settings, requests, **named):
            trace.append("weights")
            seen["others"] = settings.others_bytes
            raise Stop

    free = facts(None).free_bytes
    trace.clear()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, gpu.total_bytes))
    monkeypatch.setattr(run_room, "decode_splits", lambda *given: 1)
    monkeypatch.setattr(device_module, "find_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(device_module, "device_facts", facts)
    monkeypatch.setattr(real_engine, "RealEngine", Engine)
    monkeypatch.setattr(
        real_run.sim,
        "simulate",
        lambda scenario, **given: given["real"](seen.setdefault("resolved", resolve(scenario)), []),
    )
    scenario = Scenario(
        model="llama-3.1-8b",
        engine={"gpu_memory_utilization": 0.8},
        workload={"workload": "uniform", "num_requests": 2},
        run={"executor": "torch", "device": "cuda"},
    )
    with pytest.raises(Stop):
        real_run.run_scenario(scenario)
    assert trace == ["measure", "weights"]
    assert seen["others"] == taken
    resolved = seen["resolved"]
    assert resolved["gpu"]["gpu"] == "h100-sxm-80gb"
    assert resolved["engine"]["other_processes_bytes"] == taken
    assert resolved.ledger.line("other_processes").bytes == taken


def test_b42_a_prompt_twice_as_long_takes_twice_the_memory():
    """Grouped-query attention over a whole prompt: the scores of every pair of tokens would grow fourfold."""
    peaks = {}
    for length in (400, 800, 1600):
        driver = RealDriver([spec("r", length)], num_gpu_blocks=120, block_size=16)
        timeline = followed(driver, 0)
        peaks[length] = max(event.live_bytes for event in timeline.events if event.operation == "prefill_attention")
    assert peaks[1600] - peaks[800] == pytest.approx(2 * (peaks[800] - peaks[400]), rel=0.02)


def test_b43_logits_of_steps_gone_by_are_not_kept():
    """256 x 151,936 x 4 B a step were once kept alive by closures. After 5 steps and after 40 the same is live."""
    driver = RealDriver(
        [spec(f"r{i}", 5, 60) for i in range(4)], num_gpu_blocks=80, block_size=4, settings={"checked": False}
    )
    driver.add()
    meter, live = StorageMeter(), []
    for _ in range(40):
        with meter:
            driver.step()
        live.append(meter.live_bytes)
    assert live[5] == live[-1]


# -- D. allocator, namespaces ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fits", "failures"), [(True, 1), (False, 1), (True, 2)])
def test_b45_an_allocation_that_failed_beside_free_memory_is_made_again_once(fits, failures, monkeypatch):
    """Where memory had just come free the same step is tried once more, and only once; else it is taken back at once."""
    monkeypatch.setattr(executor_module, "freed_but_pending", lambda error, device: fits)
    driver = RealDriver([spec("r", 9, 6)], num_gpu_blocks=8, block_size=4)
    works, calls = driver.executor.model.ops.decode_attention, []

    def fails_first(call):
        calls.append(call)
        if len(calls) <= failures:
            raise torch.OutOfMemoryError(MESSAGE)
        return works(call)

    driver.executor.model.ops.decode_attention = fails_first
    driver.add()
    driver.run()
    report = driver.executor.report()
    again = fits and failures == 1
    assert report["oom_steps"] == (0 if again else 1)
    assert report["retried_steps"] == (1 if fits else 0)
    assert driver.right_answers()
