"""Storing, moving and summing blocks, in Triton's interpreter, against their torch twins."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu import KVLayout, PagedKVPool
from gpu.check import ArgumentError
from gpu.kernels.attention import DecodeCall
from gpu.kernels.block_rows import BlockRows
from gpu.kernels.blocks_twin import block_checksum_twin, move_blocks_twin, store_kv_twin
from gpu.kernels.launch import KVView
from tests.support.interpreter import InterpreterError
from tests.support.paged_batches import Shape, empty_cache

ROOT = Path(__file__).resolve().parents[2]
STORE = "gpu.kernels.store_kv:store_kv"
MOVE = "gpu.kernels.move_blocks:move_blocks"
SUM = "gpu.kernels.block_checksum:block_checksum"


def bits(tensor):
    """A tensor's bytes, so that NaN equals NaN."""
    return tensor.contiguous().view(torch.uint8)


# -- store ------------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(
    heads=st.sampled_from([1, 2, 3, 8]),
    head_dim=st.sampled_from([16, 64, 80, 128, 256]),
    block_size=st.sampled_from([8, 16, 24, 128]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    scaling=st.sampled_from(["none", "static", "per_token_head"]),
    num_tokens=st.integers(0, 5),
    seed=st.integers(0, 100),
)
def test_store_writes_each_vector_into_its_slot_and_nothing_else(
    interpreter, heads, head_dim, block_size, dtype, scaling, num_tokens, seed
):
    generator = torch.Generator().manual_seed(seed)
    shape = Shape(num_kv_heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype, scaling=scaling)
    cache, twin = empty_cache(shape, 3), empty_cache(shape, 3)
    fused = (
        torch.randn(num_tokens, 3, heads, head_dim, generator=generator).to(dtype) * 10
    )  # strided, as from one projection
    fused[:1] *= 100  # beyond what fp8 holds
    slots = torch.randperm(4 * block_size, generator=generator)[:num_tokens]  # those of block 0 are padding
    _, (_, _, stored, _) = interpreter.call(STORE, fused[:, 1], fused[:, 2], cache, slots)
    store_kv_twin(fused[:, 1], fused[:, 2], twin, slots)
    assert torch.equal(bits(stored.bits), bits(twin.bits))
    if scaling == "per_token_head":
        torch.testing.assert_close(stored.scale, twin.scale, equal_nan=True)
    assert bits(stored.bits[0]).float().std() == 0 or stored.bits[0].isnan().all()  # NO_BLOCK is as it was


def test_fp8_numbers_are_rounded_as_torch_rounds_them(interpreter):
    # every number of the format, the midpoints between neighbours, what lies beside those, and what lies beyond
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = (every[:-1] + every[1:]) / 2
    values = torch.cat((every, between, between * 1.001, torch.tensor([1e9, -1e9, 449.0, 2.0**-10, -(2.0**-11)])))
    values = torch.nn.functional.pad(values, (0, -len(values) % 64)).view(-1, 1, 64)
    kv = empty_cache(Shape(num_kv_heads=1, head_dim=64, scaling="static"), 2).kv
    cache, slots = KVView.of(kv, torch.ones(1).expand(kv.shape[:4])), torch.arange(16, 16 + len(values))
    _, (_, _, stored, _) = interpreter.call(STORE, values, values, cache, slots)
    expected = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    for half in (0, 1):
        got = stored.bits[1, half, : len(values)]
        assert ((got == expected) | values.isnan()).all()
        assert ((got & 0x7F == 0x7F) == values.isnan()).all()


def test_fp8_numbers_are_read_exactly(interpreter):
    kv = empty_cache(Shape(num_kv_heads=4, head_dim=64, scaling="static"), 1).kv
    kv.view(torch.uint8)[1, :, 0] = torch.arange(256, dtype=torch.uint8).view(4, 64)
    kv.view(torch.uint8)[1, 0, 0] = 0  # keys do not matter: a single position has the weight 1
    cache = KVView.of(kv, torch.ones(1).expand(kv.shape[:4]))
    query = torch.ones(1, 4, 64)
    call = DecodeCall(
        query=query,
        cache=cache,
        block_table=torch.ones(1, 1, dtype=torch.int32),
        seq_lens=torch.ones(1, dtype=torch.int32),
        out=torch.empty_like(query),
        softmax_scale=1.0,
    )
    result, _ = interpreter.call("gpu.kernels.decode_attention:decode_attention", call)
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().view(1, 4, 64)
    torch.testing.assert_close(result, expected, atol=0, rtol=0, equal_nan=True)


