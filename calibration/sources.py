"""Which reader and which fit a folder of measurements needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .errors import CalibrationError
from .fit_gpu import fit_gpu_profile
from .fit_model import fit_model_profile
from .fit_run import fit_run_profile
from .readers import aiconfigurator, llmservingsim
from .step_log import is_step_run, read_run


def fit_source(
    folder: Path, *, tensor_parallel_size: int, date: str, command: str, gpu: str | None = None
) -> dict[str, Any]:
    """The profile fitted to `folder`: steps that we timed, kernel tables of one model (a `model` profile), or of a GPU (a `gpu` profile).

    `gpu` names the device of timed steps, where the catalogue does not know it by its product name.

    Raises: CalibrationError when it is neither, or when its tables cannot be used; ConfigError for an unknown model or GPU; OSError.
    """
    if not folder.is_dir():
        raise CalibrationError(f"{folder}: no such folder; a fit reads a folder of timed steps or of kernel tables")
    if is_step_run(folder):
        return fit_run_profile(read_run(folder), date=date, command=command, gpu=gpu)
    if (folder / "vllm").is_dir():
        return fit_gpu_profile(aiconfigurator.read_tables(folder), date=date, command=command)
    if (folder / "meta.yaml").is_file() or list(folder.glob("tp*")):
        source = llmservingsim.read_profile(folder, tensor_parallel_size)
        return fit_model_profile(source, date=date, command=command)
    raise CalibrationError(
        f"{folder}: not a folder of measurements that is known; known are runs of `kvtwin calibrate measure` (run.json), LLMServingSim "
        "kernel profiles (meta.yaml, tpN/*.csv) and aiconfigurator tables (SYSTEM/vllm/VERSION/*.parquet)"
    )
