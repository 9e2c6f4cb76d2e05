"""Memory on CUDA, as far as it can be seen without a GPU: whose bytes are whose, what is out of memory, what graphs take."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from experiments.validation import SCENARIOS, reference_answers, run_for_real
from experiments.validation.worlds import changed_answers, preset
from gpu.decode_graphs import CudaCapture
from gpu.metering import allocation_meter
from gpu.out_of_memory import typed_out_of_memory
from gpu.readings import CudaMemoryReader
from gpu.real_engine import RealEngine
from gpu.real_settings import RealSettings
from gpu.workspace import WorkspaceFullError
from sim.catalog.models import model_shape
from sim.core.config import EngineConfig
from sim.core.engine import EngineCore
from tests.support.fake_cuda import fake_cuda

GIB, MIB = 1 << 30, 1 << 20


class Memory:
    """What the driver and torch's allocator say of a device of 80 GiB."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = self.reserved = self.driver = 0
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: self.allocated)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: self.reserved)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (80 * GIB - self.taken, 80 * GIB))

    @property
    def taken(self) -> int:
        return self.reserved + self.driver


@pytest.fixture
def memory(monkeypatch):
    return Memory(monkeypatch)


# -- whose bytes -----------------------------------------------------------------------------------------------------------


def test_the_lines_of_a_reading_do_not_overlap_and_add_up(memory):
    memory.allocated, memory.reserved, memory.driver = 50 * GIB, 53 * GIB, 3 * GIB
    reader = CudaMemoryReader(
        "cuda",
        weights_bytes=15 * GIB,
        graphs_bytes=(32 * MIB, 2 * GIB),
        buffers=lambda: (6 * MIB, 9 * MIB),
        kv_pool_bytes=30 * GIB,
        workspace_bytes=4 * GIB,
        others_bytes=1 * GIB,
    )
    found = reader.read()
    assert found.tensors_bytes == 16 * GIB + 2 * GIB  # with what the graphs keep free for themselves
    assert found.graphs_bytes == 32 * MIB + 2 * GIB
    assert (found.buffers_bytes, found.staging_bytes) == (6 * MIB, 9 * MIB)  # in the tensors, and in the host's memory
    assert found.cached_bytes == 1 * GIB
    assert found.non_torch_bytes == 2 * GIB
    lines = (
        found.tensors_bytes, found.kv_pool_bytes, found.workspace_bytes, found.cached_bytes, found.non_torch_bytes,
        found.others_bytes,
    )  # fmt: skip
    assert sum(lines) == memory.taken


def test_a_graph_s_bytes_are_told_from_those_of_the_driver(memory):
    """A capture takes 32 MiB for cuBLAS and 6 MiB for a pool of its own from torch, and 10 MiB from the driver when first replayed."""
    with fake_cuda() as log, pytest.MonkeyPatch.context() as patch:
        memory.__init__(patch)
        capture = CudaCapture(torch.device("cuda", 0))

        def step() -> None:
            if log.capturing:
                memory.reserved += 6 * MIB
            elif not memory.allocated:
                memory.allocated += 32 * MIB
                memory.reserved += 32 * MIB

        replay = torch.cuda.CUDAGraph.replay
        patch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replay(graph), driver(10 * MIB)))

        def driver(more: int) -> None:
            memory.driver += more

        capture(step)
        assert (capture.held_bytes, capture.in_tensors_bytes, capture.kept_free_bytes) == (48 * MIB, 32 * MIB, 6 * MIB)
        capture(step)
        assert (capture.held_bytes, capture.in_tensors_bytes, capture.kept_free_bytes) == (64 * MIB, 32 * MIB, 12 * MIB)


# -- out of memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        "Triton Error [CUDA]: out of memory",
        "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in the documentation",
        "CUDA driver error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_what_the_driver_could_not_get_is_out_of_memory_too(message):
    with pytest.raises(torch.OutOfMemoryError, match="out of memory|ALLOC_FAILED"), typed_out_of_memory():
        raise RuntimeError(message)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        WorkspaceFullError("logits", (2, 3), 24, 8, 16),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        ValueError("out of memory"),
    ],
)
def test_other_errors_stay_what_they_are(error):
    with pytest.raises(type(error)) as raised, typed_out_of_memory():
        raise error
    assert raised.value is error


def test_a_kernel_that_cannot_be_loaded_takes_a_step_back_and_changes_no_answer():
    scenario, failed = SCENARIOS["pressure-0"], []

    def hungry(executor):
        works = executor.model.ops.decode_attention

        def fails_once(call):
            if not failed:
                failed.append(call)
                raise RuntimeError("Triton Error [CUDA]: out of memory")
            return works(call)

        executor.model.ops.decode_attention = fails_once
        return executor

    run = run_for_real(scenario, preset("vllm-v1"), wrap=hungry)
    assert run.report["oom_steps"] == 1
    assert changed_answers(run, reference_answers(scenario)) == []
    assert run.leaked_blocks == 0


# -- what graphs take ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, (1, 2, 4, 8, 16, 24, 32)),
        ({"micro_batch_tokens": 4}, (1, 2, 4)),
        ({"workspace_bytes": 20_000}, (1, 2, 4)),
        ({"workspace_bytes": 300}, ()),
    ],
)
def test_batches_for_which_there_is_no_room_have_no_graph(settings, sizes):
    """A batch that is split, or that does not fit, is no reason to end before the first request."""
    config = EngineConfig(
        num_gpu_blocks=60, block_size=16, max_model_len=96, max_num_seqs=32, max_num_batched_tokens=64
    )
    real = RealSettings(shape=model_shape("tiny-llama-test"), decode_graphs=True, **settings)
    graphs = RealEngine(real, []).executor(EngineCore(config)).forward.graphs
    assert graphs.sizes == sizes
    if not sizes:
        assert graphs.choose([SimpleNamespace(num_tokens=1, samples=True)]) is None
        assert graphs.report()["eager_steps"] == {"the workspace is too small for any graph": 1}


# -- allocator calls -------------------------------------------------------------------------------------------------------


def test_the_meter_counts_what_the_allocator_counts_and_is_never_blind(monkeypatch):
    """A release of torch that counted under other names would else look like one that allocates nothing."""
    stats: dict[str, int] = {}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device=None: stats)
    meter = allocation_meter("cuda")
    with meter:  # torch has not begun with the device
        stats |= {"allocation.all.allocated": 3, "segment.all.allocated": 1}
    with meter:
        stats["allocation.all.allocated"] += 2
    assert (meter.allocations, meter.device_allocations) == (5, 1)
    del stats["segment.all.allocated"]
    with pytest.raises(RuntimeError, match="does not count allocations under 'segment.all.allocated'"), meter:
        pass
