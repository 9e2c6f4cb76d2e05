"""Model shapes: parameters, weight bytes and KV bytes must equal published totals, number by number."""

from __future__ import annotations

from typing import Any

import pytest

from sim.catalog.hf_config import shape_from_config
from sim.catalog.models import MODEL_ALIASES, MODELS, model_shape
from sim.core.config import ConfigError

GIB = 1 << 30

# name, parameters, GiB in bf16, KV bytes a token in bf16 and in fp8.
ORACLE = [
    ("qwen3-0.6b", 596_049_920, 1.110, 114_688, 57_344),
    ("qwen2.5-7b", 7_615_616_512, 14.185, 57_344, 28_672),
    ("llama-2-7b", 6_738_415_616, 12.551, 524_288, 262_144),
    ("llama-3.1-8b", 8_030_261_248, 14.958, 131_072, 65_536),
    ("qwen3-8b", 8_190_735_360, 15.256, 147_456, 73_728),
    ("qwen3-32b", 32_762_123_264, 61.024, 262_144, 131_072),
    ("llama-3.1-70b", 70_553_706_496, 131.417, 327_680, 163_840),
    ("llama-3.1-405b", 405_853_388_800, 755.961, 516_096, 258_048),
    ("mixtral-8x7b", 46_702_792_704, 86.991, 131_072, 65_536),
    ("qwen3-30b-a3b", 30_532_122_624, 56.871, 98_304, 49_152),
    ("gpt-oss-20b", 20_914_757_184, 38.957, 49_152, 24_576),
    ("deepseek-v2-lite", 15_706_484_224, 29.256, 31_104, 15_552),
    ("deepseek-v3", 671_026_419_200, 1249.9, 70_272, 35_136),
    ("kimi-k2", 1_026_408_232_448, 1911.8, 70_272, 35_136),
]


@pytest.mark.parametrize(("name", "parameters", "gib", "kv_bf16", "kv_fp8"), ORACLE)
def test_a_shape_has_the_published_parameters_and_kv_bytes(
    name: str, parameters: int, gib: float, kv_bf16: int, kv_fp8: int
) -> None:
    shape = model_shape(name)
    assert shape.num_parameters == parameters
    digits = 3 if gib < 1000 else 1
    assert round(shape.weight_bytes("bfloat16", None) / GIB, digits) == gib
    assert shape.kv_bytes_per_token("bfloat16") == kv_bf16
    assert shape.kv_bytes_per_token("fp8") == kv_fp8


def test_gemma_4_keeps_20480_bytes_a_token_in_full_layers_and_8192_in_each_window_layer() -> None:
    shape = model_shape("gemma-4-26b-a4b")
    assert shape.kv_bytes_per_token(windowed=False) == 20_480
    assert shape.kv_bytes_per_token() == 20_480 + 25 * 8_192
    assert [shape.attention_at(layer).window for layer in range(6)] == [1024] * 5 + [None]


def test_gpt_oss_keeps_half_of_its_kv_in_full_layers_and_a_tail_of_128_tokens_in_the_others() -> None:
    shape = model_shape("gpt-oss-20b")
    assert shape.kv_bytes_per_token(windowed=False) == 24_576
    assert shape.kv_bytes(10_000) == 10_000 * 24_576 + 128 * 24_576


def test_the_deepseek_layout_takes_656_bytes_a_layer() -> None:
    assert model_shape("deepseek-v3").kv_bytes_per_token("fp8_ds_mla") == 61 * 656 == 40_016


