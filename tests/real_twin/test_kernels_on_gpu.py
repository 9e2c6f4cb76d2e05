"""What only a GPU can show: kernels against the twins in float64, streams and fences, allocator calls, speed.

`pytest -m gpu`, or with REQUIRE_GPU=1 on a machine that must have one, where no GPU is then a failure.
"""

import os

import pytest
import torch

from gpu import BlockMover, CpuBlockPool, KVLayout, Ops, PagedKVPool, SizeClassPool, Workspace, allocation_meter
from gpu.kernels.attention_twin import decode_attention_twin, prefill_attention_twin
from gpu.kernels.block_rows import BlockRows
from gpu.kernels.blocks_twin import block_checksum_twin, store_kv_twin
from gpu.kernels.elementwise_twin import rms_norm_twin, rope_twin, silu_mul_twin
from gpu.kernels.sample_twin import sample_twin
from gpu.kernels.sampling import SampleCall
from tests.support.paged_batches import Shape, empty_cache, paged_batch

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}  # as attention_twin states them
RELATIVE = {torch.float32: 4e-6, torch.float16: 2 * 2.0**-10, torch.bfloat16: 2 * 2.0**-7}


@pytest.fixture(scope="module")
def ops():
    if not torch.cuda.is_available():
        if os.environ.get("REQUIRE_GPU") == "1":
            pytest.fail("REQUIRE_GPU=1, but torch sees no CUDA device")
        pytest.skip("torch sees no CUDA device")
    return Ops("cuda", implementation="triton")