def test_store_refuses_what_does_not_fit_and_names_the_argument():
    cache = empty_cache(Shape(), 2)
    new = torch.zeros(3, 2, 64, dtype=torch.float16)
    slots = torch.arange(16, 19)
    for arguments, message in (
        ((new[:2], new, cache, slots), r"key must have the shape \[3, 2, 64\], not \[2, 2, 64\]"),
        ((new, new.double(), cache, slots), "value must be bfloat16 or float16 or float32, not float64"),
        ((new, new, cache, slots.int()), "slot_mapping must be int64, not int32"),
        (
            (new, new.transpose(1, 2).contiguous().transpose(1, 2), cache, slots),
            "last dimension of value must be dense",
        ),
    ):
        with pytest.raises(ArgumentError, match=message):
            store_kv_twin(*arguments)


# -- move and sum -----------------------------------------------------------------------------------------------------


def filled_pool(order, kv_cache_dtype, num_blocks=6):
    layout = KVLayout(
        num_layers=3, num_kv_heads=2, head_dim=32, block_size=8, kv_cache_dtype=kv_cache_dtype, order=order
    )
    pool = PagedKVPool(layout, num_blocks)
    pool.arena.copy_(
        torch.randint(0, 256, pool.arena.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    )
    return pool


@pytest.mark.parametrize("order", ["layer", "block"])
@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "fp8_per_token_head"])
def test_a_gather_and_a_scatter_bring_every_byte_back(interpreter, order, kv_cache_dtype):
    pool = filled_pool(order, kv_cache_dtype)
    staging = BlockRows.of(pool.layout, torch.zeros(3 * pool.layout.block_bytes, dtype=torch.uint8), 3, dense=True)
    chosen, places = torch.tensor([5, 1, 4]), torch.arange(3)
    _, (_, gathered, _, _) = interpreter.call(MOVE, pool.rows, staging, chosen, places)
    for place, block in enumerate(chosen.tolist()):
        for layer in range(3):
            assert torch.equal(gathered.strided[place, layer], pool.rows.strided[block, layer])
    emptied = filled_pool(order, kv_cache_dtype)
    emptied.poison(chosen.tolist())
    _, (_, restored, _, _) = interpreter.call(MOVE, gathered, emptied.rows, places, chosen)
    assert torch.equal(restored.words, pool.rows.words)


@settings(max_examples=10)
@given(st.permutations(range(1, 7)), st.integers(0, 3), st.sampled_from(["layer", "block"]))
def test_copies_within_the_pool_change_their_targets_only(interpreter, blocks, count, order):
    pool, twin = filled_pool(order, "bfloat16"), filled_pool(order, "bfloat16")
    sources, targets = (
        torch.tensor(blocks[:count], dtype=torch.int64),
        torch.tensor(blocks[3 : 3 + count], dtype=torch.int64),
    )
    _, (rows, _, _, _) = interpreter.call(MOVE, pool.rows, pool.rows, sources, targets)
    move_blocks_twin(twin.rows, twin.rows, sources, targets)
    assert torch.equal(rows.words, twin.rows.words)


def test_moves_whose_result_would_depend_on_the_order_are_refused():
    rows = filled_pool("layer", "bfloat16").rows
    for sources, targets, message in (
        ([1, 2], [3, 3], "target_ids names a block twice"),
        ([1, 2], [2, 3], "block 2 is read and written"),
        ([1], [7], r"target_ids must lie in \[0, 7\)"),
    ):
        with pytest.raises(ArgumentError, match=message):
            move_blocks_twin(rows, rows, torch.tensor(sources), torch.tensor(targets))


@pytest.mark.parametrize("order", ["layer", "block"])
def test_checksum_is_its_twin_s_and_does_not_depend_on_where_the_block_lies(interpreter, order):
    pool = filled_pool(order, "bfloat16")
    ids, out = torch.tensor([3, 1, 3]), torch.empty(3, dtype=torch.int32)
    got, _ = interpreter.call(SUM, pool.rows, ids, out)
    expected = block_checksum_twin(pool.rows, ids, torch.empty(3, dtype=torch.int32))
    assert torch.equal(got, expected) and got[0] == got[2] != got[1]
    move_blocks_twin(pool.rows, pool.rows, torch.tensor([3]), torch.tensor([6]))
    assert block_checksum_twin(pool.rows, torch.tensor([6]), torch.empty(1, dtype=torch.int32)) == got[:1]


