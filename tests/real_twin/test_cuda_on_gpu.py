"""What streams, the allocator and the compiler of a real GPU do with the executor. `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch

from gpu.out_of_memory import freed_but_pending, oom_report
from gpu.pinned import pinned_zeros
from gpu.readings import CudaMemoryReader
from gpu.real_engine import RealEngine
from gpu.real_settings import RealSettings
from sim.catalog.models import model_shape
from sim.core.config import EngineConfig
from sim.core.engine import EngineCore
from sim.core.plan import ScheduledRequest
from sim.core.request import RequestSpec

pytestmark = pytest.mark.gpu
BUSY_CYCLES = 20_000_000
"""About ten milliseconds of a GPU's clock."""


def made(device: str, **settings):
    config = EngineConfig(
        num_gpu_blocks=40, block_size=16, max_model_len=256, max_num_seqs=24, max_num_batched_tokens=64
    )
    spec = RequestSpec(request_id="r", arrival_s=0.0, input_tokens=200, output_tokens=9)
    real = RealSettings(shape=model_shape("tiny-llama-test"), device=device, dtype="float32", **settings)
    return RealEngine(real, [spec]).executor(EngineCore(config))


@pytest.mark.parametrize("parts", [2, 3, 6])
def test_micro_batches_behind_a_slow_kernel_write_what_one_pass_writes(parts, cuda_device):
    """Nothing is read back between them: without a wait the last would have been written over the others before they were copied."""
    executor = made(cuda_device, decode_graphs=False)
    tables = (1, 2, 3, 4), (5, 6, 7, 8)
    executor.forward.run([ScheduledRequest("r", 60, 0, tables[0], samples=False)])
    torch.cuda._sleep(BUSY_CYCLES)
    executor.forward.run([ScheduledRequest("r", 60, 0, tables[1], samples=False)], parts)
    for layer in range(executor.pool.layout.num_layers):
        kv = executor.pool.layer(layer).kv
        whole, split = (kv[list(table)].transpose(0, 1).flatten(1, 2)[:, :60] for table in tables)
        torch.testing.assert_close(split, whole, rtol=1e-4, atol=1e-4)


def test_no_step_is_compiled_for_once_the_executor_is_made(cuda_device):
    from gpu.kernels import decode_attention, merge_splits, prefill_attention, rms_norm

    kernels = (
        decode_attention.decode_attention_kernel, merge_splits.merge_splits_kernel,
        prefill_attention.prefill_attention_kernel, rms_norm.rms_norm_kernel,
    )  # fmt: skip
    executor = made(cuda_device, decode_graphs=False)
    index = executor.pool.device.index
    before = [len(kernel.device_caches[index][0]) for kernel in kernels]
    for decodes, tokens, width in ((0, 2, 1), (1, 7, 2), (3, 30, 2), (4, 16, 16), (16, 17, 3), (23, 33, 5), (24, 0, 4)):
        rows = [ScheduledRequest("r", 1, 12, (5 + row,), samples=True) for row in range(decodes)]
        prompt = [ScheduledRequest("r", tokens, 0, tuple(range(1, width + 1)), samples=False)] if tokens else []
        executor.workspace.reset()
        executor.forward.run([*rows, *prompt])
    assert [len(kernel.device_caches[index][0]) for kernel in kernels] == before


def test_pinned_memory_is_pinned_and_copies_both_ways(cuda_device):
    buffers = [pinned_zeros(size) for size in (100, 5 << 20, 3)]
    assert all(buffer.is_pinned() for buffer in buffers)
    there = torch.arange(100, dtype=torch.uint8, device=cuda_device)
    buffers[0].copy_(there, non_blocking=True)
    back = torch.empty_like(there)
    back.copy_(buffers[0], non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(back, there)


def test_the_lines_of_a_reading_add_up_to_what_torch_has_reserved(cuda_device):
    executor = made(cuda_device)
    graphs = executor.forward.graphs
    assert graphs is not None
    found = CudaMemoryReader(
        cuda_device,
        weights_bytes=executor.model.weights.num_bytes,
        graphs_bytes=graphs.allocator_bytes,
        kv_pool_bytes=executor.pool.arena.untyped_storage().nbytes(),
        workspace_bytes=executor.workspace.num_bytes,
        others_bytes=0,
    ).read()
    lines = (found.tensors_bytes, found.kv_pool_bytes, found.workspace_bytes, found.cached_bytes)
    assert sum(lines) == torch.cuda.memory_reserved()
    assert found.non_torch_bytes > 0  # the context, at least
    assert min(lines) >= 0
    assert found.tensors_bytes >= found.weights_bytes + found.graphs_bytes >= found.weights_bytes > 0


def test_a_real_message_of_torch_has_its_numbers_read(cuda_device):
    with pytest.raises(torch.OutOfMemoryError) as raised:
        torch.empty(1 << 45, dtype=torch.uint8, device=cuda_device)
    report = oom_report(raised.value, "a test", cuda_device)
    assert report.requested_bytes == 1 << 45
    assert 0 < report.free_bytes < 1 << 45
    assert not freed_but_pending(raised.value, cuda_device)
