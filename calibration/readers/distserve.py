"""DistServe's fitted step times: laws of a prompt step and a decode step of OPT models on A100-80G, in milliseconds.

    prompt step = a + b * tokens + c * (sum of squared prompt lengths)
    decode step = a + b * (sum of context tokens) + c * sequences         one law below a batch size, one from it on

The laws are fits by their authors; the measurements behind them were not published, so no error of theirs is known here.

Source: DistServe (Zhong et al., OSDI'24) @82831f1, `profiler-a100-80g.*.json`, Apache-2.0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from calibration.errors import CalibrationError
from calibration.text_files import begins_with, read_object
from calibration.whole_steps import WholeSteps

LICENCE = "Apache-2.0"
SOURCE = "DistServe (Zhong et al., OSDI'24) @82831f1"
GPU = "a100-sxm-80gb"
LAWS = ("prefill", "decoding_smallbs", "decoding_largebs")
THRESHOLD = "decoding_large_small_bs_threshold"
PROMPTS = (512, 768, 1024, 1536, 2048)
"""Prompt lengths at which the law is read: OPT reaches 2,048 tokens."""
TOGETHER = (1, 2, 4)
"""Prompts of a step."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 94, 95, 128, 192, 256)
CONTEXTS = (64, 256, 512, 1024, 2048)


def is_distserve(path: Path) -> bool:
    """Whether a file looks like one of these, whatever is wrong with it."""
    return path.suffix == ".json" and begins_with(path, "decoding")


def read_laws(path: Path, model: str | None, ranks: int) -> WholeSteps:
    """The laws of one model and tensor-parallel size, read at the shapes above.

    Raises: CalibrationError for a model or size that is not in the file, or laws without their coefficients; OSError.
    """
    data = read_object(path)
    names = {name.rpartition("/")[2]: name for name in data}
    if model is None or model.rpartition("/")[2] not in names:
        raise CalibrationError(
            f"{path}: {'no model is chosen' if model is None else f'no model {model!r}'}; it holds {', '.join(names)} (--model)"
        )
    sizes = data[names[model.rpartition("/")[2]]]
    if str(ranks) not in sizes:
        raise CalibrationError(
            f"{path}: no laws of {model} for tensor-parallel size {ranks}; there are: {', '.join(sizes)}"
        )
    laws = sizes[str(ranks)]
    _check(laws, f"{path}: {model}, tensor-parallel size {ranks}")
    prompts = np.asarray([(many, length) for many in TOGETHER for length in PROMPTS], dtype=np.float64)
    decodes = np.asarray([(batch, kv) for batch in BATCHES for kv in CONTEXTS], dtype=np.float64)
    a, b, c = laws["prefill"]
    many, length = prompts.T
    small = np.asarray(laws["decoding_smallbs"])
    large = np.asarray(laws["decoding_largebs"])
    batch, kv = decodes.T
    law = np.where((batch < laws[THRESHOLD])[:, None], small, large)
    engine = path.name.split(".")[-2]
    return WholeSteps(
        gpu=GPU,
        model=model.rpartition("/")[2],
        tensor_parallel_size=ranks,
        prompts=prompts,
        prompt_us=(a + b * many * length + c * many * length**2) * 1e3,
        decodes=decodes,
        decode_us=(law[:, 0] + law[:, 1] * batch * kv + law[:, 2] * batch) * 1e3,
        measured=False,
        source=f"{SOURCE}, {path.name}",
        licence=LICENCE,
        engine={"vllm": "vLLM of 2023", "distserve": "DistServe"}.get(engine, engine),
        device="NVIDIA A100-SXM4-80GB",
    )


def _check(laws: Any, where: str) -> None:
    for name in LAWS:
        if not isinstance(laws.get(name), list) or len(laws[name]) != 3 or min(laws[name]) < 0:
            raise CalibrationError(
                f"{where}: {name!r} must be three coefficients of at least 0, it is {laws.get(name)!r}"
            )
    if not isinstance(laws.get(THRESHOLD), int | float):
        raise CalibrationError(f"{where}: {THRESHOLD!r} is missing: from which batch on the second law holds")
