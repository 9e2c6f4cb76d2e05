"""Measuring the CPU device for real: a run folder that can be stopped and gone on with, and what is fitted to it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from calibration.errors import CalibrationError
from calibration.measuring.measure import make_rig, measure
from calibration.measuring.quality import assess
from calibration.measuring.settings import MeasureSettings
from calibration.measuring.step_log import COLUMNS, StepRun, read_run, write_run
from calibration.timed_steps.fit_memory import predict_workspace
from experiments.calibrate_measure import seconds
from experiments.cli import main
from sim.catalog.models import model_shape
from tests.support.pages import loads_nothing
from tests.support.refusals import Refusals

pytest.importorskip("torch", reason="measuring needs torch")

SMALL = MeasureSettings(
    model="tiny-llama-test", max_num_batched_tokens=256, max_num_seqs=16, max_model_len=512, clock="thread"
)  # fmt: skip
FLAGS = ["--max-num-batched-tokens", "256", "--max-num-seqs", "16", "--max-model-len", "512", "--clock", "thread"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, StepRun]:
    """A run that was stopped in the middle of its first pass, and gone on with."""
    folder = tmp_path_factory.mktemp("measured") / "run"
    rig = make_rig(SMALL)

    class StoppedError(Exception):
        pass

    timed = 0
    whole = rig.run

    def stopping(point):
        nonlocal timed
        timed += point.group == "space"  # comes after the corners, and never while warming up
        if timed == 20:
            raise StoppedError
        return whole(point)

    rig.run = stopping  # type: ignore[method-assign]
    with pytest.raises(StoppedError):
        measure(SMALL, 60.0, folder, command="test", rig=rig)
    rig.run = whole  # type: ignore[method-assign]
    first = read_run(folder)
    assert first.steps[-1].group in ("space", "reference")
    return folder, measure(SMALL, first.spent_s + 6.0, folder, command="test", rig=rig)


def copied(measured: tuple[Path, StepRun], folder: Path) -> Path:
    shutil.copytree(measured[0], folder)
    return folder


# ── measuring ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_run_that_was_stopped_goes_on_where_it_was(measured: tuple[Path, StepRun]) -> None:
    _, run = measured
    designed = [(step.pass_, step.point) for step in run.steps if step.pass_ >= 0]
    assert len(set(designed)) == len(designed), "no step was timed twice in a pass"
    first_pass = {point for number, point in designed if number == 0}
    assert first_pass >= set(range(1, max(first_pass) + 1)), "what the first session left out was made up for"
    assert {step.session for step in run.steps} == {0, 1}
    assert len(run.document["sessions"]) == 2
    elapsed = [step.elapsed_s for step in run.steps]
    assert elapsed == sorted(elapsed)


def test_a_run_says_what_it_is(measured: tuple[Path, StepRun]) -> None:
    folder, run = measured
    document = json.loads((folder / "run.json").read_text())
    assert document["schema"] == "kvtwin-steps"
    assert document["columns"] == COLUMNS
    assert document["provenance"]["device"] == "cpu"
    assert document["provenance"]["device_name"]
    assert document["settings"]["clock"] == "thread"
    assert document["model"]["name"] == "tiny-llama-test"
    assert "/" not in document["provenance"]["command"].replace("SYSTEM/", "")
    quality, _ = assess(run.steps)
    assert quality.steps == len(run.steps)


def test_memory_lines_are_those_of_the_account(measured: tuple[Path, StepRun]) -> None:
    _, run = measured
    shape, memory = model_shape("tiny-llama-test"), run.document["memory"]
    assert memory["weights_bytes"] == 4 * shape.num_parameters
    assert memory["kv_block_bytes"] == 16 * shape.kv_bytes_per_token()
    assert all(0 < step.workspace_bytes <= memory["workspace_bytes"] for step in run.steps)
    assert all(step.process_bytes and step.process_bytes > memory["weights_bytes"] for step in run.steps)


def test_a_run_in_a_folder_is_gone_on_with_only_if_it_is_of_the_same(
    measured: tuple[Path, StepRun], tmp_path: Path
) -> None:
    folder = copied(measured, tmp_path / "run")
    other = MeasureSettings(
        model="tiny-llama-test", max_num_batched_tokens=256, max_num_seqs=8, max_model_len=512, clock="thread"
    )
    with pytest.raises(CalibrationError, match="max_num_seqs = 16, this one has 8"):
        measure(other, 100.0, folder, command="test")
    document = json.loads((folder / "run.json").read_text())
    document["provenance"]["device_name"] = "another CPU"
    (folder / "run.json").write_text(json.dumps(document))
    with pytest.raises(CalibrationError, match="device_name another CPU"):
        measure(SMALL, 100.0, folder, command="test")
    before = (folder / "steps.csv").read_bytes()
    assert measure(SMALL, 2.0, folder, command="test").spent_s > 2.0, "a budget that is spent measures nothing more"
    assert (folder / "steps.csv").read_bytes() == before


def test_what_is_written_is_what_is_read(measured: tuple[Path, StepRun], tmp_path: Path) -> None:
    _, run = measured
    write_run(tmp_path / "again", run.document, run.steps)
    again = read_run(tmp_path / "again")
    assert again.steps == run.steps
    assert {key: value for key, value in again.document.items() if key != "columns"} == {
        key: value for key, value in run.document.items() if key != "columns"
    }


# ── bad input ────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ({"schema_version": 2}, "schema version 2, this version of kvtwin reads 1"),
        ({"schema": "other"}, "its \"schema\" must be 'kvtwin-steps'"),
        ({"provenance": None}, "does not say 'device'"),
        ({"provenance": {"device": "cpu", "device_name": "x", "torch": "2", "kvtwin_version": "0", "date": "d"}}, "does not say 'command'"),
        ({"limits": None}, "does not say 'limits'"),
    ],
)  # fmt: skip
def test_a_run_of_unknown_origin_is_refused(
    measured: tuple[Path, StepRun], tmp_path: Path, edit: dict[str, object], words: str
) -> None:
    folder = copied(measured, tmp_path / "run")
    document = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**document, **edit}))
    with pytest.raises(CalibrationError, match=words):
        read_run(folder)


def test_a_run_without_its_description_is_refused(measured: tuple[Path, StepRun], tmp_path: Path) -> None:
    folder = copied(measured, tmp_path / "run")
    (folder / "run.json").unlink()
    with pytest.raises(CalibrationError, match=r"no run\.json"):
        read_run(folder)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("duration_us", "duration_ms", "'duration_us' is missing; it has 'duration_ms' instead, which is another unit"),
        ("workspace_bytes", "space", "'workspace_bytes' is missing"),
        ("@", "/", "chunks are written tokens@context"),
    ],
)
def test_rows_that_are_not_timed_steps_are_refused(
    measured: tuple[Path, StepRun], tmp_path: Path, old: str, new: str, words: str
) -> None:
    folder = copied(measured, tmp_path / "run")
    text = (folder / "steps.csv").read_text()
    (folder / "steps.csv").write_text(text.replace(old, new))
    with pytest.raises(CalibrationError, match=words):
        read_run(folder)


@pytest.mark.parametrize(("text", "value"), [("120s", 120.0), ("2m", 120.0), ("0.5h", 1800.0), ("90", 90.0)])
def test_times_are_understood(text: str, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["measure", "--budget", "soon", "--out", "r"], ["--budget is 'soon'", "120s or 2m"]),
        (["measure", "--budget", "-3s", "--out", "r"], ["--budget is '-3s'"]),
        (["measure", "--budget", "1s", "--out", "r"], ["budget is 1 s", "at least 2"]),
        (["measure", "--model", "granite-3.1-8b", "--out", "r"], ["granite-3.1-8b cannot be run for real"]),
        (["measure", "--device", "tpu", "--out", "r"], ["device is 'tpu'"]),
        (["measure", "--max-num-seqs", "2", "--out", "r"], ["max_num_seqs is 2"]),
        (
            ["measure", "--max-model-len", "5000", "--out", "r"],
            ["--max-model-len is 5000", "tiny-llama-test takes 1 to 4096"],
        ),
        (["measure", "--clock", "sun", "--out", "r"], ["clock is 'sun'", "wall, thread"]),
        (["fit", ".", "--out", "p.json"], ["not a folder of measurements", "kvtwin calibrate measure"]),
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
    assert refused(["calibrate", *arguments], *words).startswith(f"kvtwin calibrate {arguments[0]}: ")
    assert not list(tmp_path.iterdir())


# ── what is fitted ───────────────────────────────────────────────────────────────────────────────────────────────────
def test_measure_and_fit_as_a_user_types_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From nothing to a priced run. One pass of single measurements is as good as its noise; a wrong unit or a term that is missing
    would be further off. The thread's own time is measured, which others on the machine take less from.
    """
    run, profile, html = tmp_path / "run", tmp_path / "cpu.json", tmp_path / "fit.html"
    assert (
        main(["calibrate", "measure", "--budget", "5s", "--clock", "thread", "--out", str(run), "--json", *FLAGS]) == 0
    )
    assert json.loads(capsys.readouterr().out)["schema"] == "kvtwin-steps"
    assert main(["calibrate", "fit", str(run), "--out", str(profile), "--html", str(html), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["error"]["held_out"]["median"] < 0.25
    assert document["memory"]["workspace_error"]["median"] < 0.05
    assert loads_nothing(html.read_text())
    flags = [
        "--model",
        "tiny-llama-test",
        "--workload",
        "uniform",
        "--num-requests",
        "5",
        "--gpu",
        "cpu",
        "--max-model-len",
        "4096",
    ]
    assert main(["run", *flags, "--profile", str(profile), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["finished"] == 5
    assert any("measured by kvtwin's own executor" in warning for warning in summary["warnings"])
    assert any("beyond its range" in warning for warning in summary["warnings"]), (
        "prompts of 1,000 tokens are beyond 512"
    )


def test_the_workspace_of_a_step_is_predicted(measured: tuple[Path, StepRun]) -> None:
    from calibration.timed_steps.fit_run import fit_run_profile

    _, run = measured
    memory = fit_run_profile(run, date="", command="")["memory"]
    used = {step.shape: step.workspace_bytes for step in run.steps}
    error = np.abs(predict_workspace(memory, list(used)) / np.asarray(list(used.values())) - 1)
    assert np.median(error) < 0.01
    assert np.quantile(error, 0.9) < 0.10


def test_the_cpu_without_a_profile_is_not_priced(refused: Refusals) -> None:
    flags = ["run", "--gpu", "cpu", "--workload", "uniform", "--num-requests", "3"]
    refused([*flags, "--model", "tiny-llama-test"], "whose data sheet prices no step")
    refused(
        [*flags, "--model", "llama-3.2-1b", "--profile", "auto"],
        "kvtwin calibrate measure --device cpu --model llama-3.2-1b",
    )
