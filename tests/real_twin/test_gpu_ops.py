"""Ops: what served each operation is on record, a fallback is never silent, and twins in a workspace allocate nothing."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpu import MissingExtraError, Ops, Workspace, allocation_meter
from gpu.kernels.block_rows import BlockRows
from gpu.kernels.sampling import SampleCall
from gpu.layout import KVLayout
from tests.support.paged_batches import Shape, paged_batch

ROOT = Path(__file__).resolve().parents[2]


def step(ops):
    """One of everything; returns what to check and a function that does it again."""
    shape = Shape(dtype=torch.float32, head_dim=16, window=30, sinks=True)
    batch = paged_batch(shape, [5, 40], oldest_query=9)
    decode, prefill = batch.decode(), batch.prefill([2, 9])
    x, residual, weight, out = torch.randn(6, 32), torch.randn(6, 32), torch.ones(32), torch.empty(6, 32)
    query, key, value = torch.randn(6, 8, 16), torch.randn(6, 2, 16), torch.randn(6, 2, 16)
    table, positions = torch.randn(50, 16), torch.arange(6)
    slots = torch.arange(16, 22)
    gate = torch.empty(6, 16)
    layout = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, block_size=8)
    rows = BlockRows.of(layout, torch.zeros(4 * layout.block_bytes, dtype=torch.uint8), 4)
    one, two = torch.tensor([1]), torch.tensor([2])
    call = SampleCall(
        logits=torch.randn(3, 50),
        temperature=torch.tensor([0.0, 1.0, 1.0]),
        top_k=torch.tensor([0, 5, 0], dtype=torch.int32),
        top_p=torch.tensor([1.0, 1.0, 0.5]),
        uniform=torch.full((3,), 0.3),
        tokens=torch.empty(3, dtype=torch.int64),
    )

    def run():
        ops.rms_norm(x, weight, 1e-5, out, residual)
        ops.rope(query, key, table, positions)
        ops.store_kv(key, value, batch.cache, slots)
        ops.prefill_attention(prefill)
        ops.decode_attention(decode)
        ops.silu_mul(out, gate)
        ops.sample(call)
        ops.move_blocks(rows, rows, one, two)

    return run


def test_on_the_cpu_the_twins_are_meant_and_nothing_is_a_fallback():
    ops = Ops()
    step(ops)()
    report = ops.report()
    assert report["meant"] == "torch" and report["fallbacks"] == []
    assert report["served"]["decode_attention"] == {"torch": 1}
    assert len(report["served"]) == 8


def test_the_twins_allocate_nothing_in_a_workspace():
    work = Workspace(1 << 20)
    run = step(Ops(scratch=work))
    run()
    meter = allocation_meter("cpu")
    with meter:
        for _ in range(3):
            run()
            work.reset()
    assert meter.by_operation == {}
    assert work.high_water_bytes > 0


def test_a_fallback_on_a_gpu_is_recorded_with_its_reason():
    ops = Ops(
        "cuda", implementation="torch"
    )  # nothing is launched: the record is made before the tensors are looked at
    x = torch.randn(2, 8)
    ops.silu_mul(x, torch.empty(2, 4))
    ops.silu_mul(x, torch.empty(2, 4))
    ops.rms_norm(x, torch.ones(8), 1e-6, torch.empty(2, 8))
    assert ops.report()["fallbacks"] == [
        {
            "operation": "rms_norm",
            "served": "torch",
            "reason": "the torch implementation was asked for",
            "calls": 1,
        },
        {"operation": "silu_mul", "served": "torch", "reason": "the torch implementation was asked for", "calls": 2},
    ]


def test_asking_for_kernels_where_they_cannot_run_is_refused():
    with pytest.raises(MissingExtraError, match="Triton kernels run on CUDA devices, and in the interpreter"):
        Ops("cpu", implementation="triton")


WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
sys.path.insert(0, {root!r})
import gpu
{code}
"""


def without(absent, code):
    script = WITHOUT.format(absent=absent, root=str(ROOT), code=code)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


def test_without_torch_the_layout_works_and_the_rest_says_what_to_install():
    code = """
print(gpu.KVLayout(num_layers=1, num_kv_heads=1, head_dim=64, block_size=16).block_bytes)
try:
    gpu.PagedKVPool
except gpu.MissingExtraError as error:
    print(error)
assert not {"torch", "triton", "numpy"} & set(sys.modules)
"""
    done = without(("torch", "triton"), code)
    assert done.stdout.splitlines() == [
        "4096",
        "gpu.PagedKVPool needs torch, which is not installed: pip install 'kvtwin[gpu]'",
    ], done.stderr


def test_without_triton_the_cpu_device_works():
    code = """
import torch
ops = gpu.Ops()
print(ops.silu_mul(torch.zeros(1, 4), torch.ones(1, 2)).tolist(), ops.report()["fallbacks"])
missing = gpu.Ops("cuda")
print(missing._reason)
"""
    done = without(("triton",), code)
    assert done.stdout.splitlines()[0] == "[[0.0, 0.0]] []", done.stderr
    assert done.stdout.splitlines()[1].startswith("triton cannot be imported")


def test_every_lazy_name_exists():
    import gpu

    assert all(getattr(gpu, name) is not None for name in gpu.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Pool'"):
        gpu.Pool  # noqa: B018
