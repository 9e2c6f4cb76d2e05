"""RMSNorm, RoPE, SiLU·mul and sampling, in Triton's interpreter, against their torch twins."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu.check import ArgumentError
from gpu.kernels.elementwise_twin import rms_norm_twin, rope_twin, silu_mul_twin
from gpu.kernels.sample_twin import sample_twin
from gpu.kernels.sampling import SampleCall

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
# Two units in the last place; six of bfloat16, to which the interpreter truncates where a GPU and torch round.
RELATIVE = {torch.float32: 4e-6, torch.float16: 2 * 2.0**-10, torch.bfloat16: 6 * 2.0**-8}


def close(got, expected, dtype):
    torch.testing.assert_close(got, expected, rtol=RELATIVE[dtype], atol=RELATIVE[dtype] / 8)


@settings(max_examples=20)
@given(
    rows=st.sampled_from([0, 1, 3, 17]),
    size=st.sampled_from([1, 32, 100, 128, 640, 1536]),
    dtype=st.sampled_from(DTYPES),
    residual=st.booleans(),
    in_place=st.booleans(),
)
def test_rms_norm_is_its_twin_s(interpreter, rows, size, dtype, residual, in_place):
    generator = torch.Generator().manual_seed(size)
    wide = torch.randn(rows, size + 32, generator=generator).to(dtype)
    x, weight = wide[:, :size], torch.randn(size, generator=generator).to(dtype)
    other = torch.randn(rows, size, generator=generator).to(dtype) if residual else None
    twin_x, twin_other = x.clone(), None if other is None else other.clone()
    out = x if in_place else torch.empty(rows, size, dtype=dtype)
    result, changed = interpreter.call("gpu.kernels.rms_norm:rms_norm", x, weight, 1e-5, out, other)
    expected = rms_norm_twin(twin_x, weight, 1e-5, torch.empty(rows, size, dtype=dtype), twin_other)
    close(result, expected, dtype)
    if residual:
        close(changed[4], twin_other, dtype)


@settings(max_examples=20)
@given(
    tokens=st.sampled_from([0, 1, 5]),
    heads=st.sampled_from([(1, 1), (4, 2), (7, 1), (32, 8)]),
    dims=st.sampled_from([(64, 64), (128, 128), (80, 80), (128, 32), (96, 48)]),
    dtype=st.sampled_from(DTYPES),
)
def test_rope_is_its_twin_s(interpreter, tokens, heads, dims, dtype):
    head_dim, rotary_dim = dims
    generator = torch.Generator().manual_seed(tokens)
    fused = torch.randn(tokens, sum(heads) + heads[1], head_dim, generator=generator).to(dtype)
    query, key = fused[:, : heads[0]], fused[:, heads[0] : heads[0] + heads[1]]
    table = torch.randn(50, rotary_dim, generator=generator)
    positions = torch.randint(0, 50, (tokens,), generator=generator)
    _, changed = interpreter.call("gpu.kernels.rope:rope", query, key, table, positions)
    twin = fused.clone()
    rope_twin(twin[:, : heads[0]], twin[:, heads[0] : heads[0] + heads[1]], table, positions)
    close(changed[0], twin[:, : heads[0]], dtype)
    close(changed[1], twin[:, heads[0] : heads[0] + heads[1]], dtype)


@settings(max_examples=15)
@given(rows=st.sampled_from([0, 1, 5]), size=st.sampled_from([1, 64, 100, 2500]), dtype=st.sampled_from(DTYPES))
def test_silu_mul_is_its_twin_s(interpreter, rows, size, dtype):
    x = torch.randn(rows, 2 * size, generator=torch.Generator().manual_seed(size)).to(dtype) * 4
    out = torch.empty(rows, size, dtype=dtype)
    result, _ = interpreter.call("gpu.kernels.silu_mul:silu_mul", x, out)
    close(result, silu_mul_twin(x, out), dtype)


def sample_calls(draw_seed, rows, vocab, dtype, settings_of_rows):
    generator = torch.Generator().manual_seed(draw_seed)
    logits = (torch.randn(rows, vocab, generator=generator) * 4).to(dtype)
    temperature, top_k, top_p = (list(column) for column in zip(*settings_of_rows, strict=True))
    return SampleCall(
        logits=logits,
        temperature=torch.tensor(temperature),
        top_k=torch.tensor(top_k, dtype=torch.int32),
        top_p=torch.tensor(top_p),
        uniform=torch.rand(rows, generator=generator),
        tokens=torch.full((rows,), -7),
    )


one_row = st.tuples(
    st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    st.sampled_from([0, 1, 5, 50, 10_000]),
    st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
)


@settings(max_examples=25)
@given(
    st.lists(one_row, min_size=1, max_size=3),
    st.sampled_from([1, 31, 300, 5000]),
    st.sampled_from(DTYPES),
    st.integers(0, 99),
)
def test_sampling_draws_its_twin_s_token(interpreter, rows, vocab, dtype, seed):
    call = sample_calls(seed, len(rows), vocab, dtype, rows)
    result, _ = interpreter.call("gpu.kernels.sample:sample", call)
    sample_twin(call)
    for row, (got, expected) in enumerate(zip(result.tolist(), call.tokens.tolist(), strict=True)):
        if got != expected:  # then the goal lies within float32 rounding of the boundary between the two
            weights = ((call.logits[row].double() - call.logits[row].double().max()) / rows[row][0]).exp()
            low, high = sorted((got, expected))
            between = weights[low : high + 1].sum() - weights[low] - weights[high]
            assert between < 1e-5 * weights.sum(), f"row {row}: {got} and {expected} are not neighbours"


def test_sampling_is_even_over_what_it_keeps(interpreter):
    rows, vocab = 60, 64
    call = sample_calls(0, rows, vocab, torch.float16, [(1.0, 4, 1.0)] * rows)
    call.logits.copy_(call.logits[:1].expand(rows, vocab))
    call.uniform.copy_((torch.arange(rows) + 0.5) / rows)
    result, _ = interpreter.call("gpu.kernels.sample:sample", call)
    top = call.logits[0].float().topk(4)
    shares = torch.bincount(result, minlength=vocab)[top.indices] / rows
    torch.testing.assert_close(shares, top.values.softmax(0), atol=1.5 / rows, rtol=0)


@pytest.mark.parametrize(
    ("dtype", "bits"), [(torch.bfloat16, torch.int16), (torch.float16, torch.int16), (torch.float32, torch.int32)]
)
def test_the_threshold_is_exact_to_the_last_bit(interpreter, dtype, bits):
    # Neighbouring floats, largest first: top-k keeps the first k of them, and a goal of almost 1 draws the last one kept.
    vocab, rows = 24, 8
    ladder = (torch.tensor([1.5], dtype=dtype).view(bits) + torch.arange(vocab, 0, -1, dtype=bits)).view(dtype)
    call = sample_calls(0, rows, vocab, dtype, [(1e4, k, 1.0) for k in (1, 2, 3, 4, 5, 8, 13, 22)])
    call.logits.copy_(ladder.expand(rows, vocab) * torch.tensor([1, -1] * (rows // 2), dtype=dtype)[:, None])
    call.logits[1::2] = call.logits[1::2].flip(1)  # negative ones too, where bits run the other way
    call.uniform.fill_(0.9999)
    result, _ = interpreter.call("gpu.kernels.sample:sample", call)
    assert result.tolist() == [0, 1, 2, 3, 4, 7, 12, 21]
    assert sample_twin(call).tolist() == [0, 1, 2, 3, 4, 7, 12, 21]


def test_masked_and_broken_rows(interpreter):
    call = sample_calls(0, 5, 40, torch.bfloat16, [(1.0, 0, 1.0)] * 4 + [(0.0, 0, 1.0)])
    call.logits.fill_(float("-inf"))
    call.logits[0, 17] = -3.0
    call.logits[1, 3] = float("nan")
    call.logits[3, 3] = float("inf")
    call.logits[4] = 1.0
    result, _ = interpreter.call("gpu.kernels.sample:sample", call)
    assert result.tolist() == [17, -1, -1, -1, 0]
    assert sample_twin(call).tolist() == [17, -1, -1, -1, 0]


def test_the_wrong_arguments_are_named():
    x = torch.zeros(2, 8)
    with pytest.raises(ArgumentError, match=r"weight must have the shape \[8\], not \[7\]"):
        rms_norm_twin(x, torch.zeros(7), 1e-5, x)
    with pytest.raises(ArgumentError, match="residual and out must be different memory"):
        rms_norm_twin(x, torch.zeros(8), 1e-5, x, x)
    with pytest.raises(ArgumentError, match="x must hold gate and up side by side, but it has 7 columns"):
        silu_mul_twin(torch.zeros(2, 7), torch.zeros(2, 3))
    with pytest.raises(ArgumentError, match="table has 9 columns"):
        rope_twin(torch.zeros(1, 1, 8), torch.zeros(1, 1, 8), torch.zeros(5, 9), torch.zeros(1, dtype=torch.int64))
