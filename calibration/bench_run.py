"""The result of a load generator as a recorded run: `vllm bench serve --save-result --save-detailed`.

Source: vLLM `benchmarks/serve.py`: `ttfts`, `itls` and `start_times` are in seconds, one entry a request; `itls` has one value a
chunk of the stream after the first.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from sim.workload import read_trace

from .errors import CalibrationError
from .runs import RecordedRun

ARRAYS = ("input_lens", "output_lens", "start_times", "ttfts", "itls")
PROVENANCE_KEYS = ("model_id", "date")


def read_bench_run(path: Path) -> RecordedRun:
    """The run in `path`, failed requests left out.

    Raises: CalibrationError when it does not say what was served and when, or lacks the detailed arrays; TraceError; OSError.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CalibrationError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise CalibrationError(f"{path}: not the result of `vllm bench serve`: it holds no object")
    for key in PROVENANCE_KEYS:
        if not document.get(key):
            raise CalibrationError(f"{path}: it does not say {key!r}; a run of unknown origin is not judged")
    for name in ARRAYS:
        if not isinstance(document.get(name), list):
            raise CalibrationError(
                f"{path}: array {name!r} is missing; run `vllm bench serve` with --save-result and --save-detailed"
            )
    trace = read_trace(path)
    kept = _succeeded(document)
    if len(trace.requests) != len(kept):
        raise CalibrationError(f"{path}: {len(kept)} requests succeeded, {len(trace.requests)} were read as requests")
    start = np.asarray([document["start_times"][i] for i in kept], dtype=np.float64)
    order = np.argsort(start, kind="stable")
    kept = [kept[i] for i in order.tolist()]
    arrival = start[order] - start.min()
    try:
        ttft = np.asarray([document["ttfts"][i] for i in kept], dtype=np.float64)
        gaps = [np.asarray(document["itls"][i], dtype=np.float64) for i in kept]
    except (TypeError, ValueError, IndexError) as error:
        raise CalibrationError(f"{path}: ttfts and itls must hold seconds, one entry a request: {error}") from error
    outputs = np.asarray([document["output_lens"][i] for i in kept], dtype=np.float64)
    decode = np.asarray([gap.sum() for gap in gaps])
    whole = np.concatenate(gaps) if gaps else np.zeros(0)
    return RecordedRun(
        name=path.stem,
        provenance=f"{document['model_id']} on {document.get('backend', 'a server')}, vllm bench serve, {document['date']}",
        requests=trace.requests,
        ttft_s=ttft,
        tpot_s=np.where(outputs > 1, decode / np.maximum(outputs - 1, 1), np.nan),
        e2el_s=ttft + decode,
        finished_s=arrival + ttft + decode,
        itl_s=_statistics(whole) if whole.size else None,
    )


def _succeeded(document: dict[str, Any]) -> list[int]:
    """Requests without an error text and with output, as the trace's reader keeps them."""
    count = len(document["input_lens"])
    errors = document.get("errors")
    if not (isinstance(errors, list) and len(errors) == count):
        errors = [""] * count
    return [i for i in range(count) if not errors[i] and document["output_lens"][i]]


def _statistics(values: Any) -> dict[str, float]:
    return {"mean": float(values.mean()), **{f"p{rank}": float(np.percentile(values, rank)) for rank in (50, 90, 99)}}