@settings(max_examples=50)
@given(st.integers(0, 3 * 256 - 1), st.integers(0, 3 * 256 - 1), st.integers(1, 2**31 - 1))
def test_checksum_shows_any_changed_word_and_any_two_words_that_changed_places(one, other, flipped):
    rows = filled_pool("block", "bfloat16").rows
    before = block_checksum_twin(rows, torch.tensor([2]), torch.empty(1, dtype=torch.int32)).clone()
    words = rows.strided[2].reshape(-1)
    assert words.data_ptr() == rows.strided[2].data_ptr()
    swapped = int(words[one]) != int(words[other])
    words[one], words[other] = words[other].clone(), words[one].clone()
    after = block_checksum_twin(rows, torch.tensor([2]), torch.empty(1, dtype=torch.int32)).clone()
    assert (after != before) == swapped
    words[one] ^= flipped
    assert block_checksum_twin(rows, torch.tensor([2]), torch.empty(1, dtype=torch.int32)) != after


def test_blocks_filled_with_different_numbers_have_different_checksums():
    rows = filled_pool("block", "bfloat16").rows
    seen = set()
    for value in (0.0, 1.0, 2.0, -1.0, 0.5, float("nan")):
        rows.words.view(torch.bfloat16).fill_(value)
        seen.add(int(block_checksum_twin(rows, torch.tensor([2]), torch.empty(1, dtype=torch.int32))))
    assert len(seen) == 6


def test_a_failure_in_the_interpreter_comes_back_with_its_traceback(interpreter):
    rows = filled_pool("layer", "bfloat16").rows
    with pytest.raises(InterpreterError, match="ArgumentError: target_ids names a block twice"):
        interpreter.call(MOVE, rows, rows, torch.tensor([1, 2]), torch.tensor([3, 3]))


# -- large offsets (SGLang #20390) ------------------------------------------------------------------------------------

FAR = """
import torch
from gpu.kernels.attention import DecodeCall, PrefillCall
from gpu.kernels.block_rows import BlockRows
from gpu.kernels.decode_attention import decode_attention
from gpu.kernels.prefill_attention import prefill_attention
from gpu.kernels.launch import KVView
from gpu.kernels.move_blocks import move_blocks
from gpu.kernels.block_checksum import block_checksum
from gpu.kernels.store_kv import store_kv

# Three blocks of 8 x 2 x 16 numbers, a little more than 2^30 elements apart: the stride fits into 32 bits, as it does in a real
# pool, and its product with a block id does not. The memory between the blocks is never touched, so it costs nothing.
stride = 2**30 + 64
far = torch.empty(2 * stride + 1024, dtype=torch.uint8)
cache = KVView.of(
    far.view(torch.float8_e4m3fn).as_strided((3, 2, 8, 2, 16), (stride, 256, 32, 16, 1)),
    torch.ones(1).expand(3, 2, 8, 2),
)
key, value = torch.ones(8, 2, 16), torch.full((8, 2, 16), 3.0)
store_kv(key, value, cache, torch.arange(16, 24))
assert (cache.kv[2, 0].float() == 1).all() and (cache.kv[2, 1].float() == 3).all(), "stored somewhere else"

query = torch.randn(1, 2, 16)
common = dict(query=query, cache=cache, block_table=torch.tensor([[2]], dtype=torch.int32),
              seq_lens=torch.tensor([8], dtype=torch.int32), softmax_scale=0.25)
out = decode_attention(DecodeCall(out=torch.empty_like(query), **common))
assert torch.allclose(out, torch.tensor(3.0)), "decode read somewhere else"
starts = torch.tensor([0, 1], dtype=torch.int32)
out = prefill_attention(PrefillCall(out=torch.empty_like(query), query_starts=starts, **common))
assert torch.allclose(out, torch.tensor(3.0)), "prefill read somewhere else"

words = torch.empty(2 * stride + 256, dtype=torch.int32)
rows = BlockRows(words=words, num_rows=3, num_layers=1, chunk_words=128, block_stride=stride, layer_stride=0)
words[:128] = torch.arange(128, dtype=torch.int32)
move_blocks(rows, rows, torch.tensor([0]), torch.tensor([2]))
assert (words[2 * stride : 2 * stride + 128] == words[:128]).all(), "moved somewhere else"
move_blocks(rows, rows, torch.tensor([2]), torch.tensor([1]))
sums = block_checksum(rows, torch.tensor([0, 1, 2]), torch.empty(3, dtype=torch.int32))
assert sums[0] == sums[1] == sums[2] != 0, "summed somewhere else"
print("far blocks are found")
"""


def test_blocks_beyond_two_to_the_31_elements_are_found():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FAR],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "far blocks are found" in done.stdout, done.stderr
