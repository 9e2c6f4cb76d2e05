"""Recorded runs of real servers: what each request got, and what the engine logged over time. Those of this project are `own_run`'s.

Source of the formats: LLMServingSim 2 (`requests.jsonl`, `timeseries.csv`, `meta.json`), llm-d-benchmark (one CSV a rate).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from calibration.errors import CalibrationError
from calibration.measuring.step_log import is_step_run
from calibration.numerics.tent import Array
from calibration.tables import read_csv
from calibration.text_files import check_keys, numbers, parse_object, read_object, read_text
from sim.core.request import RequestSpec
from sim.scenario import Scenario
from sim.workload import read_trace

TIMES = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
TRAJECTORY_COLUMNS = ("t", "running", "waiting", "kv_cache_pct")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """A run that was measured. Times in seconds from the first request's arrival at the engine; arrays `[requests]`."""

    name: str
    provenance: str
    """What served it, as the run's own files say."""
    requests: tuple[RequestSpec, ...]
    """In order of arrival."""
    ttft_s: Array
    tpot_s: Array
    """NaN where there was only one token."""
    e2el_s: Array
    finished_s: Array
    scheduled_s: Array | None = None
    """When each request was first scheduled, where that was recorded."""
    ticks_s: Array | None = None
    """Times of the engine's log lines `[ticks]`, on the requests' clock."""
    trajectories: Mapping[str, Array] = field(default_factory=dict)
    """`running`, `waiting`, and `kv_usage` (a share) where it was recorded, `[ticks]`."""
    itl_s: Mapping[str, float] | None = None
    """Inter-token latency over all tokens, by statistic (`mean`, `p50`, `p90`, `p99`), where it was recorded."""
    itl_gaps_s: tuple[Array, ...] | None = None
    """The same, gap by gap, for each request (none for one that did not finish), where each was recorded."""
    num_preemptions: int | None = None
    """Preemptions, where they were counted."""
    preemptions: npt.NDArray[np.int_] | None = None
    """The same by request, where that was recorded."""
    scenario: Scenario | None = None
    """What was run, where the run says so: that of its twin, but for the prices."""
    conditions: Mapping[str, Any] = field(default_factory=dict)
    """Under what its steps were timed, as far as it says: `clock`, `threads`, `device_name`."""

    @property
    def makespan_s(self) -> float:
        """From the first arrival to the last token."""
        return float(np.nanmax(self.finished_s))

    @property
    def finished(self) -> npt.NDArray[np.bool_]:
        """Which requests finished; the times of the others are NaN."""
        return np.asarray(np.isfinite(self.e2el_s))


def read_run(path: Path, prefixes: Path | None = None) -> RecordedRun:
    """The run in the out folder of `kvtwin run --executor torch`, in a folder with `requests.jsonl` and `meta.json`, in the JSON
    of `vllm bench serve`, or in an llm-d CSV.

    `prefixes` is a `lengths.csv` of the same requests, whose prefix hits they get. Raises: CalibrationError for a run without
    provenance, or whose prefixes are another workload's; TraceError for an unreadable file; OSError.
    """
    if (path / "summary.json").is_file():
        from .own_run import read_own_run

        return read_own_run(path)
    if path.is_dir() and is_step_run(path):
        raise CalibrationError(f"{path}: it holds timed steps, not a served run; `kvtwin calibrate fit` reads it")
    if path.is_dir() and (path / "requests.jsonl").is_file():
        return _llmservingsim(path, prefixes)
    if path.suffix == ".csv":
        return _llm_d(path)
    if path.suffix == ".json":
        from .bench_json import read_bench

        return read_bench(path)
    raise CalibrationError(
        f"{path}: not a recorded run; the out folder of `kvtwin run --executor torch`, a folder with requests.jsonl and meta.json, "
        "an llm-d CSV, or a vLLM bench JSON, is"
    )


