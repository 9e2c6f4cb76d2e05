"""Splitwise's batch timings: prompt and token time of whole models, each configuration measured five times.

The repeats tell the noise floor: what two measurements of the same thing differ by, below which no model can be judged.

Source: splitwise-sim @8f99e7d (Microsoft), MIT; Patel et al., ISCA'24.
"""

from __future__ import annotations

from pathlib import Path

from calibration.errors import CalibrationError
from calibration.tables import read_csv
from calibration.timed_steps.whole_steps import WholeSteps

LICENCE = "MIT"
SOURCE = "Splitwise (Patel et al., ISCA'24), splitwise-sim @8f99e7d"
GPUS = {"a100-80gb": "a100-sxm-80gb", "h100-80gb": "h100-sxm-80gb"}
"""The tables' names of GPUs and the catalogue's. `h100-80gb-pcap` (a lowered power limit) is in no catalogue."""
MODELS = {"llama-2-70b": "llama2-70b"}
"""The catalogue's names of models and the table's."""

KEYS = ["model", "hardware", "prompt_size", "batch_size", "token_size", "tensor_parallel"]
LEAST_REPEATS = 3


def noise_floor(path: Path) -> dict[str, dict[str, float]]:
    """Median and 95th percentile, over configurations, of the relative deviation of repeats from their median: by `prompt_time` and
    `token_time`. Raises: CalibrationError when nothing was repeated.
    """
    import numpy as np

    columns = ("prompt_time", "token_time")
    table = read_csv(path, (*KEYS, *columns), 10)
    groups = table.groupby(KEYS)
    counts = groups["token_time"].transform("size")
    repeated = table[counts >= LEAST_REPEATS]
    if repeated.empty:
        raise CalibrationError(
            f"{path}: no configuration was measured {LEAST_REPEATS} times; repeats are needed for a noise floor"
        )
    found = {}
    for column in columns:
        middle = repeated.groupby(KEYS)[column].transform("median")
        deviation = np.abs(repeated[column] / middle - 1)
        found[column] = {"median": float(deviation.median()), "p95": float(deviation.quantile(0.95))}
    return found


def read_steps(path: Path, model: str | None, gpu: str | None, ranks: int) -> WholeSteps:
    """Medians of the repeats of one model on one GPU: prompt steps, and decode steps at the mean context of their generation.

    Raises: CalibrationError for a model, GPU or tensor-parallel size that the table lacks; OSError.
    """
    table = read_csv(path, (*KEYS, "prompt_time", "token_time"), 10)
    names = {known: name for name, known in GPUS.items()}
    if model not in MODELS or gpu not in names:
        raise CalibrationError(
            f"{path}: choose one of its models and GPUs: --model {' or '.join(MODELS)}, --gpu {' or '.join(names)}; "
            f"{model or 'no model'} and {gpu or 'no GPU'} were given"
        )
    part = table[
        (table["model"] == MODELS[model]) & (table["hardware"] == names[gpu]) & (table["tensor_parallel"] == ranks)
    ]
    if part.empty:
        there = ", ".join(map(str, sorted(table["tensor_parallel"].unique())))
        raise CalibrationError(
            f"{path}: no rows of {model} on {gpu} for tensor-parallel size {ranks}; there are: {there}"
        )
    middle = (
        part.groupby(["prompt_size", "batch_size", "token_size"])[["prompt_time", "token_time"]].median().reset_index()
    )
    prompts = middle.groupby(["batch_size", "prompt_size"])["prompt_time"].median().reset_index()
    context = middle["prompt_size"] + middle["token_size"] / 2
    return WholeSteps(
        gpu=gpu,
        model=model,
        tensor_parallel_size=ranks,
        prompts=prompts[["batch_size", "prompt_size"]].to_numpy(float),
        prompt_us=prompts["prompt_time"].to_numpy(float) * 1e3,
        decodes=middle.assign(kv=context)[["batch_size", "kv"]].to_numpy(float),
        decode_us=middle["token_time"].to_numpy(float) * 1e3,
        measured=True,
        source=SOURCE,
        licence=LICENCE,
        engine="vLLM of 2023",
        device=names[gpu],
    )
