"""Workspace and the counting of allocations: what a steady state takes, and that it takes nothing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu import (
    CpuOutOfMemoryError,
    DeviceBudget,
    SampleCall,
    Workspace,
    allocation_meter,
    choose_splits,
    split_bytes,
)
from gpu.kernels.attention_twin import prefill_attention_twin
from gpu.kernels.sample_twin import sample_twin
from gpu.kernels.splits import GOOD, split_share
from gpu.metering import StorageMeter
from gpu.workspace import WorkspaceFullError
from tests.support.paged_batches import Shape, paged_batch


def test_buffers_of_a_scope_are_given_back_and_the_high_water_mark_stays():
    work = Workspace(4096)
    kept = work.take("kept", (10,), torch.float32)
    with work.scope():
        work.take("inside", (100, 5), torch.float32)
        assert work.used_bytes == 256 + 2048
    assert work.used_bytes == 256
    again = work.take("again", (3,), torch.int64)
    assert again.data_ptr() == kept.data_ptr() + 256
    assert work.reset() == 2304
    assert (work.used_bytes, work.step_high_water_bytes, work.high_water_bytes) == (0, 0, 2304)


def test_a_full_workspace_says_what_was_asked_for_and_what_is_left():
    work = Workspace(1000)  # rounded up to 1024
    work.take("first", (300,), torch.uint8)
    with pytest.raises(
        WorkspaceFullError, match=r"scores \[200\] needs 800 bytes, but 512 of the workspace's 1024 are left"
    ):
        work.take("scores", (200,), torch.float32)
    assert work.used_bytes == 512


@given(
    st.lists(st.tuples(st.integers(0, 50), st.sampled_from([torch.uint8, torch.float16, torch.float32, torch.int64])))
)
def test_buffers_never_overlap_and_are_aligned(wanted):
    work = Workspace(50_000)
    taken = [work.take("b", (count,), dtype) for count, dtype in wanted]
    for number, buffer in enumerate(taken):
        assert buffer.data_ptr() % 16 == 0 or not buffer.numel()
        buffer.fill_(number % 100)
    for number, buffer in enumerate(taken):
        assert (buffer == number % 100).all()


def test_the_meter_counts_storages_that_operations_make_and_no_views():
    meter = allocation_meter("cpu")
    a, out = torch.ones(10, 10), torch.empty(10, 10)
    with meter:
        a.add_(1)
        torch.mm(a, a, out=out)
        a[:, 3].view(10)
        torch.softmax(a, 1, out=out)
    assert meter.allocations == 0
    with meter:
        b = a + 1
        b.view(100)
        torch.empty(0)
    assert meter.allocations == 1
    assert meter.by_operation == {"aten.add.Tensor": 1}
    with meter:
        out.resize_(20, 20)  # grows the storage
    assert meter.allocations == 2


def test_the_meter_follows_what_lives_and_remembers_the_peak():
    meter = StorageMeter()
    with meter:
        a = torch.ones(1000)
        b = a + 1
        assert meter.live_bytes == 8000
        del a
        assert meter.live_bytes == 4000
        c = b * 2
        del b, c
    assert (meter.live_bytes, meter.peak_bytes) == (0, 8000)


def test_the_cpu_device_has_a_hard_limit_and_the_error_reads_like_cuda_s():
    budget = DeviceBudget(1 << 20)
    Workspace(1 << 19, budget=budget)
    with StorageMeter(budget):
        torch.ones(1000)
        with pytest.raises(
            torch.OutOfMemoryError, match=r"Tried to allocate 1.00 MiB\. CPU has a total capacity of 1.00 MiB"
        ):
            torch.ones(1 << 18)
        torch.ones(1000)  # what failed is gone
        with budget.beside():  # whoever looks at the device takes none of its memory
            kept = torch.ones(1 << 20)
        kept.add_(1)
        assert budget.left_bytes == 1 << 19
    with pytest.raises(CpuOutOfMemoryError, match="Asked for by buffers"):
        budget.reserve("buffers", 1 << 20)


# -- what a step may need, by formula ---------------------------------------------------------------------------------


def high_water(run):
    work = Workspace(1 << 26)
    run(work)
    return work.high_water_bytes


def test_prefill_needs_memory_in_proportion_to_the_prompt_never_to_its_square():
    # ComfyUI #15135: masked grouped-query attention fell back to heads x S x S
    def prefill(length):
        call = paged_batch(Shape(dtype=torch.float32, head_dim=16), [length]).prefill([length])
        return high_water(lambda work: prefill_attention_twin(call, work))

    one, two, four = prefill(512), prefill(1024), prefill(2048)
    assert four - two == pytest.approx(2 * (two - one), rel=0.01)
    assert four < 8 * 2048 * 2048 * 4 / 10


def test_sampling_needs_memory_for_one_row_however_many_there_are():
    # vLLM #5907, #13776: float32 copies of [rows, vocab] and a sort of them were in no account
    def sample(rows, vocab=5000):
        call = SampleCall(
            logits=torch.randn(rows, vocab).bfloat16(),
            temperature=torch.ones(rows),
            top_k=torch.full((rows,), 50, dtype=torch.int32),
            top_p=torch.full((rows,), 0.9),
            uniform=torch.full((rows,), 0.5),
            tokens=torch.empty(rows, dtype=torch.int64),
        )
        return high_water(lambda work: sample_twin(call, work))

    assert sample(1) == sample(40) < 5000 * 32


def test_the_partial_results_of_splits_are_counted_before_the_pool_is_sized():
    # vLLM #40023: 512 sequences overflowed a fixed workspace. Rows x heads x splits x (head_dim + 1) x 4 bytes.
    assert split_bytes(num_seqs=512, num_q_heads=32, head_dim=128, num_splits=1) == 0
    assert split_bytes(num_seqs=512, num_q_heads=32, head_dim=256, num_splits=8) == 512 * 32 * 8 * 257 * 4


@given(st.integers(1, 2000), st.integers(1, 16), st.integers(1, 200_000), st.integers(1, 200))
def test_splits_are_as_few_as_use_the_memory_well_and_never_shorter_than_they_are_worth(
    num_seqs, heads, max_tokens, num_sms
):
    splits = choose_splits(num_seqs=num_seqs, num_kv_heads=heads, max_tokens=max_tokens, num_sms=num_sms)
    assert 1 <= splits <= 64
    assert splits == 1 or (splits - 1) * 128 < max_tokens
    sizes = {"pairs": num_seqs * heads, "max_tokens": max_tokens, "num_sms": num_sms, "programs_per_sm": 5}
    most = max(1, min(-(-max_tokens // 128), 64))
    shares = [split_share(num_splits=each, **sizes) for each in range(1, most + 1)]
    assert all(share < GOOD for share in shares[: splits - 1])
    assert shares[splits - 1] >= GOOD or shares[splits - 1] == max(shares)
