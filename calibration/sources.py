"""Which reader and which fit a folder of measurements needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .errors import CalibrationError
from .fit_gpu import fit_gpu_profile
from .fit_model import fit_model_profile
from .fit_run import fit_run_profile
from .readers import aiconfigurator, distserve, llmservingsim, splitwise
from .step_log import is_step_run, read_run
from .text_files import begins_with
from .whole_steps import fit_whole_steps

KNOWN = (
    "runs of `kvtwin calibrate measure` (a folder with run.json), LLMServingSim kernel profiles (a folder with meta.yaml, tpN/*.csv), "
    "aiconfigurator tables (a folder SYSTEM/vllm/VERSION/*.parquet), DistServe's laws (profiler-*.json) and Splitwise's batch timings "
    "(perf_model.csv)"
)


def is_run(path: Path) -> bool:
    """Whether `path` is a recorded run of a server, whose requests correct a profile, and no table to fit one to."""
    if path.is_dir():
        return (path / "requests.jsonl").is_file()
    if path.suffix == ".json":
        return path.is_file() and not distserve.is_distserve(path)
    return path.suffix == ".csv" and path.is_file() and begins_with(path, "launch_time")


def fit_source(
    folder: Path,
    *,
    tensor_parallel_size: int,
    date: str,
    command: str,
    model: str | None = None,
    gpu: str | None = None,
) -> dict[str, Any]:
    """The profile fitted to `folder`: steps that we timed, kernel tables or whole steps of one model (a `model` profile), or kernel
    tables of a GPU (a `gpu` profile).

    `model` and `gpu` choose where a file holds several; `gpu` names the device of timed steps where the catalogue does not know it.

    Raises: CalibrationError when it is neither, or when its tables cannot be used;
    ConfigError for an unknown model or GPU; OSError.
    """
    if folder.is_file():
        if distserve.is_distserve(folder):
            steps = distserve.read_laws(folder, model, tensor_parallel_size)
        elif folder.suffix == ".csv":
            steps = splitwise.read_steps(folder, model, gpu, tensor_parallel_size)
        else:
            raise CalibrationError(f"{folder}: not a file of measurements that is known; known are {KNOWN}")
        return fit_whole_steps(steps, date=date, command=command)
    if not folder.is_dir():
        raise CalibrationError(f"{folder}: no such file or folder; known sources are {KNOWN}")
    if is_step_run(folder):
        return fit_run_profile(read_run(folder), date=date, command=command, gpu=gpu)
    if (folder / "vllm").is_dir():
        return fit_gpu_profile(aiconfigurator.read_tables(folder), date=date, command=command)
    if (folder / "meta.yaml").is_file() or list(folder.glob("tp*")):
        source = llmservingsim.read_profile(folder, tensor_parallel_size)
        return fit_model_profile(source, date=date, command=command)
    raise CalibrationError(f"{folder}: not a folder of measurements that is known; known are {KNOWN}")
