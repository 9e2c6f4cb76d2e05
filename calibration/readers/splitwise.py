"""Splitwise's batch timings: prompt and token time of whole models, each configuration measured five times.

The repeats tell the noise floor: what two measurements of the same thing differ by, below which no model can be judged.

Source: splitwise-sim @8f99e7d (Microsoft), MIT; Patel et al., ISCA'24.
"""

from __future__ import annotations

from pathlib import Path

from calibration.errors import CalibrationError
from calibration.tables import read_csv

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
