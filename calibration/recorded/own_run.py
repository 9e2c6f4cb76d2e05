"""A run of this project's own executor as a recorded run: the out folder of `kvtwin run --executor torch --out DIR`.

Its requests are drawn again from the scenario it records, and must be those of its `requests.csv`: only so the twin gets the
same prompts, prefixes and clients.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from calibration.errors import CalibrationError
from calibration.numerics.tent import Array
from calibration.tables import checked, read_csv
from calibration.text_files import check_keys, read_object, read_text
from sim.assembly import build_workload, engine_config
from sim.core.request import RequestSpec
from sim.preset_settings import settings_of
from sim.resolve import resolve
from sim.scenario import Scenario
from sim.scenario_errors import ScenarioError
from sim.scenario_tables import TABLES
from sim.sequences import sequences

from .runs import RecordedRun
from .twin import state_at

SCHEMA_VERSION = 1
REQUEST_COLUMNS = ("arrival_s", "input_tokens", "output_tokens_requested", "outcome")
TIME_COLUMNS = ("ttft_s", "tpot_s", "e2el_s", "finished_s", "scheduled_s")
TIMELINE_COLUMNS = ("time_s", "duration_s", "running", "waiting", "used_blocks")
TICKS = 400
"""Moments at which trajectories are compared."""
SUMMARY_KEYS = ("scenario", "num_gpu_blocks", "itl_s", "num_preemptions")
PROVENANCE_KEYS = ("kvtwin_version", "date")


def read_own_run(folder: Path) -> RecordedRun:
    """The run in `folder`.

    Raises: CalibrationError when it is a simulation, has no provenance, another schema version, missing columns, or requests that are
    not those of its scenario; OSError.
    """
    summary = read_object(folder / "summary.json")
    if "executors" not in summary:
        raise CalibrationError(
            f"{folder}: nothing was measured in this run, it is a simulation; run it with --executor torch"
        )
    if summary.get("schema_version") != SCHEMA_VERSION:
        raise CalibrationError(
            f"{folder}: its summary has schema version {summary.get('schema_version')!r}, this version of kvtwin reads {SCHEMA_VERSION}"
        )
    check_keys(summary, SUMMARY_KEYS, str(folder / "summary.json"))
    if not (folder / "provenance.json").is_file():
        raise CalibrationError(f"{folder}: no provenance.json; a run on an unknown device is not judged")
    provenance = read_object(folder / "provenance.json")
    missing = [key for key in PROVENANCE_KEYS if not provenance.get(key)]
    if missing:
        raise CalibrationError(
            f"{folder / 'provenance.json'}: it does not say {missing[0]!r}; a run of unknown origin is not judged"
        )
    scenario = _scenario(summary["scenario"], folder).with_(num_gpu_blocks_override=int(summary["num_gpu_blocks"]))
    specs = _requests(scenario, folder)
    table = read_csv(folder / "requests.csv", REQUEST_COLUMNS)
    _check_same(specs, table, folder)
    finished = (table["outcome"] == "finished").to_numpy()

    def times(name: str) -> Any:
        checked(table[finished], (name,), str(folder / "requests.csv"), 0, gaps=True)
        return np.where(finished, table[name].to_numpy(float), np.nan)

    columns = {name: times(name) for name in TIME_COLUMNS}
    if not finished.any():
        raise CalibrationError(f"{folder}: none of its {len(specs)} requests finished; there is nothing to compare")
    start = min(spec.arrival_s for spec in specs)
    rows = read_csv(folder / "timeline.csv", TIMELINE_COLUMNS)
    timeline = {name: rows[name].to_numpy(float) for name in TIMELINE_COLUMNS}
    ticks = np.linspace(start, float(np.nanmax(columns["finished_s"])), TICKS, endpoint=False)
    machine = next((one.get("machine") for one in summary["executors"]), None)
    if not machine:
        raise CalibrationError(
            f"{folder / 'summary.json'}: it does not say on which machine it ran; a run of unknown origin is not judged"
        )
    return RecordedRun(
        name=folder.name,
        provenance=(
            f"{summary['scenario']['model']['model']} on {machine.get('device_name', '?')}, kvtwin {provenance['kvtwin_version']}, "
            f"torch {machine.get('torch', '?')}, {provenance['date']}"
        ),
        requests=specs,
        ttft_s=columns["ttft_s"],
        tpot_s=columns["tpot_s"],
        e2el_s=columns["e2el_s"],
        finished_s=columns["finished_s"],
        scheduled_s=columns["scheduled_s"],
        ticks_s=ticks,
        trajectories=state_at(timeline, ticks, summary["num_gpu_blocks"]),
        itl_s={name: float(value) for name, value in summary["itl_s"].items() if name in ("mean", "p50", "p90", "p99")},
        itl_gaps_s=_gaps(folder / "itl.csv", specs),
        num_preemptions=int(summary["num_preemptions"]),
        preemptions=table["preemptions"].to_numpy(int) if "preemptions" in table.columns else None,
        scenario=scenario,
        conditions={
            "clock": provenance.get("clock"),
            **{key: machine.get(key) for key in ("threads", "device_name")},
        },
    )


def _gaps(path: Path, specs: Sequence[RequestSpec]) -> tuple[Array, ...] | None:
    """Every gap between tokens, by request; None for a folder of an earlier kvtwin, which kept none.

    Raises: CalibrationError for a gap that is no time.
    """
    if not path.is_file():
        return None
    table = csv.DictReader(io.StringIO(read_text(path)))
    for column in ("request_id", "itl_s"):
        if column not in (table.fieldnames or ()):
            raise CalibrationError(
                f"{path}: column {column!r} is missing; it has {', '.join(table.fieldnames or ()) or 'none'}"
            )
    rows = {row["request_id"]: row["itl_s"] for row in table}
    try:
        found = {name: np.asarray(text.split(), dtype=np.float64) for name, text in rows.items()}
    except (AttributeError, ValueError) as error:
        raise CalibrationError(f"{path}: column 'itl_s' holds seconds, separated by spaces: {error}") from error
    if any(not (np.isfinite(gaps).all() and (gaps >= 0).all()) for gaps in found.values()):
        raise CalibrationError(
            f"{path}: column 'itl_s' holds a gap that is no time; gaps are finite and at least 0 seconds"
        )
    return tuple(found.get(spec.request_id, np.zeros(0)) for spec in specs)


def _scenario(tables: Mapping[str, Mapping[str, Any]], folder: Path) -> Scenario:
    """What was run, as a simulation: the same but for what carries out the steps. What equals its default counts as not given, but for
    what a preset may have otherwise by itself.
    """
    given: dict[str, dict[str, Any]] = {name: {} for name in tables}
    decided = settings_of(str(tables.get("policy", {}).get("policy", "vllm-v1")))
    for name, keys in tables.items():
        fields = TABLES[name].model_fields if name in TABLES else {}
        for key, value in keys.items():
            meant = math.inf if value == "inf" else value
            if meant is not None and not (key in fields and meant == fields[key].default and key not in decided):
                given[name][key] = meant
    given["run"] = {key: value for key, value in given["run"].items() if key not in ("executor", "device")}
    try:
        return Scenario(**given)
    except ScenarioError as error:
        raise CalibrationError(f"{folder / 'summary.json'}: its scenario cannot be read: {error}") from error


def _requests(scenario: Scenario, folder: Path) -> tuple[RequestSpec, ...]:
    """The requests that the scenario sends, drawn again."""
    trace = scenario.workload.trace
    if trace is not None and not Path(trace).is_file():
        raise CalibrationError(f"{folder}: its requests came from {trace}, which is not there; the twin needs it")
    resolved = resolve(scenario)
    return tuple(sequences(resolved.tables, engine_config(resolved), build_workload(resolved).requests))


def _check_same(specs: Sequence[RequestSpec], table: Any, folder: Path) -> None:
    ours = [(spec.input_tokens, spec.output_tokens) for spec in specs]
    theirs = list(zip(table["input_tokens"].astype(int), table["output_tokens_requested"].astype(int), strict=True))
    arrivals = np.asarray([spec.arrival_s for spec in specs])
    if ours != theirs or np.abs(arrivals - table["arrival_s"].to_numpy(float)).max() > 1e-9:
        raise CalibrationError(
            f"{folder}: its {len(theirs)} requests are not those that its scenario sends ({len(ours)}); another version of kvtwin or "
            "of its trace drew them"
        )
