"""The embedded profiles against runs that others recorded, within the bars that the project set itself; and the judge."""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibration.errors import CalibrationError
from calibration.judging.judge import Judgement, Margins, judge
from calibration.judging.page import page
from calibration.judging.trajectories import DIFFERENT, EQUIVALENT
from calibration.recorded.runs import read_run
from calibration.recorded.twin import SimulatedRun, preempted, simulate_requests
from experiments.build_profiles import fitted_cards, fitted_gpus
from experiments.cli import main
from experiments.published.cliff import A100_CALIBRATED_ON, queueing_pool, rates_of, two_rates_correction
from experiments.published.exp0_sessions import with_sessions
from experiments.published.profile_sources import (
    A100,
    CARDS,
    GPU_TABLES,
    MODEL_PROFILES,
    PREFIXES,
    RTX_4090,
    RTX_PRO_6000,
    RUNS,
    Case,
)
from experiments.published.silicon import errors
from sim.costs.fitted import FOLDER, profile_names
from sim.costs.profile_file import read_profile
from tests.support.pages import loads_nothing
from tests.support.refusals import Refusals


def judged(data_dir: Path, case: Case) -> Judgement:
    run = read_run(data_dir / RUNS / case.run, data_dir / PREFIXES)
    return judge(run, simulate_requests(case.scenario(profile=case.profile), run.requests))


@pytest.fixture(scope="module")
def pressed(data_dir: Path) -> Judgement:
    return judged(data_dir, RTX_4090)


@pytest.fixture(scope="module")
def unpressed(data_dir: Path) -> Judgement:
    return judged(data_dir, RTX_PRO_6000)


def error_of(judgement: Judgement, name: str) -> float:
    return abs(next(metric.error for metric in judgement.metrics if metric.name == name))


# ── L1 ───────────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("name", profile_names())
def test_l1_held_out_kernel_points(name: str) -> None:
    """Median 5 %, 95th percentile 15 %, held-out axes 10 %."""
    error = read_profile(FOLDER / f"{name}.json").data["error"]
    assert error["held_out"]["median"] <= 0.05
    assert error["held_out"]["p95"] <= 0.15
    for key, value in error.items():
        if "axis" in key:
            assert value["median"] <= 0.10, key


# ── L2 ───────────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("metric", "bar"), [("tpot_mean_s", 0.02), ("e2el_mean_s", 0.03), ("makespan_s", 0.03), ("ttft_p90_s", 0.10)]
)
def test_l2_without_memory_pressure_and_nothing_fitted(unpressed: Judgement, metric: str, bar: float) -> None:
    assert error_of(unpressed, metric) <= bar


# ── L3 ───────────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("metric", "bar"),
    [
        ("ttft_mean_s", 0.015),
        ("tpot_mean_s", 0.01),
        ("ttft_p90_s", 0.02),
        ("ttft_p99_s", 0.02),
        ("makespan_s", 0.01),
    ],
)
def test_l3_under_kv_saturation_and_nothing_fitted(pressed: Judgement, metric: str, bar: float) -> None:
    assert error_of(pressed, metric) <= bar


def test_l3_trajectories_and_preempted_occupancy(pressed: Judgement) -> None:
    run, twin = pressed.run, pressed.twin
    distance = {path.name: path.distance for path in pressed.trajectories}
    assert distance["running"] <= 0.05
    assert distance["waiting"] <= 0.05
    assert abs(twin.at(run.ticks_s)["kv_usage"].mean() - run.trajectories["kv_usage"].mean()) <= 0.02
    measured = preempted(run.scheduled_s, run.finished_s, run.ticks_s, run.trajectories["running"])
    simulated = twin.at(run.ticks_s)["preempted"]
    assert (int((measured > 1).sum()), int(measured.max())) == (81, 18)
    assert int((simulated > 1).sum()) == pytest.approx(81, rel=0.25)
    assert simulated.max() == pytest.approx(18, rel=0.30)
    assert pressed.verdict == EQUIVALENT


