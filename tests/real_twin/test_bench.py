"""How kernels are timed, seen without a GPU: what is launched and captured, which bytes are counted, what a sweep tries."""

from __future__ import annotations

import math

import pytest
import torch
import triton

from experiments.acceptance.stages import BARRED
from gpu import bench
from gpu.decode_account import SHAPES
from gpu.decode_error import relative_error
from gpu.kernels.attention_twin import decode_attention_twin
from gpu.kernels.launch import Launch
from gpu.ops import OPERATIONS, Ops
from tests.support.fake_cuda import fake_cuda
from tests.support.paged_batches import Shape, paged_batch

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")


@pytest.fixture
def timed(monkeypatch):
    """Every call takes half a millisecond, and is made."""
    calls: list[object] = []

    def do_bench(call, **settings):
        calls.append(call)
        call()
        return 0.5

    monkeypatch.setattr("triton.testing.do_bench", do_bench)
    return calls


def test_every_kernel_is_timed_by_replays_and_the_copy_by_itself(timed):
    with fake_cuda() as log:
        ops = Ops("cuda", implementation="triton")
        copied = bench.time_copy(torch.device("cuda"))
        decodes = [bench.time_decode(ops, *shape, copied.copy_bytes_per_s) for shape in SHAPES]
        others = list(bench.time_others(ops, copied.copy_bytes_per_s))
    assert copied.copy_bytes_per_s == 2 * 2**30 / 0.5e-3
    assert copied.copy_share == 1.0
    # Each once when captured and once when timed, and a decode once more, to see what it writes.
    assert len(log.of("replay")) == 2 * len(decodes + others) + len(decodes)
    assert all(timing.relative_error is not None for timing in decodes)
    names = {timing.name.partition("[")[0] for timing in (*decodes, *others)}
    assert names == set(OPERATIONS) - {"prefill_attention"}
    by_shape = {(timing.batch_size, timing.context_tokens): timing for timing in decodes}
    one = by_shape[64, 8192]
    # K and V of 64 x 8192 tokens, 8 heads of 128 numbers of two bytes; queries and outputs of 32 heads
    assert one.num_bytes == 64 * 8192 * 2 * 8 * 128 * 2 + 2 * 64 * 32 * 128 * 2
    assert one.bytes_per_s == pytest.approx(one.num_bytes / 0.5e-3)
    assert set(BARRED) <= set(by_shape)


def test_a_sweep_leaves_out_what_the_device_has_no_room_for(timed, monkeypatch):
    with fake_cuda() as log:
        run = Launch.run

        def limited(launch):
            if launch.constants.get("BLOCK_N") == 128:
                raise triton.OutOfResources(300_000, 232_448, "shared memory")
            run(launch)

        monkeypatch.setattr(Launch, "run", limited)
        ops = Ops("cuda", implementation="triton")
        found = list(bench.sweep_decode(ops, 64, 8192, 1e12))
    tried = [each for each in bench.SWEEP if each[0] != 128]
    assert len(found) == 4 * len(tried)
    assert len({timing.name for timing in found}) == len(found)
    assert {timing.name.split("splits=")[1][0] for timing in found} == {"1", "2", "4", "8"}
    launched = [launch for _, _, launch in log.of("launch") if "STAGES" in launch.constants]
    assert {(launch.constants["BLOCK_N"], launch.constants["STAGES"], launch.num_warps) for launch in launched} == set(
        tried
    )


def test_what_is_chosen_is_among_what_a_sweep_tries(timed):
    from gpu.kernels.decode_attention import decode_attention_launch

    with fake_cuda():
        launch = decode_attention_launch(bench._decode_call(torch.device("cuda"), 64, 8192, 2))
    chosen = (launch.constants["BLOCK_N"], launch.constants["STAGES"], launch.num_warps)
    assert chosen == bench.SWEEP[0]


@pytest.mark.parametrize(("wrong", "low", "high"), [(None, 0, 0.004), ("last", 0.1, 10), ("unwritten", None, None)])
def test_what_was_timed_is_compared_with_the_truth(wrong, low, high):
    """In bfloat16 on the CPU: what a twin writes is off by a rounding, and what it does not write is seen."""
    call = paged_batch(Shape(dtype=torch.bfloat16, head_dim=64), (700, 3, 300)).decode(num_splits=2)
    decode_attention_twin(call)
    if wrong == "last":
        call.out[2] *= 1.5
    if wrong == "unwritten":
        call.out[0, 1, 2] = float("nan")
    error = relative_error(call)
    assert math.isnan(error) if low is None else low <= error <= high
