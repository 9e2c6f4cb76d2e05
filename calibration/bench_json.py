"""The result file of `vllm bench serve --save-result --save-detailed` as a recorded run.

It holds TTFT, latencies between tokens and, from vLLM 0.10 on, start times. Arrays are in seconds, one value a request.

Source: vLLM `benchmarks/serve.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from sim.workload import read_trace

from .errors import CalibrationError
from .runs import RecordedRun
from .tent import Array

NEEDED = ("ttfts", "itls", "input_lens", "output_lens", "start_times")


def read_bench(path: Path) -> RecordedRun:
    """The run in a bench result file. Raises: CalibrationError for one without details or provenance; TraceError; OSError."""
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise CalibrationError(f"{path}: not JSON: {error}") from error
    missing = [name for name in NEEDED if not isinstance(document, dict) or not isinstance(document.get(name), list)]
    if missing:
        raise CalibrationError(
            f"{path}: no array {missing[0]!r}; run `vllm bench serve` with --save-result and --save-detailed, and vLLM 0.10 or later"
        )
    if not document.get("model_id"):
        raise CalibrationError(f"{path}: it does not say 'model_id'; a run of an unknown model cannot be judged")
    trace = read_trace(path)
    errors = document.get("errors") or [""] * len(document["ttfts"])
    good = [i for i, outputs in enumerate(document["output_lens"]) if outputs > 0 and not errors[i]]
    start = np.asarray(document["start_times"], dtype=np.float64)[good]
    order = np.argsort(start, kind="stable")
    ttft = np.asarray(document["ttfts"], dtype=np.float64)[good]
    decode = np.asarray([float(np.sum(document["itls"][i])) for i in good])
    outputs = np.asarray(document["output_lens"], dtype=np.float64)[good]
    if len(trace.requests) != len(good):
        raise CalibrationError(f"{path}: {len(good)} requests succeeded, {len(trace.requests)} were read")
    e2el = ttft + decode
    gaps = np.concatenate([np.asarray(document["itls"][i], dtype=np.float64) for i in good]) if good else np.zeros(0)
    return RecordedRun(
        name=path.stem,
        provenance=f"{document['model_id']} on {document.get('backend', document.get('endpoint_type', '?'))}, {document.get('date', '?')}",
        requests=trace.requests,
        ttft_s=ttft[order],
        tpot_s=np.where(outputs > 1, decode / np.maximum(outputs - 1, 1), np.nan)[order],
        e2el_s=e2el[order],
        finished_s=(start - start.min() + e2el)[order],
        itl_s=_statistics(gaps) if gaps.size else None,
        itl_gaps_s=tuple(np.asarray(document["itls"][good[i]], dtype=np.float64) for i in order.tolist())
        if gaps.size
        else None,
    )


def _statistics(values: Array) -> dict[str, float]:
    return {"mean": float(values.mean()), **{f"p{rank}": float(np.percentile(values, rank)) for rank in (50, 90, 99)}}
