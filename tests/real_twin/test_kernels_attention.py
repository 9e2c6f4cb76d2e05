"""Paged attention kernels, in Triton's interpreter, against their torch twins in float64.

Whatever a sequence may not read is NaN in these batches, so a kernel that reads one slot too many fails.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu.kernels.attention_twin import decode_attention_twin, prefill_attention_twin
from tests.support.paged_batches import Shape, paged_batch

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}  # as attention_twin states them
DECODE = "gpu.kernels.decode_attention:decode_attention"
PREFILL = "gpu.kernels.prefill_attention:prefill_attention"


def check(interpreter, function, twin, call):
    result, _ = interpreter.call(function, call)
    twin(call, compute=torch.float64)
    assert not result.isnan().any(), "read a slot that holds nothing, or left one of the output unwritten"
    torch.testing.assert_close(result, call.out, atol=TOLERANCE[call.query.dtype], rtol=0)


shapes = st.builds(
    Shape,
    num_kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3, 4, 7, 8]),
    head_dim=st.sampled_from([64, 80, 128]),
    block_size=st.sampled_from([8, 16, 24, 64, 128]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    scaling=st.sampled_from(["none", "none", "static", "per_token_head"]),
    window=st.sampled_from([None, None, 1, 20, 100]),
    num_sink_tokens=st.sampled_from([0, 0, 3]),
    sinks=st.booleans(),
)


@settings(max_examples=40)
@given(
    shape=shapes,
    lengths=st.lists(st.sampled_from([0, 1, 7, 16, 63, 64, 65, 130]), min_size=0, max_size=3),
    num_splits=st.sampled_from([1, 2, 5]),
)
def test_decode_attention_is_its_twin_s_for_any_shape_and_ragged_lengths(interpreter, shape, lengths, num_splits):
    call = paged_batch(shape, lengths).decode(num_splits)
    check(interpreter, DECODE, decode_attention_twin, call)


@pytest.mark.slow
@settings(max_examples=16)
@given(
    shape=shapes,
    chunks=st.lists(st.tuples(st.sampled_from([0, 1, 17, 70]), st.sampled_from([0, 1, 5, 33])), min_size=0, max_size=3),
)
def test_prefill_attention_is_its_twin_s_for_any_chunk_on_any_cached_prefix(interpreter, shape, chunks):
    lengths, new = [before + now for before, now in chunks], [now for _, now in chunks]
    call = paged_batch(shape, lengths, oldest_query=max([*new, 1])).prefill(new)
    check(interpreter, PREFILL, prefill_attention_twin, call)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_decode_attention_for_every_head_dim(interpreter, head_dim):
    call = paged_batch(Shape(head_dim=head_dim), [37, 5]).decode(2)
    check(interpreter, DECODE, decode_attention_twin, call)


@pytest.mark.parametrize("head_dim", [64, 192, 256])
def test_prefill_attention_for_every_head_dim(interpreter, head_dim):
    call = paged_batch(Shape(head_dim=head_dim), [37, 5]).prefill([9, 5])
    check(interpreter, PREFILL, prefill_attention_twin, call)


@pytest.mark.parametrize("scaling", ["static", "per_token_head"])
def test_fp8_at_the_largest_head_dim_has_tiles_of_its_own(interpreter, scaling):
    """Smaller ones than narrow heads have, or the widened numbers would be spilled."""
    batch = paged_batch(Shape(head_dim=256, scaling=scaling), [37, 70])
    check(interpreter, DECODE, decode_attention_twin, batch.decode(2))
    check(interpreter, PREFILL, prefill_attention_twin, batch.prefill([9, 5]))


def test_splits_without_positions_weigh_nothing(interpreter):
    call = paged_batch(Shape(sinks=True), [3]).decode(7)  # one tile of positions, seven splits
    check(interpreter, DECODE, decode_attention_twin, call)


@pytest.mark.parametrize("num_splits", [1, 16, 37])
def test_partial_results_are_weighted_by_their_share_of_the_denominator(interpreter, num_splits):
    generator = torch.Generator().manual_seed(num_splits)
    part, out = torch.randn(2, 3, num_splits, 80, generator=generator), torch.empty(2, 3, 80)
    lse = torch.linspace(-3, 3, 6 * num_splits).view(2, 3, num_splits)  # rising: every tile brings a new maximum
    lse[1] = lse[1].flip(-1)
    lse[0, 0, ::2] = float("-inf")  # splits that had no positions
    part[0, 0, ::2] = 0.0
    _, (_, _, merged) = interpreter.call("gpu.kernels.merge_splits:merge_splits", part, lse, out)
    weights = (lse.double() * math.log(2)).softmax(-1).nan_to_num(0.0)
    torch.testing.assert_close(merged.double(), (weights[..., None] * part).sum(2), atol=1e-6, rtol=0)


def test_a_window_of_one_token_sees_only_itself(interpreter):
    batch = paged_batch(Shape(window=1, dtype=torch.float32), [50])
    result, _ = interpreter.call(DECODE, batch.decode())
    expected = batch.values[0][-1].repeat_interleave(4, dim=0)
    torch.testing.assert_close(result[0], expected, atol=1e-6, rtol=0)


def test_a_sequence_of_no_tokens_attends_to_nothing_and_answers_zero(interpreter):
    result, _ = interpreter.call(DECODE, paged_batch(Shape(), [0, 9, 0]).decode())
    assert result[0].abs().sum() == 0 and result[2].abs().sum() == 0 and result[1].abs().sum() > 0


def test_the_last_block_being_exactly_full_is_no_special_case(interpreter):
    # nano-vllm #114: a prompt of exactly one block
    for length in (16, 32, 64):
        check(interpreter, PREFILL, prefill_attention_twin, paged_batch(Shape(), [length]).prefill([length]))
