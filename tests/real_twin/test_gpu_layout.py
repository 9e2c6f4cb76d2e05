"""KVLayout: every byte has its place, and the bytes are those of the ledger."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu import KVLayout
from sim.catalog.dtypes import kv_head_bytes
from sim.core.config import ConfigError

layouts = st.builds(
    KVLayout,
    num_layers=st.integers(1, 5),
    num_kv_heads=st.sampled_from([1, 2, 3, 8]),
    head_dim=st.sampled_from([16, 64, 80, 128, 256]),
    block_size=st.sampled_from([8, 16, 24, 128]),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    kv_cache_dtype=st.sampled_from(["auto", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_per_token_head"]),
    order=st.sampled_from(["layer", "block"]),
)


def test_llama_3_1_8b_takes_two_mebibytes_a_block():
    layout = KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16)
    assert layout.block_bytes == 32 * 2 * 16 * 8 * 128 * 2 == 2 * 2**20
    assert layout.layer_shape(1000) == (1001, 2, 16, 8, 128)
    assert layout.layer_strides == (32_768, 16_384, 1024, 128, 1)
    assert layout.arena_bytes(1000) == 1001 * layout.block_bytes


@given(layouts)
def test_a_block_has_the_bytes_that_the_ledger_counts(layout):
    vector = kv_head_bytes(layout.kv_cache_dtype, layout.head_dim, layout.dtype)
    assert layout.block_bytes == layout.num_layers * 2 * layout.block_size * layout.num_kv_heads * vector


@given(layouts, st.integers(0, 50))
def test_chunks_tile_the_arena_without_gap_or_overlap(layout, num_blocks):
    layer, block = layout.layer_stride_bytes(num_blocks), layout.block_stride_bytes
    starts = sorted(i * layer + b * block for i in range(layout.num_layers) for b in range(num_blocks + 1))
    assert starts == list(range(0, layout.arena_bytes(num_blocks), layout.chunk_bytes))
    assert layout.layer_strides[0] * layout.element_bytes == block
    assert all(start % 16 == 0 for start in starts)


def test_only_fp8_has_scales():
    sizes = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 64, "block_size": 16}
    assert [KVLayout(**sizes, kv_cache_dtype=name).scaling for name in ("auto", "fp8", "fp8_per_token_head")] == [
        "none",
        "static",
        "per_token_head",
    ]
    assert KVLayout(**sizes, kv_cache_dtype="fp8_per_token_head").scale_offset_bytes == 2 * 16 * 2 * 64


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_layers": 0}, "num_layers must be a positive whole number, not 0"),
        ({"block_size": 1.5}, "block_size must be a positive whole number, not 1.5"),
        ({"head_dim": 512}, "head_dim at most 256"),
        ({"head_dim": 12}, "multiple of 16 bytes"),
        ({"dtype": "int4"}, "unknown dtype 'int4'"),
        ({"kv_cache_dtype": "nvfp4"}, "'nvfp4' has no real pool; one of auto, bfloat16"),
        ({"kv_cache_dtype": "fp8_per_token_head", "block_size": 1}, "not a multiple of 16"),
        ({"order": "token"}, "order must be 'layer' or 'block', not 'token'"),
    ],
)
def test_what_no_pool_could_be_is_refused_with_the_numbers(changed, message):
    sizes = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 64, "block_size": 16}
    with pytest.raises(ConfigError, match=message):
        KVLayout(**{**sizes, **changed})