def _llmservingsim(folder: Path, prefixes: Path | None) -> RecordedRun:
    meta_path = folder / "meta.json"
    if not meta_path.is_file():
        raise CalibrationError(f"{folder}: no meta.json; a run of unknown engine and settings cannot be judged")
    meta = read_object(meta_path)
    path = folder / "requests.jsonl"
    rows = [
        parse_object(text, f"{path}:{line}") for line, text in enumerate(read_text(path).splitlines(), start=1) if text
    ]
    if not rows:
        raise CalibrationError(f"{path}: it has no rows; one JSON object a request is needed")
    for line, row in enumerate(rows, start=1):
        check_keys(row, TIMES, f"{path}:{line}")
        for key in TIMES:
            numbers(row[key], f"{path}:{line}: {key}")
    specs = _specs(folder, rows, prefixes)
    start = min(row["queued_ts"] for row in rows)
    order = sorted(range(len(rows)), key=lambda i: rows[i]["queued_ts"])
    rows = [rows[i] for i in order]
    requests = tuple(replace(specs[i], arrival_s=rows[place]["queued_ts"] - start) for place, i in enumerate(order))
    queued, scheduled, first, last = (
        np.asarray([row[key] for row in rows]) - start
        for key in ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
    )
    outputs = np.asarray([row["output_toks"] for row in rows], dtype=np.float64)
    ticks, trajectories = _timeseries(folder / "timeseries.csv", rows, meta)
    return RecordedRun(
        name=folder.name,
        provenance=f"{meta.get('model', '?')} on vLLM {meta.get('vllm_version', '?')}, started {meta.get('started_at', '?')}",
        requests=requests,
        ttft_s=first - queued,
        tpot_s=np.where(outputs > 1, (last - first) / np.maximum(outputs - 1, 1), np.nan),
        e2el_s=last - queued,
        finished_s=last,
        scheduled_s=scheduled,
        ticks_s=ticks,
        trajectories=trajectories,
    )


def _specs(folder: Path, rows: Sequence[Mapping[str, Any]], prefixes: Path | None) -> list[RequestSpec]:
    """The requests in the file's order, with content from `prefixes` if given."""
    if prefixes is None:
        by_id = {spec.request_id: spec for spec in read_trace(folder / "requests.jsonl").requests}
        return [by_id[str(row["request_id"])] for row in rows]
    known = read_trace(prefixes).requests
    lengths = [(int(row["input_toks"]), int(row["output_toks"])) for row in rows]
    if [(spec.input_tokens, spec.output_tokens) for spec in known] != lengths:
        raise CalibrationError(f"{prefixes}: its lengths are not those of {folder / 'requests.jsonl'}, row by row")
    return [replace(spec, request_id=str(row["request_id"])) for spec, row in zip(known, rows, strict=True)]


def _timeseries(
    path: Path, rows: Sequence[Mapping[str, Any]], meta: Mapping[str, Any]
) -> tuple[Array | None, dict[str, Array]]:
    if not path.is_file():
        return None, {}
    table = read_csv(path, TRAJECTORY_COLUMNS, 2)
    # The log counts from the start of the run; requests are stamped by another clock. `arrival_time` is on both.
    try:
        started = datetime.fromisoformat(str(meta.get("started_at")).replace("Z", "+00:00")).timestamp()
    except ValueError as error:
        raise CalibrationError(
            f"{path.parent / 'meta.json'}: started_at is {meta.get('started_at')!r}; a date and time is needed to place {path.name}"
        ) from error
    lead = min(row["arrival_time"] for row in rows) - started
    found = {name: table[name].to_numpy(float) for name in ("running", "waiting")}
    kv = table["kv_cache_pct"].to_numpy(float) / 100
    if kv.max() > 0:  # 0 throughout means that it was not recorded
        found["kv_usage"] = kv
    return table["t"].to_numpy(float) - lead, found


def _llm_d(path: Path) -> RecordedRun:
    columns = ("prompt_tokens", "generation_tokens", "ttft", "generation_time", "launch_time", "finish_time")
    table = read_csv(path, columns, 2)
    table = table[table["ttft"] > 0].sort_values("launch_time", kind="stable")  # others failed
    trace = read_trace(path)
    if len(trace.requests) != len(table):
        raise CalibrationError(f"{path}: {len(table)} rows succeeded, {len(trace.requests)} were read as requests")
    start = float(table["launch_time"].iloc[0])
    outputs = table["generation_tokens"].to_numpy(float)
    decode = table["generation_time"].to_numpy(float)
    return RecordedRun(
        name=path.stem,
        provenance="vLLM (about 0.8.5), llm-d-benchmark history",
        requests=trace.requests,
        ttft_s=table["ttft"].to_numpy(float),
        tpot_s=np.where(outputs > 1, decode / np.maximum(outputs - 1, 1), np.nan),
        e2el_s=(table["finish_time"] - table["launch_time"]).to_numpy(float),
        finished_s=table["finish_time"].to_numpy(float) - start,
    )
