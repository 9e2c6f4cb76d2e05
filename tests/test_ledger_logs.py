"""The ledger against what real engines printed at start-up. No figure of a log goes in; its configuration does.

Tolerances are what the formulas reach today, stated plainly. The least certain line is non-torch memory, which differs by
a few tenths of a GiB between machines: it decides the error wherever the pool is small.
"""

from __future__ import annotations

import csv
import statistics
from pathlib import Path
from typing import Any

import pytest

from sim.catalog.gpus import gpu
from sim.catalog.models import model_shape
from sim.memory import Ledger, build_ledger
from sim.memory.activation import forward_peak
from sim.memory.releases import engine_release

GIB = 1 << 30


def h100_rows(data_dir: Path) -> list[dict[str, str]]:
    with (data_dir / "memory" / "vllm_0.19_h100_ledger.csv").open() as file:
        return list(csv.DictReader(file))


def predicted(row: dict[str, str]) -> Ledger:
    """The ledger of a row of the H100 table, from its configuration."""
    return build_ledger(
        row["model"],
        "h100-sxm-80gb",
        tensor_parallel_size=int(row["tp"]),
        pipeline_parallel_size=int(row["pp"]),
        max_model_len=int(row["max_model_len"]),
        gpu_memory_utilization=float(row["gpu_memory_utilization"]),
        kv_cache_dtype=row["kv_cache_dtype"],
        dtype="float32" if "float32" in row["note"] else "auto",
        quantization="fp8" if "runtime quantization fp8" in row["note"] else "auto",
        engine_version="0.19",
    )


def test_weights_are_within_a_rounding_digit_of_every_h100_row(data_dir: Path) -> None:
    rows = [row for row in h100_rows(data_dir) if row["weights_gib"]]
    assert len(rows) == 11
    for row in rows:
        assert predicted(row).line("weights").gib == pytest.approx(float(row["weights_gib"]), abs=0.006), row


def test_peak_activation_is_within_one_per_cent_of_every_h100_row_with_a_sampler(data_dir: Path) -> None:
    rows = [row for row in h100_rows(data_dir) if row["peak_activation_gib"] and row["pp"] == "1"]
    assert len(rows) == 11
    for row in rows:
        measured = float(row["peak_activation_gib"])
        assert predicted(row).line("peak_activation").gib == pytest.approx(measured, rel=0.01), row


@pytest.mark.parametrize(("stages", "measured_gib"), [(2, 1.10), (4, 1.05)])
def test_a_pipeline_stage_without_the_sampler_shows_the_forward_peak(stages: int, measured_gib: float) -> None:
    peak = forward_peak(
        model_shape("llama-3.1-8b"),
        gpu("h100"),
        engine_release("0.19"),
        tokens=8192,
        tensor_parallel_size=1,
        pipeline_parallel_size=stages,
        dtype="bfloat16",
        tuned=True,
    )
    assert peak.bytes / GIB == pytest.approx(measured_gib, rel=0.06)


def test_the_kv_pool_is_within_a_tenth_of_a_per_cent_of_every_h100_row(data_dir: Path) -> None:
    rows = [row for row in h100_rows(data_dir) if row["kv_gib"]]
    assert len(rows) == 5
    for row in rows:
        ledger = predicted(row)
        assert ledger.line("kv_pool").gib == pytest.approx(float(row["kv_gib"]), rel=0.001), row
        if row["kv_tokens"]:
            assert ledger.kv_tokens == pytest.approx(int(row["kv_tokens"]), rel=0.001), row


