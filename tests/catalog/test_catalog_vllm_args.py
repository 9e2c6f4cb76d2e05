"""Pasted `vllm serve` command lines: understood as vLLM understands them, and nothing swallowed silently."""

from __future__ import annotations

import pytest

from sim.catalog.vllm_args import parse_vllm_args
from sim.core.config import ConfigError


def test_a_real_command_line_is_understood() -> None:
    parsed = parse_vllm_args(
        "CUDA_VISIBLE_DEVICES=0,1 vllm serve meta-llama/Llama-3.1-70B-Instruct --max-model-len 20000 \\\n"
        " --gpu-memory-utilization 0.95 --tensor-parallel-size 2 --port 8000 --trust-remote-code"
    )
    assert parsed.settings == {
        "model": "meta-llama/Llama-3.1-70B-Instruct",
        "max_model_len": 20000,
        "gpu_memory_utilization": 0.95,
        "tensor_parallel_size": 2,
    }
    assert parsed.ignored == ["--port 8000", "--trust-remote-code"]


@pytest.mark.parametrize(
    ("text", "setting", "value"),
    [
        ("-tp 4", "tensor_parallel_size", 4),
        ("-pp=2", "pipeline_parallel_size", 2),
        ("--max-model-len 1k", "max_model_len", 1000),
        ("--max-model-len 1K", "max_model_len", 1024),
        ("--max-model-len=25.6k", "max_model_len", 25600),
        ("--max-model-len -1", "max_model_len", None),
        ("--max_num_seqs 64", "max_num_seqs", 64),
        ("--kv-cache-dtype fp8_e5m2", "kv_cache_dtype", "fp8_e5m2"),
        ("--dtype half", "dtype", "float16"),
        ("--quantization awq_marlin", "quantization", "awq"),
        ("--kv-cache-memory-bytes 8G", "kv_cache_memory_bytes", 8 << 30),
        ("--enable-prefix-caching", "enable_prefix_caching", True),
        ("--no-enable-prefix-caching", "enable_prefix_caching", False),
        ("--no-enable-chunked-prefill", "enable_chunked_prefill", False),
        ("--enable-chunked-prefill=False", "enable_chunked_prefill", False),
        ("--scheduling-policy priority", "scheduling_policy", "priority"),
        ("--no-scheduler-reserve-full-isl", "reserve_full_prompt", False),
        ("--max-num-seqs 8 --max-num-seqs 16", "max_num_seqs", 16),
        ("--async-scheduling", "async_scheduling", True),
        ("--no-async-scheduling", "async_scheduling", False),
        ("python -m vllm.entrypoints.openai.api_server --model qwen3-8b", "model", "qwen3-8b"),
    ],
)
def test_spellings_of_vllm_become_settings(text: str, setting: str, value: object) -> None:
    parsed = parse_vllm_args(text)
    assert parsed.settings == {setting: value}
    assert parsed.ignored == []


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("--enable-lora", {"max_loras": 1, "max_lora_rank": 16}),
        ("--max-lora-rank 64 --enable-lora --max-loras 8", {"max_loras": 8, "max_lora_rank": 64}),
        ("--speculative-config '{\"num_speculative_tokens\": 3}'", {"num_speculative_tokens": 3}),
        (
            r'--speculative-config {\"model\":\"meta-llama/Llama-3.2-1B-Instruct\",\"num_speculative_tokens\":5,'
            r'\"draft_tensor_parallel_size\":1}',
            {"speculative_model": "meta-llama/Llama-3.2-1B-Instruct", "num_speculative_tokens": 5, "draft_tensor_parallel_size": 1},
        ),
    ],
)  # fmt: skip
def test_adapters_and_drafts_become_lines_of_the_account(text: str, settings: dict[str, object]) -> None:
    parsed = parse_vllm_args(text)
    assert parsed.settings == settings
    assert parsed.ignored == []


@pytest.mark.parametrize(
    ("text", "ignored"),
    [
        ("--no-enable-lora", ["--no-enable-lora"]),
        ("-O3 --swap-space 4", ["-O", "--swap-space 4"]),
        ("--max-loras 4 --max-lora-rank 8", ["--max-loras 4", "--max-lora-rank 8"]),
        ('--speculative-config \'{"method": "ngram"}\'', ["--speculative-config.method ngram"]),
        ('--speculative-config \'{"model": "somebody/draft"}\'', ["--speculative-config.model somebody/draft"]),
        ("--compilation-config.level 3", ["--compilation-config 3"]),
    ],
)
def test_flags_that_are_not_modelled_are_reported(text: str, ignored: list[str]) -> None:
    assert parse_vllm_args(text).ignored == ignored


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--gpu-memory-utilisation 0.9", "--gpu-memory-utilization"),
        ("--max-num-seq 9", "--max-num-seqs"),
        ("--max-num-seqs", "needs a value"),
        ("--max-num-seqs --enforce-eager", "needs a value"),
        ("--max-num-seqs eight", "whole number"),
        ("--max-num-seqs 0", "at least 1"),
        ("--max-model-len 0", "at least 1"),
        ("--max-model-len 1.5K", "8.2k"),
        ("--gpu-memory-utilization 1.5", "at most 1"),
        ("--gpu-memory-utilization nan", "above 0"),
        ("--scheduling-policy lifo", "fcfs, priority"),
        ("--dtype bfloat61", "bfloat16"),
        ("--kv-cache-dtype fp9", "fp8"),
        ("--enforce-eager=maybe", "true or false"),
        ("--speculative-config 5", "JSON object"),
        ("--speculative-config '{oops'", "JSON object"),
        ("--speculative-config '{\"num_speculative_tokens\": 0}'", "at least 1"),
        ("--max-num-seqs 8 stray", "'stray'"),
        ("--served-model-name 'open", "quotation"),
    ],
)
def test_a_mistake_is_one_message_that_says_what_would_be_right(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=r"vLLM arguments") as error:
        parse_vllm_args(text)
    assert words in str(error.value)


def test_nothing_pasted_is_nothing_set() -> None:
    assert parse_vllm_args("  ").settings == {}