def test_the_roofline_is_told_apart_from_the_run(data_dir: Path, pressed: Judgement) -> None:
    twin = simulate_requests(RTX_4090.scenario(), pressed.run.requests)
    assert judge(pressed.run, twin).verdict == DIFFERENT


# ── L4, L5 ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.slow
def test_l4_rates_that_were_not_fitted_to(data_dir: Path) -> None:
    """Corrected on 0.5 and 0.84 a second; at 0.67 and 1.0 TPOT within 5 %, TTFT p99 within 25 %, and the cliff where it was."""
    folder = data_dir / "runs" / "llm-d-benchmark" / A100.run
    runs = rates_of(folder)
    requests = with_sessions(runs, A100_CALIBRATED_ON)
    _, cost = two_rates_correction(runs, requests)
    scenario = A100.scenario(num_gpu_blocks_override=queueing_pool(runs, requests, cost))
    for rate in ("0.67", "1"):
        twin, run = simulate_requests(scenario, requests[rate], cost), runs[rate]
        assert np.nanmedian(twin.tpot_s) == pytest.approx(np.nanmedian(run.tpot_s), rel=0.05)
        assert np.percentile(twin.ttft_s, 99) == pytest.approx(np.percentile(run.ttft_s, 99), rel=0.25)


@pytest.mark.slow
def test_l5_tpot_of_h100_rows(data_dir: Path) -> None:
    error = errors(data_dir / "runs" / "silicon_h100_dense.csv", "profile")
    absolute = error["tpot_error"].abs()
    assert absolute[error["backend"] == "vllm"].median() <= 0.08
    assert absolute.median() <= 0.12
    assert error["ttft_error"].abs().median() <= 0.25


# ── the judge ────────────────────────────────────────────────────────────────────────────────────────────────────────
def scaled(twin: SimulatedRun, factor: float) -> SimulatedRun:
    return dataclasses.replace(twin, e2el_s=twin.e2el_s * factor, tpot_s=twin.tpot_s * factor)


def test_a_run_is_equivalent_to_itself_and_a_drift_is_found(pressed: Judgement) -> None:
    run, twin = pressed.run, pressed.twin
    itself = dataclasses.replace(
        twin, ttft_s=run.ttft_s, tpot_s=run.tpot_s, e2el_s=run.e2el_s, finished_s=run.finished_s
    )
    same = judge(run, itself)
    assert {metric.error for metric in same.metrics} == {0.0}
    drifted = judge(run, scaled(itself, 1.3))
    assert drifted.verdict == DIFFERENT
    assert next(one for one in drifted.metrics if one.name == "tpot_mean_s").error == pytest.approx(0.3)


def test_margins_decide(pressed: Judgement) -> None:
    tight = judge(pressed.run, pressed.twin, Margins(mean=0.001, tail=0.001, trajectory=0.001))
    assert tight.verdict != EQUIVALENT
    with pytest.raises(CalibrationError, match="margin mean is 5"):
        Margins(mean=5.0)


def test_small_ttft_is_judged_in_seconds(unpressed: Judgement) -> None:
    run, twin = unpressed.run, unpressed.twin
    fast = dataclasses.replace(run, ttft_s=np.full(run.ttft_s.shape, 0.1))
    quick = dataclasses.replace(twin, ttft_s=np.full(twin.ttft_s.shape, 0.115))
    metric = next(one for one in judge(fast, quick).metrics if one.name == "ttft_mean_s")
    assert metric.absolute
    assert metric.error == pytest.approx(0.015)
    assert metric.verdict == EQUIVALENT


def test_the_page_is_one_file_that_loads_nothing(pressed: Judgement) -> None:
    text = page(pressed)
    assert "<svg" in text
    assert loads_nothing(text)
    assert "equivalent" in text


