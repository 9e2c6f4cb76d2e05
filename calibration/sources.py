"""Which reader and which fit a folder of measurements needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .errors import CalibrationError
from .fit_gpu import fit_gpu_profile
from .fit_model import fit_model_profile
from .readers import aiconfigurator, llmservingsim


def fit_source(folder: Path, *, tensor_parallel_size: int, date: str, command: str) -> dict[str, Any]:
    """The profile fitted to `folder`: kernel tables of a GPU (a `gpu` profile) or of one model (a `model` profile).

    Raises: CalibrationError when it is neither, or when its tables cannot be used; ConfigError for an unknown model or GPU; OSError.
    """
    if not folder.is_dir():
        raise CalibrationError(f"{folder}: no such folder; a fit reads a folder of kernel tables")
    if (folder / "vllm").is_dir():
        return fit_gpu_profile(aiconfigurator.read_tables(folder), date=date, command=command)
    if (folder / "meta.yaml").is_file() or list(folder.glob("tp*")):
        source = llmservingsim.read_profile(folder, tensor_parallel_size)
        return fit_model_profile(source, date=date, command=command)
    raise CalibrationError(
        f"{folder}: not a folder of measurements that is known; known are LLMServingSim kernel profiles (meta.yaml, tpN/*.csv) "
        "and aiconfigurator tables (SYSTEM/vllm/VERSION/*.parquet)"
    )
