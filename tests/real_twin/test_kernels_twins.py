"""The torch twins against the formulas themselves, written out densely in float64 on flat, unpaged KV."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu.kernels.attention_twin import decode_attention_twin, prefill_attention_twin
from gpu.kernels.elementwise_twin import rms_norm_twin, rope_twin, silu_mul_twin
from gpu.kernels.sample_twin import sample_twin
from gpu.kernels.sampling import BrokenLogitsError, SampleCall, check_tokens
from tests.support.paged_batches import Shape, paged_batch


def dense(batch, seq, query, stands):
    """Attention of query tokens `[n, heads, dim]` at positions `stands`, token by token and head by head."""
    shape, out = batch.shape, torch.zeros(query.shape, dtype=torch.float64)
    keys, values = batch.keys[seq].double(), batch.values[seq].double()
    for row, position in enumerate(stands):
        seen = [
            p
            for p in range(position + 1)
            if shape.window is None or p > position - shape.window or p < shape.num_sink_tokens
        ]
        for head in range(query.shape[1]):
            scores = keys[seen, head // shape.group] @ query[row, head].double() / math.sqrt(shape.head_dim)
            weights = scores.exp()
            total = weights.sum() + (0 if batch.sinks is None else batch.sinks[head].double().exp())
            out[row, head] = weights @ values[seen, head // shape.group] / total
    return out


OPTIONS = [
    Shape(dtype=torch.float32, head_dim=16),
    Shape(dtype=torch.float32, head_dim=16, group=1, block_size=8, window=9),
    Shape(dtype=torch.float32, head_dim=16, window=20, num_sink_tokens=3, block_size=8),
    Shape(dtype=torch.float32, head_dim=16, sinks=True),
    Shape(dtype=torch.float32, head_dim=16, sinks=True, window=5, num_sink_tokens=20),
]


@pytest.mark.parametrize("shape", OPTIONS)
def test_decode_twin_is_the_formula(shape):
    batch = paged_batch(shape, [1, 16, 43])
    call = batch.decode()
    decode_attention_twin(call, compute=torch.float64)
    for seq, length in enumerate(batch.lengths):
        torch.testing.assert_close(
            call.out[seq : seq + 1].double(),
            dense(batch, seq, call.query[seq : seq + 1], [length - 1]),
            atol=1e-6,
            rtol=0,
        )


@pytest.mark.parametrize("shape", OPTIONS)
def test_prefill_twin_is_the_formula(shape):
    batch, new = paged_batch(shape, [5, 16, 83], oldest_query=70), [5, 0, 70]
    call = batch.prefill(new)
    prefill_attention_twin(call, compute=torch.float64)
    starts = call.query_starts.tolist()
    for seq, length in enumerate(batch.lengths):
        rows = slice(starts[seq], starts[seq + 1])
        expected = dense(batch, seq, call.query[rows], range(length - new[seq], length))
        torch.testing.assert_close(call.out[rows].double(), expected, atol=1e-6, rtol=0)


def test_chunks_of_a_prompt_give_what_the_whole_prompt_gives():
    whole = paged_batch(Shape(dtype=torch.float32), [90])
    call = whole.prefill([90])
    prefill_attention_twin(call)
    for length, new in ((40, 40), (41, 1), (90, 49)):
        rows = slice(length - new, length)
        part = dataclasses.replace(
            call,
            query=call.query[rows],
            out=torch.empty_like(call.query[rows]),
            seq_lens=torch.tensor([length], dtype=torch.int32),
            query_starts=torch.tensor([0, new], dtype=torch.int32),
        )
        prefill_attention_twin(part)
        torch.testing.assert_close(part.out, call.out[rows], atol=2e-6, rtol=0)


def test_rms_norm_twin_is_the_formula_and_keeps_the_sum_in_the_residual():
    x, residual, weight = torch.randn(3, 40), torch.randn(3, 40), torch.randn(40)
    total = (x + residual).double()
    expected = total / (total.pow(2).mean(1, keepdim=True) + 1e-5).sqrt() * weight.double()
    out = torch.empty_like(x)
    rms_norm_twin(x, weight, 1e-5, out, residual)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)
    assert torch.equal(residual, total.float())


def test_rope_twin_turns_each_pair_by_its_angle_and_leaves_the_rest():
    query, key = torch.randn(4, 2, 12), torch.randn(4, 1, 12)
    angles = torch.arange(6)[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
    table = torch.cat((angles.cos(), angles.sin()), 1)  # rotary_dim 8 of 12
    positions = torch.tensor([5, 0, 3, 3])
    before = query.clone()
    rope_twin(query, key, table, positions)
    pairs = torch.complex(before[..., :4], before[..., 4:8])
    turned = pairs * torch.polar(torch.ones(4, 1, 4), angles[positions][:, None])
    torch.testing.assert_close(query[..., :8], torch.cat((turned.real, turned.imag), -1))
    assert torch.equal(query[..., 8:], before[..., 8:])
    assert torch.equal(query[1], before[1])  # position 0 turns nothing


def test_silu_mul_twin_is_the_formula():
    x, out = torch.randn(3, 20), torch.empty(3, 10)
    silu_mul_twin(x, out)
    torch.testing.assert_close(out, torch.nn.functional.silu(x[:, :10]) * x[:, 10:])


def sample_call(logits, temperature=1.0, top_k=0, top_p=1.0, uniform=0.5):
    rows = logits.shape[0]
    return SampleCall(
        logits=logits,
        temperature=torch.full((rows,), temperature),
        top_k=torch.full((rows,), top_k, dtype=torch.int32),
        top_p=torch.full((rows,), top_p),
        uniform=torch.as_tensor(uniform, dtype=torch.float32).expand(rows).contiguous(),
        tokens=torch.full((rows,), -7),
    )


def drawn(*arguments, **options):
    return sample_twin(sample_call(*arguments, **options)).tolist()


def test_greedy_takes_the_largest_logit_and_the_first_of_equals():
    assert drawn(torch.tensor([[0.0, 3.0, 3.0, 1.0]]), temperature=0.0) == [1]


def test_the_draw_inverts_the_distribution_function():
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    assert [drawn(logits, uniform=u)[0] for u in (0.0, 0.05, 0.15, 0.29, 0.31, 0.61, 0.999)] == [0, 0, 1, 1, 2, 3, 3]


def test_top_k_keeps_the_k_largest_and_everything_equal_to_the_last():
    logits = torch.tensor([[5.0, 1.0, 4.0, 4.0, 0.0]])
    assert {drawn(logits, temperature=100.0, top_k=2, uniform=u / 50)[0] for u in range(50)} == {0, 2, 3}


def test_top_p_keeps_the_smallest_set_that_reaches_the_share():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for share, kept in (
        (0.01, {0}),
        (0.49, {0}),
        (0.51, {0, 1}),
        (0.79, {0, 1}),
        (0.81, {0, 1, 2}),
        (0.999, {0, 1, 2, 3}),
    ):
        assert {drawn(logits, top_p=share, uniform=u / 100)[0] for u in range(100)} == kept


def test_top_p_takes_its_share_of_what_top_k_left():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # of the first two, 4/7 is reached by the first alone; of all, 0.55 needs two
    assert {drawn(logits, top_k=2, top_p=0.55, uniform=u / 50)[0] for u in range(50)} == {0}
    assert {drawn(logits, top_p=0.55, uniform=u / 50)[0] for u in range(50)} == {0, 1}


def test_a_masked_token_is_never_drawn_and_a_broken_row_is_named():
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf")], [0.0, float("nan"), 1.0], [float("-inf")] * 3])
    tokens = sample_twin(sample_call(logits, uniform=0.999))
    assert tokens.tolist() == [1, -1, -1]
    with pytest.raises(BrokenLogitsError, match="logits of b, c are not numbers"):
        check_tokens(tokens, ["a", "b", "c"])


@settings(max_examples=50)
@given(st.integers(1, 200), st.integers(0, 210), st.floats(0.05, 1.0), st.floats(0, 0.999), st.integers(0, 1000))
def test_what_is_drawn_was_kept(size, top_k, top_p, uniform, seed):
    logits = torch.randn(1, size, generator=torch.Generator().manual_seed(seed)) * 3
    token = drawn(logits, top_k=top_k, top_p=top_p, uniform=uniform)[0]
    greater = logits[0] > logits[0, token]
    weights = logits[0].double().softmax(0)
    if 0 < top_k < size:
        assert greater.sum() < top_k
        weights = weights * (logits[0] >= logits[0].sort(descending=True).values[top_k - 1])
    assert weights[greater].sum() < top_p * weights.sum() + 1e-6
