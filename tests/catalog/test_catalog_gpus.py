"""GPUs: physical memory as engines see it, rates with their source, and the defaults that depend on the card."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from sim.catalog.gpus import GPU_ALIASES, GPUS, Budgets, default_budgets, gpu
from sim.core.config import ConfigError


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("h100-sxm-80gb", 79.19),
        ("rtx-4090-24gb", 23.5165),
        ("a100-sxm-80gb", 79.25),
        ("t4-16gb", 14.56),
        ("l4-24gb", 22.05),
    ],
)
def test_the_total_is_what_the_driver_reports_not_what_the_box_says(name: str, gib: float) -> None:
    assert gpu(name).total_gib == pytest.approx(gib, abs=1e-4)
    assert gpu(name).total_bytes < gpu(name).nominal_gb * 2**30


def test_totals_agree_with_the_start_up_logs(data_dir: Path) -> None:
    labels = {
        "RTX 4090": "rtx-4090-24gb",
        "RTX 3090": "rtx-3090-24gb",
        "T4 16GB": "t4-16gb",
        "RTX A6000": "rtx-a6000-48gb",
    }
    labels |= {"H100 80GB": "h100-sxm-80gb", "L4 24GB": "l4-24gb", "A100-40GB": "a100-sxm-40gb"}
    seen = set()
    with (data_dir / "memory" / "kv_capacity_logs.csv").open() as file:
        for row in csv.DictReader(file):
            # SGLang logs state free memory, not the total.
            if row["gpu"] in labels and row["gpu_mem_gib"] and row["engine"] == "vllm":
                assert gpu(labels[row["gpu"]]).total_gib == pytest.approx(float(row["gpu_mem_gib"]), rel=0.003)
                seen.add(row["gpu"])
    assert seen == set(labels)


@pytest.mark.parametrize("name", sorted(GPUS))
def test_an_entry_is_plausible_and_says_where_it_comes_from(name: str) -> None:
    card = GPUS[name]
    assert 0.88 < card.total_gib / card.nominal_gb <= 1.0
    assert 2e11 < card.memory_bandwidth_bytes_per_s < 1e13
    assert card.fp8_flops_per_s is None or card.fp8_flops_per_s == pytest.approx(2 * card.bf16_flops_per_s, rel=0.02)
    assert card.link_bytes_per_s >= card.pcie_bytes_per_s
    assert card.source
    assert set(card.unverified) <= set(card.__dataclass_fields__)


@pytest.mark.parametrize(
    ("alias", "name"), [("h100", "h100-sxm-80gb"), ("A100-80GB", "a100-sxm-80gb"), ("RTX 4090", "rtx-4090-24gb")]
)
def test_aliases_find_their_gpu(alias: str, name: str) -> None:
    assert gpu(alias) is GPUS[name]


def test_every_alias_names_a_gpu() -> None:
    assert set(GPU_ALIASES.values()) <= set(GPUS)


def test_a_misspelt_gpu_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="unknown GPU 'h100-smx-80gb'.*h100-sxm-80gb"):
        gpu("h100-smx-80gb")


@pytest.mark.parametrize(
    ("name", "tokens", "seqs"),
    [
        ("h100", 8192, 1024),
        ("h200", 8192, 1024),
        ("b200", 8192, 1024),
        ("a100-80gb", 2048, 256),
        ("rtx-4090", 2048, 256),
        ("l40s", 2048, 256),
    ],
)
def test_large_gpus_other_than_the_a100_get_the_large_budgets(name: str, tokens: int, seqs: int) -> None:
    assert default_budgets(gpu(name)) == Budgets(max_num_batched_tokens=tokens, max_num_seqs=seqs)


def test_a_gpu_without_bfloat16_falls_back_or_refuses() -> None:
    warnings: list[str] = []
    assert gpu("t4").usable_dtype("bfloat16", "auto", warnings) == "float16"
    assert len(warnings) == 1
    with pytest.raises(ConfigError, match="--dtype float16"):
        gpu("t4").usable_dtype("bfloat16", "bfloat16", warnings)
    assert gpu("h100").usable_dtype("bfloat16", "half", warnings) == "float16"