SHAPES = [
    *(Shape(dtype=dtype, head_dim=128) for dtype in TOLERANCE),
    *(Shape(dtype=torch.bfloat16, head_dim=head_dim) for head_dim in (64, 80, 96, 192, 256)),
    *(Shape(dtype=torch.bfloat16, head_dim=128, group=group) for group in (1, 3, 7, 8, 16)),
    *(Shape(dtype=torch.bfloat16, head_dim=128, block_size=size) for size in (8, 24, 64, 128)),
    *(Shape(dtype=torch.bfloat16, head_dim=128, scaling=scaling) for scaling in ("static", "per_token_head")),
    Shape(dtype=torch.float16, head_dim=64, num_kv_heads=8, group=8, window=128, num_sink_tokens=4, sinks=True),
    Shape(dtype=torch.bfloat16, head_dim=128, window=1000),
]
LENGTHS = (1, 0, 17, 4096, 64, 65, 1023, 2500)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_splits", [1, 8])
def test_decode_attention_against_float64(ops, shape, num_splits):
    call = paged_batch(shape, LENGTHS, device="cuda").decode(num_splits)
    got = ops.decode_attention(call).clone()
    decode_attention_twin(call, compute=torch.float64)
    torch.testing.assert_close(got, call.out, atol=TOLERANCE[shape.dtype], rtol=0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill_attention_against_float64(ops, shape):
    new = (1, 0, 17, 600, 1, 65, 1000, 3)
    call = paged_batch(shape, LENGTHS, oldest_query=1000, device="cuda").prefill(new)
    got = ops.prefill_attention(call).clone()
    prefill_attention_twin(call, compute=torch.float64)
    torch.testing.assert_close(got, call.out, atol=TOLERANCE[shape.dtype], rtol=0)


@pytest.mark.parametrize("scaling", ["none", "static", "per_token_head"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_store_is_exact(ops, dtype, scaling):
    shape = Shape(dtype=dtype, head_dim=128, num_kv_heads=8, scaling=scaling)
    cache, twin = empty_cache(shape, 40, "cuda"), empty_cache(shape, 40, "cuda")
    new = torch.randn(500, 3, 8, 128, device="cuda").to(dtype)
    slots = torch.randperm(41 * 16, device="cuda")[:500]
    ops.store_kv(new[:, 0], new[:, 1], cache, slots)
    store_kv_twin(new[:, 0], new[:, 1], twin, slots)
    differing = cache.bits.view(torch.uint8) != twin.bits.view(torch.uint8)
    assert differing.float().mean() <= (
        0 if scaling == "none" else 1e-4
    )  # quotients of the two divisions, see the twin


@pytest.mark.parametrize("dtype", list(RELATIVE))
def test_row_wise_kernels(ops, dtype):
    x, residual, weight = (torch.randn(*size, device="cuda").to(dtype) for size in ((300, 4096), (300, 4096), (4096,)))
    twin_residual = residual.clone()
    got = ops.rms_norm(x, weight, 1e-5, torch.empty_like(x), residual)
    expected = rms_norm_twin(x, weight, 1e-5, torch.empty_like(x), twin_residual)
    torch.testing.assert_close(got, expected, rtol=RELATIVE[dtype], atol=RELATIVE[dtype] / 8)
    torch.testing.assert_close(residual, twin_residual, rtol=RELATIVE[dtype], atol=0)
    got = ops.silu_mul(x, torch.empty(300, 2048, device="cuda", dtype=dtype))
    expected = silu_mul_twin(x, torch.empty_like(got))
    torch.testing.assert_close(got, expected, rtol=RELATIVE[dtype], atol=RELATIVE[dtype] / 8)
    query, key = torch.randn(300, 32, 128, device="cuda").to(dtype), torch.randn(300, 8, 128, device="cuda").to(dtype)
    twin_query, twin_key = query.clone(), key.clone()
    table, positions = torch.randn(500, 128, device="cuda"), torch.randint(0, 500, (300,), device="cuda")
    ops.rope(query, key, table, positions)
    rope_twin(twin_query, twin_key, table, positions)
    torch.testing.assert_close(query, twin_query, rtol=RELATIVE[dtype], atol=RELATIVE[dtype])
    torch.testing.assert_close(key, twin_key, rtol=RELATIVE[dtype], atol=RELATIVE[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sampling_draws_the_twin_s_token_but_for_rounding(ops, dtype):
    rows, vocab = 64, 128_256
    call = SampleCall(
        logits=(torch.randn(rows, vocab, device="cuda") * 4).to(dtype),
        temperature=torch.linspace(0, 1.5, rows, device="cuda"),
        top_k=torch.tensor([0, 1, 50, 5000] * 16, dtype=torch.int32, device="cuda"),
        top_p=torch.tensor([1.0, 0.9, 0.5, 0.99] * 16, device="cuda"),
        uniform=torch.rand(rows, device="cuda"),
        tokens=torch.zeros(rows, dtype=torch.int64, device="cuda"),
    )
    got = ops.sample(call).clone()
    sample_twin(call)
    assert (got == call.tokens).float().mean() > 0.9
    assert (got >= 0).all()


def test_checksums_agree_with_the_twin_s(ops):
    layout = KVLayout(num_layers=4, num_kv_heads=8, head_dim=128, block_size=16)
    buffer = torch.randint(0, 256, (9 * layout.block_bytes,), dtype=torch.uint8, device="cuda")
    rows, ids = BlockRows.of(layout, buffer, 9), torch.tensor([8, 1, 4], device="cuda")
    got = ops.block_checksum(rows, ids, torch.empty(3, dtype=torch.int32, device="cuda"))
    assert torch.equal(got, block_checksum_twin(rows, ids, torch.empty(3, dtype=torch.int32, device="cuda")))


# -- streams ----------------------------------------------------------------------------------------------------------

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=64, block_size=16, dtype="float32")
BUSY_CYCLES = 20_000_000
"""About ten milliseconds of a GPU's clock: long enough that what does not wait is too early."""


class Hasty(BlockMover):
    """A mover with the fault of vLLM #31341 planted: its copies do not wait for the compute stream."""

    def _order_after_compute(self) -> None:
        pass


def save_a_block_that_is_still_being_written(ops, mover_class):
    pool = PagedKVPool(LAYOUT, 8, "cuda")
    mover = mover_class(pool, CpuBlockPool(LAYOUT, 8), ops)
    mover.save([1], [5]).fence.wait()  # the gather kernel is compiled now, and starts at once later
    pool.assign("a", [7], 0)
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)  # the kernel that writes block 7 is slow
    pool.layer(0).kv[7] = 1.0
    pool.layer(1).kv[7] = 1.0
    transfer = mover.save([7], [3])
    transfer.fence.wait()
    return mover.cpu_pool.rows.strided[3].view(torch.float32)


def test_a_copy_to_the_cpu_waits_for_the_kernel_that_writes_the_block(ops):
    assert (save_a_block_that_is_still_being_written(ops, BlockMover) == 1.0).all()


def test_without_that_wait_the_copy_is_wrong_so_the_test_can_fail(ops):
    assert not (save_a_block_that_is_still_being_written(ops, Hasty) == 1.0).all()


def test_a_released_block_stays_in_quarantine_until_its_event_has_passed(ops):
    pool = PagedKVPool(LAYOUT, 8, "cuda", checked=True)
    pool.assign("a", [1, 2], 0)
    torch.cuda._sleep(BUSY_CYCLES)
    fence = pool.fence()
    pool.release("a", [1, 2], fence=fence)
    assert pool.counters().quarantined_blocks == 2
    fence.wait()
    pool.begin_step(1)
    assert pool.counters().quarantined_blocks == 0


def test_blocks_come_back_through_pinned_memory_byte_for_byte_in_batches(ops):
    pool = PagedKVPool(LAYOUT, 40, "cuda")
    mover = BlockMover(pool, CpuBlockPool(LAYOUT, 40), ops, staging_blocks=4)
    assert mover.cpu_pool.buffer.is_pinned()
    pool.arena.random_(0, 256)
    blocks, places = list(range(1, 20)), list(range(40, 21, -1))
    sums = torch.empty(19, dtype=torch.int32, device="cuda")
    before = ops.block_checksum(pool.rows, torch.tensor(blocks, device="cuda"), sums).tolist()
    slots = [*range(30, 39), *range(10)]  # two runs
    mover.save(blocks, slots).fence.order()
    pool.poison(blocks)
    transfer = mover.load(places, slots)
    transfer.fence.wait()
    assert ops.block_checksum(pool.rows, torch.tensor(places, device="cuda"), sums).tolist() == before


# -- allocations and speed --------------------------------------------------------------------------------------------


def test_a_steady_state_makes_no_allocator_call(ops):
    shape = Shape(dtype=torch.bfloat16, head_dim=128, num_kv_heads=8)
    call = paged_batch(shape, [300] * 16, device="cuda").decode(4)
    work, buffers = Workspace(1 << 24, "cuda"), SizeClassPool("cuda")
    weight = torch.ones(4096, device="cuda", dtype=torch.bfloat16)

    def step():
        x = work.take("x", (16, 4096), torch.bfloat16)
        logits = buffers.lease("logits", (16, 32_000), torch.bfloat16)
        x.fill_(1.0)
        ops.rms_norm(x, weight, 1e-5, x)
        ops.decode_attention(call)
        buffers.give_back(logits)
        work.reset()

    step()
    meter = allocation_meter("cuda")
    with meter:
        for _ in range(10):
            step()
    assert meter.allocations == 0
    assert ops.report()["fallbacks"] == []


@pytest.mark.benchmarks
@pytest.mark.parametrize("shape", [(64, 8192), (128, 4096)])
def test_decode_reads_the_cache_at_85_percent_of_the_copy_bandwidth(ops, shape):
    from gpu.bench import time_copy, time_decode

    timing = time_decode(ops, *shape, time_copy(ops.device).copy_bytes_per_s)
    assert timing.copy_share >= 0.85, f"{timing.microseconds:.0f} µs, {timing.copy_share:.1%} of a copy"
