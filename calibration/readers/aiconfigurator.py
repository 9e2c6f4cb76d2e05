"""NVIDIA's kernel timing tables (aiconfigurator-core): GEMM, attention and all-reduce of one GPU under vLLM, in milliseconds.

Rows cover many head configurations and data types. Times become microseconds here. In the decode table `step` counts the
tokens cached before the step, so a decode reads `step + 1`.

Source: aiconfigurator-core systems data (NVIDIA), Apache-2.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from calibration.errors import CalibrationError
from calibration.tables import read_parquet

if TYPE_CHECKING:
    import pandas as pd

LICENCE = "Apache-2.0"
SOURCE = "aiconfigurator-core systems data (NVIDIA)"
GPU_NAMES = {
    "a100_sxm": "a100-sxm-80gb",
    "h100_sxm": "h100-sxm-80gb",
    "h200_sxm": "h200-sxm-141gb",
    "l40s": "l40s-48gb",
}
"""The tables' folders and the catalogue's names of their GPUs."""
PREFERRED = ("fa3", "flash_attn", "fiprefill", "fidecode", "triton")
"""Attention kernels as vLLM would pick them, by a part of their names."""
HEAD_DIM = 128
"""Head size whose rows are used: the one that the models in the catalogue share."""
LEAST_ROWS = 100
SHORT_BYTES = 4096
"""Messages that take no time but their start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTables:
    """The tables of one GPU, read and checked; latencies in microseconds, one row a configuration."""

    folder: Path
    gpu: str
    """Name in the catalogue."""
    device: str
    """Name as the tables have it."""
    engine: str
    """Engine and version whose kernels were timed."""
    gemm: pd.DataFrame
    """gemm_dtype, m, n, k, us"""
    prefill: pd.DataFrame
    """num_heads, num_key_value_heads, kv_cache_dtype, isl, us: one sequence, nothing cached"""
    decode: pd.DataFrame
    """num_heads, num_key_value_heads, kv_cache_dtype, batch_size, kv, us"""
    all_reduce: pd.DataFrame
    """num_gpus, message_size (bytes), us: inside a CUDA graph"""
    eager_call_us: float
    """A short collective called without a CUDA graph: what the host takes to launch one operation."""


def read_tables(folder: Path) -> KernelTables:
    """The tables under `folder` (`gpu/vllm/VERSION/*.parquet`, newest version). Raises: CalibrationError, OSError."""
    if folder.name not in GPU_NAMES:
        raise CalibrationError(f"{folder}: not a folder of kernel tables; known are {', '.join(GPU_NAMES)}")
    versions = sorted((folder / "vllm").glob("*/gemm_perf.parquet"))
    if not versions:
        raise CalibrationError(f"{folder}: no vllm/VERSION/gemm_perf.parquet in it")
    tables = versions[-1].parent
    raw = read_parquet(tables / "gemm_perf.parquet", ("device", "gemm_dtype", "m", "n", "k", "latency"), LEAST_ROWS)
    collectives = read_parquet(
        folder / "custom_allreduce_perf.parquet", ("num_gpus", "message_size", "backend", "latency"), 20
    )
    return KernelTables(
        folder=folder,
        gpu=GPU_NAMES[folder.name],
        device=str(raw["device"].iloc[0]),
        engine=f"vLLM {tables.name}",
        gemm=_best(raw, ["gemm_dtype", "m", "n", "k"]),
        prefill=_prefill(tables / "context_attention_perf.parquet"),
        decode=_decode(tables / "generation_attention_perf.parquet"),
        all_reduce=_best(collectives[collectives["backend"] == "vllm_graph"], ["num_gpus", "message_size"]),
        eager_call_us=_eager_call_us(collectives),
    )


def _prefill(path: Path) -> pd.DataFrame:
    keys = ["num_heads", "num_key_value_heads", "kv_cache_dtype", "isl"]
    table = _attention(read_parquet(path, [*keys, "head_dim", "batch_size", "kernel_source", "latency"], LEAST_ROWS))
    return _best(table[table["batch_size"] == 1], keys)


def _decode(path: Path) -> pd.DataFrame:
    keys = ["num_heads", "num_key_value_heads", "kv_cache_dtype", "batch_size"]
    table = _attention(read_parquet(path, [*keys, "head_dim", "step", "kernel_source", "latency"], LEAST_ROWS))
    return _best(table.assign(kv=table["step"] + 1), [*keys, "kv"])


def _eager_call_us(table: pd.DataFrame) -> float:
    """Median over messages of a few kB between two GPUs: the device takes 4 to 6 us of it, inside a graph."""
    short = table[
        (table["backend"] == "vllm_eager") & (table["num_gpus"] == 2) & (table["message_size"] <= SHORT_BYTES)
    ]
    return float(short["latency"].median()) * 1e3 if len(short) else 0.0


def _attention(table: pd.DataFrame) -> pd.DataFrame:
    """Rows of whole-context attention with the usual head size, of the kernel that vLLM would pick."""
    table = table[table["head_dim"] == HEAD_DIM]
    if "window_size" in table.columns:
        table = table[table["window_size"] == 0]
    rank = {
        name: next((place for place, part in enumerate(PREFERRED) if part in name), len(PREFERRED))
        for name in table["kernel_source"].unique()
    }
    ranked = table.assign(rank=table["kernel_source"].map(rank))
    best = ranked.groupby("kv_cache_dtype")["rank"].transform("min")
    return ranked[ranked["rank"] == best]


def _best(table: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """One row a configuration, the faster where several kernels were timed, in microseconds."""
    result: pd.DataFrame = (table.groupby(keys)["latency"].min() * 1e3).rename("us").reset_index()
    return result
