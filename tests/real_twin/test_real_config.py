"""Every key of a family's `config.json` is read as transformers reads it, or refused: none is read past."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from gpu.decoder_config import FAMILIES, DecoderConfig
from gpu.rotary import RotaryConfig
from sim.catalog.hf_config import read_config, shape_from_config
from sim.catalog.hf_traits import ARCHITECTURES
from sim.core.config import ConfigError
from tests.support.logits_bench import SIZES, Bench

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

# What a file may say beside the sizes; None as value takes a key out that SIZES has.
COMPUTED: dict[str, list[dict[str, Any]]] = {
    "every family": [
        {},
        {"head_dim": 8},
        {"head_dim": 48},
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 4},
        {"tie_word_embeddings": True},
        {"rms_norm_eps": 0.1},
        {"rope_theta": 100.0},
        {"rope_theta": 100.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50.0}},
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
        {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 16}, "rope_theta": 100.0},
        {"rope_scaling": LLAMA3, "rope_theta": 100.0},  # the length before stretching is max_position_embeddings
        {"rope_scaling": LLAMA3, "rope_theta": 100.0, "original_max_position_embeddings": 16},
        {"rope_parameters": {"rope_type": "default", "factor": 8.0}},
    ],
    "llama": [
        {"attention_bias": True},
        {"mlp_bias": True},
        {"layer_types": ["full_attention"] * 3, "sliding_window": 5},
        {"sliding_window": 5, "use_sliding_window": False},
    ],
    "mistral": [
        {"sliding_window": 5},
        {"sliding_window": None},
        {"sliding_window": None, "use_sliding_window": False},
        {"sliding_window": 5, "max_window_layers": 1},
    ],
    "qwen2": [
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        {"sliding_window": 5, "max_window_layers": 1},
        {"attention_bias": True},
    ],
    "qwen3": [
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
        {"attention_bias": True},
    ],
}  # fmt: skip

REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "every family": [
        ({"hidden_act": "gelu"}, "activation is gelu"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None; a number above 0"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}, "the whole head"),
        ({"per_layer_config": {"0": {"intermediate_size": 40}}}, "per_layer_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn' cannot be computed"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' cannot be computed"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' needs factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "needs low_freq_factor, high_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "two"}}, "factor is 'two'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "a key 'full_attention'"),
        ({"rope_theta": None}, "rope_theta is None"),
    ],
    "llama": [
        ({"sliding_window": 5}, r"windows \[5, 5, 5\], and models of the family llama have \[None, None, None\]"),
        ({"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}, "windows"),
    ],
    "mistral": [
        ({"attention_bias": True}, "biases of query, key and value True"),
        ({"mlp_bias": True}, "biases of the feed-forward part True"),
        ({"sliding_window": 5, "use_sliding_window": False}, r"have \[5, 5, 5\]"),
        ({"sliding_window": 5, "layer_types": ["full_attention"] * 3}, "windows"),
    ],
    "qwen2": [
        ({"attention_bias": False}, "biases of query, key and value False, and models of the family qwen2 have True"),
        ({"mlp_bias": True}, "feed-forward"),
    ],
    "qwen3": [({"mlp_bias": True}, "feed-forward")],
}


def cases(table: dict[str, list[Any]]) -> list[Any]:
    return [(family, case) for family in FAMILIES for case in (*table["every family"], *table[family])]


def file_of(family: str, changes: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": family, **SIZES, "torch_dtype": "float32", **changes}


@pytest.mark.parametrize(("family", "changes"), cases(COMPUTED))
def test_what_a_file_says_is_computed_as_transformers_computes_it(family, changes, tmp_path):
    """Whole prompts, and the last token alone on top of the others, at up to 40 positions: beyond every window."""
    bench = Bench(family, stated=file_of(family, changes))
    bench.feed(bench.tables.new("whole"), bench.tokens(1), [40])
    bench.feed(bench.tables.new("parts"), bench.tokens(2), [17, 1, 22])


@pytest.mark.parametrize(("family", "case"), cases(REFUSED))
def test_what_would_be_computed_otherwise_is_refused_by_name(family, case, tmp_path):
    changes, why = case
    (tmp_path / "config.json").write_text(json.dumps(file_of(family, changes)), encoding="utf-8")
    shape = read_config(tmp_path / "config.json")
    with pytest.raises(ConfigError, match=why):
        DecoderConfig.of(shape, tmp_path)


def test_a_file_without_a_model_type_is_refused_where_it_would_be_run():
    values = {**SIZES, "torch_dtype": "float32"}
    with pytest.raises(ConfigError, match="no model_type; llama, mistral, qwen2, qwen3 can be"):
        DecoderConfig.from_values(shape_from_config(values, name="m"), values)


def test_a_language_model_inside_a_larger_one_is_read_there():
    """Mistral 3 and others nest it: base and epsilon stand beside the sizes, not outside."""
    inner = file_of("mistral", {"rope_theta": 1e9, "rms_norm_eps": 1e-5, "sliding_window": None})
    values = {"model_type": "mistral3", "text_config": inner}
    config = DecoderConfig.from_values(shape_from_config(values, name="m"), values)
    assert (config.rotary.theta, config.rms_norm_eps) == (1e9, 1e-5)


@pytest.mark.parametrize(
    "family", [name for name in ARCHITECTURES if name not in ("kimi_k2", "deepseek_v2", "deepseek_v3")]
)
@pytest.mark.parametrize("layers", [3, 32])
def test_keys_that_a_file_leaves_out_have_the_architecture_s_defaults(family, layers):
    """64 query heads of 4096: few enough key heads, and a head size that does not follow from the hidden size, are visible."""
    sizes = {
        **SIZES,
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "num_hidden_layers": layers,
        "intermediate_size": 80,
    }
    del sizes["num_key_value_heads"]
    for used in ({}, {"use_sliding_window": True}) if family in FAMILIES else ({},):
        values = {"model_type": family, **sizes, **used}
        theirs = AutoConfig.for_model(**values)
        ours = shape_from_config({**values, "num_experts_per_tok": 2, "moe_intermediate_size": 80}, name=family)
        assert ours.num_kv_heads == theirs.num_key_value_heads
        assert ours.head_dim == (getattr(theirs, "head_dim", None) or 64)
        window = getattr(theirs, "sliding_window", None)
        kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * layers
        want = [window if kind == "sliding_attention" else None for kind in kinds]
        assert [ours.attention_at(layer).window for layer in range(layers)] == want


@pytest.mark.parametrize("factor", [2.0, 8.0])
def test_long_waves_of_llama_3_are_stretched_and_short_ones_kept(factor):
    """By hand: base 100 and 4 numbers give waves of 2 pi and 20 pi; of a length of 64, the first is below a quarter (16), the second
    between it and the whole: (64 / 20 pi - 1) / 3 of it is kept."""
    rotary = RotaryConfig.from_values(
        {"rope_theta": 100.0, "max_position_embeddings": 64, "rope_scaling": {**LLAMA3, "factor": factor}}
    )
    kept = (64 / (20 * torch.pi) - 1) / 3
    assert rotary.inverse_frequencies(4) == pytest.approx([1.0, 0.1 * (kept + (1 - kept) / factor)])


def test_transformers_knows_the_keys_that_are_tried_here():
    """A key that these families' classes gain must be thought of: read it, or refuse it, and add it here."""
    known = {
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "rope_parameters", "attention_bias", "mlp_bias",
        "sliding_window", "use_sliding_window", "max_window_layers", "layer_types",
    }  # fmt: skip
    without_effect = {
        "initializer_range", "attention_dropout", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "pretraining_tp",
    }  # fmt: skip
    common = set(AutoConfig.for_model("llama").__class__.__mro__[1].__dataclass_fields__)
    for family in FAMILIES:
        fields = set(AutoConfig.for_model(family).__class__.__dataclass_fields__) - common
        assert fields <= known | without_effect, f"{family}: {sorted(fields - known - without_effect)}"
