"""The pool over layers that keep different tokens: groups, blocks of a request, waste."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sim.memory import build_ledger
from sim.memory.kv_groups import KvGroup, rounding_waste_tokens, sequences_blocks


def test_one_kind_of_layer_is_one_group_and_the_textbook_s_pool() -> None:
    ledger = build_ledger("llama-3.1-8b", "h100")
    assert not ledger.layout.is_hybrid
    assert ledger.block_bytes == 16 * 131_072
    assert ledger.request_blocks(8192) == 512


def test_window_and_full_layers_share_one_pool_in_groups_of_equally_many() -> None:
    # gpt-oss-20b: 12 window layers and 12 full ones, 2,048 B a token and layer: blocks of 12 layers.
    ledger = build_ledger("gpt-oss-20b", "h100", engine_version="0.19", max_model_len=131_072)
    assert [(group.layers, group.window) for group in ledger.layout.groups] == [(12, 128), (12, None)]
    assert ledger.block_bytes == 12 * 2048 * 16
    # One request: 8,192 blocks of the full group, and what 128 - 1 + 8,192 tokens take of the other, and one.
    assert ledger.request_blocks(131_072) == 8192 + 520 + 1
    assert ledger.max_concurrency == ledger.num_gpu_blocks / (8192 + 521)
    # Twice as many blocks of half the bytes: far more tokens than when every layer kept all of them.
    whole = build_ledger("gpt-oss-20b", "h100", engine_version="0.9.2", max_model_len=131_072)
    assert whole.block_bytes == 24 * 2048 * 16
    assert ledger.max_concurrency > 1.8 * whole.num_gpu_blocks / 8192 * 0.95
    assert any("keeps every token" in warning for warning in whole.warnings)


def test_what_the_engine_prints_as_tokens_changed_with_the_release() -> None:
    old, new = (build_ledger("gpt-oss-20b", "h100", engine_version=version) for version in ("0.19", "0.29"))
    assert old.kv_tokens == old.num_gpu_blocks // 2 * 16
    assert new.kv_tokens == int(new.max_concurrency * new.max_model_len)
    assert new.in_flight_tokens == 2 * new.max_num_batched_tokens  # asynchronous scheduling


def test_layers_with_smaller_tokens_get_larger_blocks() -> None:
    # gemma-4-26B-A4B: 25 window layers of 8,192 B a token, 5 full ones of 4,096: full blocks of 32 tokens, groups of five layers.
    ledger = build_ledger("gemma-4-26b-a4b", "h100", max_model_len=65_536)
    assert (
        sorted((group.layers, group.block_size, group.window) for group in ledger.layout.groups if group.window)
        == [(5, 16, 1024)] * 5
    )
    assert [(group.layers, group.block_size) for group in ledger.layout.groups if not group.window] == [(5, 32)]
    assert ledger.block_bytes == 5 * 8192 * 16
    assert ledger.layout.padding_layers == 0


def test_counts_that_are_nearly_alike_are_padded() -> None:
    # Two stages of gpt-oss-120b (36 layers) have 9 and 9; of an odd split, 10 and 9 would be padded to 10.
    ledger = build_ledger("gemma-2-9b", "h100")
    assert [group.layers for group in ledger.layout.groups] == [21, 21]
    assert ledger.layout.padding_layers == 0
    odd = build_ledger("gemma-2-9b", "h100", pipeline_parallel_size=2)
    assert sorted(group.layers for group in odd.layout.groups) == [10, 11]
    assert odd.layout.padding_layers == 1


def test_a_window_holds_itself_what_is_in_flight_and_one_block() -> None:
    # B02: a window of 64, 128 in flight, a length of 1,024: 13 blocks of 16, where the gate and the sizer ask the same function (I5).
    assert KvGroup(layers=1, block_size=16, window=64).blocks(1024, 128) == 13
    assert KvGroup(layers=1, block_size=16, window=None).blocks(1024, 128) == 64
    assert KvGroup(layers=1, block_size=16, window=64).blocks(100, 128) == 7


def test_the_longest_request_of_a_hybrid_pool_is_found_by_search() -> None:
    ledger = build_ledger("gpt-oss-20b", "h100", kv_cache_memory_bytes=256 << 20)
    longest = ledger.max_model_len_that_fits
    assert ledger.request_blocks(longest) <= ledger.num_gpu_blocks < ledger.request_blocks(longest + 16)
    assert ledger.max_model_len == longest


def test_continuations_share_the_full_blocks_of_their_prompt() -> None:
    # 40 tokens: two full blocks shared, the third copied; 100 tokens at the end are seven blocks.
    assert sequences_blocks(40, 60, 1, 16) == 7
    assert sequences_blocks(40, 60, 4, 16) == 2 + 4 * 5
    assert sequences_blocks(32, 32, 4, 16) == 2 + 4 * 2


@given(st.integers(1, 10_000), st.integers(1, 128))
def test_waste_is_what_is_missing_to_a_whole_block(tokens: int, block_size: int) -> None:
    waste = rounding_waste_tokens(tokens, block_size)
    assert 0 <= waste < block_size and (tokens + waste) % block_size == 0


def test_kv_formats_with_scales() -> None:
    per_token = {
        form: build_ledger("llama-3.1-8b", "h200", kv_cache_dtype=form).kv_bytes_per_token
        for form in ("auto", "fp8", "int8_per_token_head", "nvfp4")
    }
    # 32 layers x 8 heads x 2 vectors of 128: 2 bytes, 1 byte, 1 byte and a 4-byte scale, half a byte and a scale a 16th.
    assert per_token == {
        "auto": 131_072,
        "fp8": 65_536,
        "int8_per_token_head": 65_536 + 32 * 2 * 8 * 4,
        "nvfp4": 32 * 2 * 8 * (64 + 8),
    }
    assert (
        build_ledger("deepseek-v3", "h200", tensor_parallel_size=8, kv_cache_dtype="fp8_ds_mla").kv_bytes_per_token
        == 61 * 656
    )
