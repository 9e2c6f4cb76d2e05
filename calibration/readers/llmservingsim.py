"""Kernel profiles of LLMServingSim 2: one layer of one model on one card, measured eager, in microseconds.

A profile is a folder with `meta.yaml` and, for each tensor-parallel size, `tpN/{dense,attention,per_sequence}.csv` and
sometimes `skew.csv` (attention of batches whose contexts differ). It holds no communication and no host time.

Source: LLMServingSim 2 (KAIST CASYS), MIT.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from calibration.errors import CalibrationError
from calibration.tables import read_csv
from calibration.text_files import read_text

if TYPE_CHECKING:
    import pandas as pd

LICENCE = "MIT"
SOURCE = "LLMServingSim 2 (KAIST CASYS) kernel profiles, github.com/casys-kaist/LLMServingSim @5daddb2"
LEAST_ROWS = {"dense": 50, "attention": 200, "per_sequence": 10, "skew": 100}
"""Fewer rows cannot fill the tables that are fitted to them."""
ONCE = ("embedding", "final_layernorm")
"""Dense operators that a step runs once; all others run once a layer, `layernorm` twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelProfile:
    """One folder, read and checked."""

    folder: Path
    meta: dict[str, str]
    """Top-level lines of `meta.yaml`: gpu, model, vllm_version, profiled_at …"""
    tensor_parallel_size: int
    dense: pd.DataFrame
    """layer, tokens, time_us"""
    attention: pd.DataFrame
    """prefill_chunk, kv_prefill, n_decode, kv_decode, time_us: one layer, uniform contexts"""
    per_sequence: pd.DataFrame
    """layer (lm_head, sampler), sequences, time_us"""
    skew: pd.DataFrame | None
    """regime (pure, mixed), n, kv_big, kv_mean, t_mean_us, t_max_us, t_skew_us …"""


def read_profile(folder: Path, tensor_parallel_size: int = 1) -> KernelProfile:
    """The profile in `folder` for one tensor-parallel size.

    Raises: CalibrationError when provenance (`meta.yaml` with gpu, model and vllm_version), a table or a column is missing; OSError.
    """
    meta = read_meta(folder / "meta.yaml")
    tables = folder / f"tp{tensor_parallel_size}"
    if not tables.is_dir():
        there = ", ".join(sorted(path.name for path in folder.glob("tp*"))) or "none"
        raise CalibrationError(
            f"{folder}: no tables for tensor-parallel size {tensor_parallel_size}; there are: {there}"
        )
    time = ("time_us",)
    return KernelProfile(
        folder=folder,
        meta=meta,
        tensor_parallel_size=tensor_parallel_size,
        dense=read_csv(tables / "dense.csv", ("layer", "tokens", *time), LEAST_ROWS["dense"]),
        attention=read_csv(
            tables / "attention.csv",
            ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", *time),
            LEAST_ROWS["attention"],
        ),
        per_sequence=read_csv(tables / "per_sequence.csv", ("layer", "sequences", *time), LEAST_ROWS["per_sequence"]),
        skew=_skew(tables / "skew.csv"),
    )


def read_meta(path: Path) -> dict[str, str]:
    """The top-level `key: value` lines of a `meta.yaml`. Raises: CalibrationError without gpu, model or vllm_version."""
    if not path.is_file():
        raise CalibrationError(
            f"{path}: missing; without it nobody can say what was measured, so the tables are refused"
        )
    lines = re.findall(r"^(\w+):[ \t]*(\S.*?)[ \t]*$", read_text(path), flags=re.MULTILINE)
    meta = {key: value.strip("'\"") for key, value in lines}
    for key in ("gpu", "model", "vllm_version"):
        if key not in meta:
            raise CalibrationError(f"{path}: it does not say {key!r}; a profile needs its provenance")
    return meta


def _skew(path: Path) -> pd.DataFrame | None:
    if not path.is_file():
        return None
    columns = ("regime", "n", "pc", "kv_big", "kv_mean", "t_mean_us", "t_max_us", "t_skew_us")
    return read_csv(path, columns, LEAST_ROWS["skew"])