# Start-up logs with a configuration: blocks the engine reported, then what it ran with.
# The 256 sequences are the releases' default on these cards.
LOGS: list[tuple[str, int, str, str, dict[str, Any]]] = [
    ("RTX 4090, vLLM 0.19", 2588, "llama-3.1-8b", "rtx-4090-24gb",
     {"engine_version": "0.19", "max_num_batched_tokens": 2048, "max_model_len": 32768}),
    ("A100-40GB, vLLM 0.15.1, eager", 157936 // 16, "llama-3.1-8b", "a100-sxm-40gb",
     {"engine_version": "0.15.1", "max_num_batched_tokens": 8192, "enforce_eager": True}),
    ("L4, vLLM 0.7.3", 2356, "llama-3.1-8b", "l4-24gb", {"engine_version": "0.7.3", "max_num_batched_tokens": 2048}),
    ("RTX 3090, vLLM 0.6.4, 20k whole prompts", 1952, "llama-3.1-8b", "rtx-3090-24gb",
     {"engine_version": "0.6.4", "max_num_batched_tokens": 20000, "max_model_len": 20000}),
    ("RTX 3090, vLLM 0.6.4, 29k whole prompts", 1478, "llama-3.1-8b", "rtx-3090-24gb",
     {"engine_version": "0.6.4", "max_num_batched_tokens": 29000}),
    ("T4, vLLM 0.7.3", 5519, "qwen2.5-1.5b", "t4-16gb",
     {"engine_version": "0.7.3", "max_num_batched_tokens": 32768, "gpu_memory_utilization": 0.5}),
    ("H100, vLLM V0", 36184, "qwen3-0.6b", "h100-sxm-80gb",
     {"engine_version": "0.7", "max_num_batched_tokens": 2048, "gpu_memory_utilization": 0.8}),
    ("H100, vLLM 0.19", 476000 // 16, "llama-3.1-8b", "h100-sxm-80gb",
     {"engine_version": "0.19", "gpu_memory_utilization": 0.95, "max_num_seqs": 1024}),
    ("H100, vLLM 0.19", 1096000 // 16, "qwen2.5-7b", "h100-sxm-80gb",
     {"engine_version": "0.19", "gpu_memory_utilization": 0.95, "max_num_seqs": 1024}),
]  # fmt: skip


def block_error(blocks: int, model: str, card: str, settings: dict[str, Any]) -> float:
    ledger = build_ledger(model, card, **{"gpu_memory_utilization": 0.9, "max_num_seqs": 256, **settings})
    return ledger.num_gpu_blocks / blocks - 1


@pytest.mark.parametrize(("label", "blocks", "model", "card", "settings"), LOGS)
def test_blocks_are_predicted_from_the_configuration_alone(
    label: str, blocks: int, model: str, card: str, settings: dict[str, Any]
) -> None:
    assert abs(block_error(blocks, model, card, settings)) < 0.06, label


def test_the_median_error_of_predicted_blocks_is_at_most_two_per_cent() -> None:
    assert statistics.median(abs(block_error(*log[1:])) for log in LOGS) < 0.02


def test_the_saturated_run_is_sized_within_three_per_cent_where_the_naive_figure_is_a_third_too_high() -> None:
    label, blocks, model, card, settings = LOGS[0]
    assert abs(block_error(blocks, model, card, settings)) < 0.03, label
    naive = (0.9 * 24 * GIB - model_shape(model).weight_bytes()) / (131_072 * 16)
    assert naive / blocks - 1 == pytest.approx(0.31, abs=0.01)


def test_kv_bytes_agree_with_every_log_that_states_gib_and_tokens(data_dir: Path) -> None:
    names = {
        "meta-llama/Llama-3.1-8B": "llama-3.1-8b",
        "meta-llama/Meta-Llama-3.1-8B-Instruct": "llama-3.1-8b",
        "Llama-3.1-8B (14.9888 GB)": "llama-3.1-8b",
        "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
        "Qwen/Qwen2.5-1.5B-Instruct": "qwen2.5-1.5b",
        "Qwen3-0.6B": "qwen3-0.6b",
        "Qwen3-0.6B class (1.12 GiB)": "qwen3-0.6b",
        "Qwen3-30B-A3B quantised (E=128; inferred)": "qwen3-30b-a3b",
        "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B": "qwen3-8b",
        "meta-llama/Llama-3.1-70B-Instruct": "llama-3.1-70b",
        "mistralai/Mistral-Nemo-Instruct-2407": "mistral-nemo-12b",
        "Qwen/Qwen2.5-7B-Instruct": "qwen2.5-7b",
    }
    checked = 0
    with (data_dir / "memory" / "kv_capacity_logs.csv").open() as file:
        for row in csv.DictReader(file):
            if row["model"] not in names or not row["kv_gib"] or not int(row["kv_tokens"] or 0):
                continue
            per_token = model_shape(names[row["model"]]).kv_bytes_per_token(tensor_parallel_size=int(row["tp"]))
            implied = float(row["kv_gib"]) * GIB / int(row["kv_tokens"])
            assert implied == pytest.approx(per_token, rel=0.003), row
            checked += 1
    assert checked >= 12