def test_per_head_scales_and_four_bit_kv_follow_their_layouts() -> None:
    shape = model_shape("llama-3.1-8b")  # 32 layers, 8 KV heads of 128
    assert shape.kv_bytes_per_token("int8_per_token_head") == 32 * (2 * 8 * 128 + 2 * 8 * 4)
    assert shape.kv_bytes_per_token("nvfp4") == 32 * 8 * 2 * (128 // 2 + 128 // 16)


def test_kv_heads_divide_over_ranks_and_are_replicated_beyond_their_number() -> None:
    shape = model_shape("qwen3-30b-a3b")  # 4 KV heads
    assert [shape.kv_bytes_per_token(tensor_parallel_size=tp) for tp in (1, 2, 4, 8)] == [
        98_304,
        49_152,
        24_576,
        24_576,
    ]


def test_latent_attention_keeps_its_whole_kv_on_every_rank() -> None:
    shape = model_shape("deepseek-v3")
    assert shape.kv_bytes_per_token(tensor_parallel_size=8) == shape.kv_bytes_per_token()


def test_a_mixture_activates_only_the_experts_a_token_visits() -> None:
    assert model_shape("qwen3-30b-a3b").active_parameters == 3_353_032_704  # "A3B"
    assert model_shape("mixtral-8x7b").active_parameters == 12_879_925_248  # published: 12.9 billion
    dense = model_shape("llama-3.1-8b")
    assert dense.active_parameters == dense.num_parameters


def test_published_formats_give_published_sizes() -> None:
    # The safetensors files of openai/gpt-oss-20b hold 13.76 GB.
    assert model_shape("gpt-oss-20b").weight_bytes() == pytest.approx(13.76e9, rel=0.002)
    # vLLM 0.19 loads Llama-3.1-8B with run-time fp8 in 8.49 GiB, 0.03 of it a rotary table.
    assert model_shape("llama-3.1-8b").weight_bytes(quantization="fp8") / GIB == pytest.approx(8.46, abs=0.01)


def test_tensor_parallel_ranks_share_the_matrices_and_repeat_the_vectors() -> None:
    shape = model_shape("llama-3.1-8b")
    whole, half = shape.weight_bytes(), shape.weight_bytes(tensor_parallel_size=2)
    vectors = (2 * 32 + 1) * 4096 * 2
    assert 2 * half == whole + vectors


@pytest.mark.parametrize(("layers_in", "stages", "sizes"), [(32, 4, [8, 8, 8, 8]), (61, 4, [15, 15, 16, 15])])
def test_pipeline_stages_divide_the_layers_and_the_last_gets_no_remainder(
    layers_in: int, stages: int, sizes: list[int]
) -> None:
    shape = model_shape({32: "llama-3.1-8b", 61: "deepseek-v3"}[layers_in])
    assert [len(shape.layers_of_rank(rank, stages)) for rank in range(stages)] == sizes
    assert sum(shape.weight_bytes(pipeline_parallel_size=stages, pipeline_rank=r) for r in range(stages)) == (
        shape.weight_bytes()
    )


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
QWEN3: dict[str, Any] = {
    **LLAMA,
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def read(values: dict[str, Any]) -> Any:
    return shape_from_config(values, name="model", source="config.json")


def test_a_stated_head_dim_is_never_derived_from_the_hidden_size() -> None:
    assert read(QWEN3).head_dim == 128  # 1024 / 16 would be 64
    assert read(QWEN3).num_parameters == 596_049_920
    assert read(QWEN3).kv_bytes_per_token() == 114_688
    assert read({**LLAMA, "head_dim": None}).head_dim == 128


def test_a_latent_attention_file_is_not_read_as_grouped_heads() -> None:
    shape = read(DEEPSEEK)  # carries num_key_value_heads 128: a factor of 57 if believed
    assert shape.kv_bytes_per_token() == 70_272
    assert shape.num_parameters == 671_026_419_200
    assert shape.quantization == "fp8_block"


def test_a_window_that_is_not_used_is_no_window() -> None:
    qwen2 = {**LLAMA, "model_type": "qwen2", "sliding_window": 131072, "use_sliding_window": False}
    assert not read(qwen2).has_window
    del qwen2["use_sliding_window"]  # the architecture's default is off
    assert not read(qwen2).has_window
    assert read({**LLAMA, "model_type": "mistral", "sliding_window": 4096}).attention[0].window == 4096


def test_tied_embeddings_are_counted_once() -> None:
    untied = read({**QWEN3, "tie_word_embeddings": False})
    assert untied.num_parameters - read(QWEN3).num_parameters == 151936 * 1024


def test_a_multimodal_file_is_read_in_its_text_config() -> None:
    nested = {"model_type": "llava", "torch_dtype": "float16", "text_config": {**LLAMA, "torch_dtype": None}}
    shape = read(nested)
    assert shape.num_parameters == 8_030_261_248
    assert any("text_config" in note for note in shape.notes)


def test_dtype_is_taken_under_its_old_and_its_new_key() -> None:
    new = {key: value for key, value in LLAMA.items() if key != "torch_dtype"} | {"dtype": "float16"}
    assert read(new).dtype == "float16"


def test_attention_without_kv_heads_is_multi_head_and_with_one_is_multi_query() -> None:
    plain = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert read(plain).num_kv_heads == 32
    assert read({**LLAMA, "num_key_value_heads": 1}).kv_bytes_per_token() == 32 * 2 * 128 * 2


def test_layer_types_decide_which_layers_have_the_window() -> None:
    hybrid = {**LLAMA, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 16}
    shape = read(hybrid)
    assert [shape.attention_at(layer).window for layer in range(4)] == [128, None, 128, None]
    assert shape.kv_bytes_per_token(windowed=False) == 65_536


def test_a_pattern_stands_in_for_layer_types() -> None:
    gemma = {**LLAMA, "model_type": "gemma3_text", "sliding_window": 1024, "num_hidden_layers": 12, "head_dim": 256}
    windows = [read(gemma).attention_at(layer).window for layer in range(12)]
    assert windows == ([1024] * 5 + [None]) * 2


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_experts_are_found_under_each_of_their_names(key: str) -> None:
    mixtral = {**LLAMA, "model_type": "mixtral", "vocab_size": 32000, key: 8, "num_experts_per_tok": 2}
    assert read(mixtral).num_parameters == 46_702_792_704


def test_an_unknown_architecture_is_read_as_a_llama_and_says_so() -> None:
    shape = read({**LLAMA, "model_type": "novel"})
    assert shape.num_parameters == 8_030_261_248
    assert "novel" in shape.notes[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": None}, ["num_hidden_layers", "missing"]),
        ({"hidden_size": "4096"}, ["hidden_size", "'4096'"]),
        ({"num_attention_heads": 33}, ["num_attention_heads", "33"]),
        ({"num_key_value_heads": 5}, ["num_key_value_heads", "5"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "32"]),
        ({"layer_types": ["linear_attention"] * 32}, ["layer_types", "linear_attention"]),
        ({"num_hidden_layers": -1}, ["num_hidden_layers", "-1"]),
        ({"quantization_config": {"quant_method": "fb8"}}, ["quant_method", "fp8"]),
    ],
)
def test_a_bad_configuration_is_one_message_with_file_and_key(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        read({**LLAMA, **change})
    for word in ["config.json", *words]:
        assert word in str(error.value)


def test_a_file_is_read_by_path_and_by_folder(tmp_path: Any) -> None:
    import json

    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert model_shape(folder / "config.json").name == "my-model"
    assert model_shape(str(folder)).num_parameters == 8_030_261_248
    (folder / "config.json").write_text('{"num_hidden_layers": ')
    with pytest.raises(ConfigError, match=r"config\.json: line 1"):
        model_shape(str(folder))
    with pytest.raises(ConfigError, match="no such file"):
        model_shape(str(tmp_path / "absent.json"))


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.1-70b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("Qwen/Qwen2-7B-Instruct", "qwen2.5-7b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("openai/gpt-oss-20b", "gpt-oss-20b"),
        ("LLAMA-3.1-8B", "llama-3.1-8b"),
    ],
)
def test_hub_names_find_their_shape(alias: str, name: str) -> None:
    assert model_shape(alias) is MODELS[name]


def test_every_alias_names_a_shape() -> None:
    assert set(MODEL_ALIASES.values()) <= set(MODELS)


def test_a_misspelt_model_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown model 'lama-3\.1-8b'.*llama-3\.1-8b.*config\.json"):
        model_shape("lama-3.1-8b")


@pytest.mark.parametrize("tp", [3, 64])
def test_a_parallelism_that_does_not_divide_the_heads_is_refused(tp: int) -> None:
    with pytest.raises(ConfigError, match="attention heads"):
        model_shape("llama-3.1-8b").check_parallel(tp)