def test_the_command_prints_the_contract_and_its_exit_code_is_the_verdict(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["calibrate", "judge", "--run", str(data_dir / RUNS / RTX_4090.run), "--prefixes", str(data_dir / PREFIXES)]
    engine = ["--max-model-len", "32768", "--max-num-seqs", "256", "--max-num-batched-tokens", "2048"]
    what = [
        "--model",
        "llama-3.1-8b",
        "--gpu",
        "rtx-4090",
        "--engine-version",
        "0.19",
        "--gpu-memory-utilization",
        "0.9",
    ]
    command = [*run, *engine, *what]
    html = tmp_path / "judge.html"
    assert main([*command, "--profile", "auto", "--json", "--html", str(html)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document) >= {"metrics", "trajectories", "verdict"}
    assert set(document["metrics"][0]) >= {"name", "measured", "predicted", "error"}
    assert set(document["trajectories"][0]) >= {"name", "distance"}
    assert html.is_file()
    assert main([*command, "--json"]) == 1, "the roofline is not equivalent"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["calibrate", "judge", "--model", "llama-3.1-8b", "--gpu", "h100"], ["no recorded run", "--run"]),
        (
            ["calibrate", "judge", "--run", "nothing", "--model", "llama-3.1-8b", "--gpu", "h100"],
            ["not a recorded run"],
        ),
        (["calibrate", "fit", "nothing", "--out", "p.json"], ["no such file or folder"]),
        (["calibrate", "fit", ".", "--out", "p.json"], ["not a folder of measurements"]),
    ],
)
def test_bad_input_is_one_message(
    arguments: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused: Refusals,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused(arguments, *words).startswith(f"kvtwin calibrate {arguments[1]}: ")


def test_a_run_without_provenance_or_with_other_prefixes_is_refused(data_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    source = data_dir / RUNS / RTX_4090.run
    (folder / "requests.jsonl").write_text((source / "requests.jsonl").read_text())
    with pytest.raises(CalibrationError, match="no meta.json"):
        read_run(folder)
    other = data_dir / RUNS / "workloads" / "sharegpt-qwen3-32b-300-sps10.lengths.csv"
    with pytest.raises(CalibrationError, match="lengths are not those"):
        read_run(source, other)


# ── what is embedded is what the tables give ─────────────────────────────────────────────────────────────────────────
def assert_embedded(documents: list[dict[str, Any]]) -> None:
    """Every entry of every document is that of the embedded file, numbers to a thousandth."""
    for document in documents:
        kept = read_profile(FOLDER / f"{document['name']}.json").data
        again = json.loads(json.dumps({key: value for key, value in document.items() if key != "residuals"}))
        ours, theirs = dict(leaves(again)), dict(leaves(kept))
        assert ours.keys() == theirs.keys()
        unlike = [
            place for place, value in theirs.items() if place != ("provenance", "date") and not same(ours[place], value)
        ]
        assert not unlike, (document["name"], unlike[:5])


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, (str, bool, type(None))):
        return bool(ours == theirs)
    return math.isclose(ours, theirs, rel_tol=1e-3, abs_tol=1e-6)


def leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Where each plain value of a document stands, and what it is."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if inner is None:
        yield place, value
    else:
        for key, part in inner:
            yield from leaves(part, (*place, key))


@pytest.mark.slow
def test_the_embedded_profiles_of_cards_are_what_the_tables_give(data_dir: Path) -> None:
    documents = fitted_cards(data_dir, "")
    assert len(documents) == len(MODEL_PROFILES) + len(CARDS)
    assert_embedded(documents)


@pytest.mark.slow
def test_the_embedded_profiles_of_gpus_are_what_the_tables_give(data_dir: Path) -> None:
    pytest.importorskip("pyarrow", reason="reading the Parquet tables needs pyarrow")
    documents = fitted_gpus(data_dir, "")
    assert len(documents) == len(GPU_TABLES)
    assert_embedded(documents)
