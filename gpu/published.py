"""Published kernel timings, to set beside measured ones: NVIDIA's aiconfigurator tables, when they are there.

They are measurements made by others (Apache-2.0, NVIDIA): named as such wherever they are shown.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .require import MissingExtraError, require


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedTime:
    """One published decode attention timing."""

    batch_size: int
    context_tokens: int
    """KV length of every sequence."""
    kv_cache_dtype: str
    microseconds: float
    source: str
    """Kernel, engine and version, device, and who measured."""


_FA3 = "vllm_flash_attn_fa3, VLLM 0.24.0, {}, measured by NVIDIA"
_FEW = {
    "NVIDIA H200": {(64, 8192): 490.8, (128, 4096): 492.6, (16, 8192): 150.6, (1, 8192): 18.9},
    "NVIDIA H100 80GB HBM3": {(64, 8192): 688.2, (128, 4096): 689.8, (16, 8192): 210.9, (1, 8192): 19.8},
}
FEW_TIMES = tuple(
    PublishedTime(
        batch_size=batch_size,
        context_tokens=tokens,
        kv_cache_dtype="bfloat16",
        microseconds=microseconds,
        source=_FA3.format(device),
    )
    for device, rows in _FEW.items()
    for (batch_size, tokens), microseconds in rows.items()
)
"""Of the tables the rows that decode attention is first compared with (32 query heads, 8 KV heads of 128), for a machine that does not have
them. **Source:** NVIDIA aiconfigurator 0.12, `generation_attention_perf`, Apache-2.0."""


def few_decode_times(device_name: str) -> list[PublishedTime]:
    """The few rows of one device that are known without the tables."""
    return [each for each in FEW_TIMES if f", {device_name}, " in each.source]


def decode_times(
    data_dir: Path, device_name: str, *, num_q_heads: int = 32, num_kv_heads: int = 8, head_dim: int = 128
) -> tuple[list[PublishedTime], str]:
    """Timings of decode attention without a window, for one head configuration on one GPU, and, when there are none, why.

    Args:
        data_dir: a folder with `kernels/aiconfigurator`.
        device_name: as torch and the tables name it, such as `NVIDIA H200`.
        num_q_heads: query heads of the configuration.
        num_kv_heads: KV heads of the configuration.
        head_dim: size of a head.
    """
    files = sorted((data_dir / "kernels" / "aiconfigurator").glob("*/vllm/*/generation_attention_perf.parquet"))
    if not files:
        return [], f"no published tables at {data_dir / 'kernels' / 'aiconfigurator'}"
    try:
        parquet = require("pyarrow.parquet", "reading the published tables")
    except MissingExtraError as error:
        return [], str(error).replace("kvtwin[gpu]", "kvtwin[silicon]")
    wanted = [
        ("num_heads", "=", num_q_heads),
        # a table writes 0, or the number of query heads, where every query head has its own KV head
        ("num_key_value_heads", "in", [num_kv_heads] if num_kv_heads < num_q_heads else [0, num_kv_heads]),
        ("head_dim", "=", head_dim),
    ]
    found: list[PublishedTime] = []
    for file in files:
        found += _times(parquet.read_table(file, filters=wanted).to_pylist(), device_name)
    return found, "" if found else f"the published tables have no {device_name}"


def _times(rows: Iterable[dict[str, Any]], device_name: str) -> list[PublishedTime]:
    """The rows of one device. `step` is the KV length before the new token, `latency` milliseconds."""
    return [
        PublishedTime(
            batch_size=int(row["batch_size"]),
            context_tokens=int(row["step"]) + int(row["isl"]),
            kv_cache_dtype=str(row["kv_cache_dtype"]),
            microseconds=1000 * float(row["latency"]),
            source=f"{row['kernel_source']}, {row['framework']} {row['version']}, {row['device']}, measured by NVIDIA",
        )
        for row in rows
        if row["device"] == device_name
        and row["beam_width"] == 1
        and not row.get("window_size")  # older tables have none
    ]


def nearest(
    times: Iterable[PublishedTime], batch_size: int, context_tokens: int, kv_cache_dtype: str
) -> PublishedTime | None:
    """The published timing of the same batch and format whose context is within 1 % of `context_tokens`, if there is one."""
    near = [
        each
        for each in times
        if each.batch_size == batch_size
        and each.kv_cache_dtype == kv_cache_dtype
        and abs(each.context_tokens - context_tokens) <= 0.01 * context_tokens
    ]
    return min(near, key=lambda each: abs(each.context_tokens - context_tokens), default=None)
