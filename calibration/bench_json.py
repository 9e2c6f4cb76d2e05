"""The result file of `vllm bench serve --save-result --save-detailed` as a recorded run.

It holds TTFT, latencies between tokens and, from vLLM 0.10 on, start times. Arrays are in seconds, one value a request.

Source: vLLM `benchmarks/serve.py`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sim.workload import read_trace

from .errors import CalibrationError
from .runs import RecordedRun
from .tent import Array
from .text_files import numbers, read_object

NEEDED = ("ttfts", "itls", "input_lens", "output_lens", "start_times")


def read_bench(path: Path) -> RecordedRun:
    """The run in a bench result file. Raises: CalibrationError for one without details or provenance; TraceError; OSError."""
    document = read_object(path)
    missing = [name for name in NEEDED if not isinstance(document.get(name), list)]
    if missing:
        raise CalibrationError(
            f"{path}: no array {missing[0]!r}; run `vllm bench serve` with --save-result and --save-detailed, and vLLM 0.10 or later"
        )
    if not document.get("model_id"):
        raise CalibrationError(f"{path}: it does not say 'model_id'; a run of an unknown model cannot be judged")
    count = len(document["ttfts"])
    for name in NEEDED:
        if len(document[name]) != count:
            raise CalibrationError(
                f"{path}: {name} has {len(document[name])} values and ttfts {count}; one a request is needed"
            )
    for name in ("ttfts", "start_times", "output_lens"):
        numbers(document[name], f"{path}: {name}", least=0.0)
    errors = document.get("errors") or [""] * len(document["ttfts"])
    for place, (gaps, outputs, error) in enumerate(
        zip(document["itls"], document["output_lens"], errors, strict=True), start=1
    ):
        if error or not outputs:
            continue  # what a failed request got is not looked at
        if not isinstance(gaps, list) or len(gaps) > outputs:
            raise CalibrationError(
                f"{path}: itls of request {place} is no list of the gaps between its {outputs} tokens"
            )
        numbers(gaps, f"{path}: itls of request {place}", least=0.0)
    trace = read_trace(path)
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
