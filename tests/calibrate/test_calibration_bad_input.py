"""What `kvtwin calibrate` cannot use: one message that says where, what and what would be right; exit status 2."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from calibration.errors import CalibrationError
from calibration.measuring.design import design
from calibration.measuring.making import MOST_MAKING, SLOWNESS, Making
from calibration.measuring.measure import first_pass, measure
from calibration.measuring.settings import MeasureSettings
from calibration.measuring.step_log import read_run, write_run
from experiments import build_profiles, interval_coverage, validate_profiles
from experiments.cli import main
from experiments.interval_coverage import noisy_run
from sim.catalog.models import model_shape
from tests.support.refusals import Refusals

MODEL = "tiny-llama-test"
Edit = Callable[[Any], object]


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of timed steps, written as `measure` writes one."""
    folder = tmp_path_factory.mktemp("steps") / "run"
    run = noisy_run(0, passes=1)
    document = {"schema": "kvtwin-steps", "schema_version": 1, "sessions": [], **run.document}
    write_run(folder, document, run.steps)
    return folder


def edited(path: Path, change: Edit) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def row(path: Path, column: str, value: str, line: int = 5) -> None:
    """Put `value` into a column of a line of a CSV file without quotes; the header is line 1."""
    lines = path.read_text().splitlines()
    cells = lines[line - 1].split(",")
    cells[lines[0].split(",").index(column)] = value
    lines[line - 1] = ",".join(cells)
    path.write_text("\n".join(lines) + "\n")


# ── runs of timed steps ──────────────────────────────────────────────────────────────────────────────────────────────
def without(*path: str) -> Edit:
    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        del document[path[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("provenance"), ["its provenance does not say 'device'"]),
        (without("provenance", "command"), ["does not say 'command'", "unknown origin"]),
        (without("limits", "max_num_seqs"), ["limits: it does not say 'max_num_seqs'"]),
        (without("settings", "dtype"), ["settings: it does not say 'dtype'"]),
        (without("model", "attention"), ["model: it does not say 'attention'"]),
        (lambda d: d["limits"].update(block_size=0), ["limits block_size is 0", "at least 1"]),
        (lambda d: d.update(schema_version=9), ["schema version 9", "reads 1"]),
        (lambda d: d["memory"].update(by_limits=[]), ["memory: it does not say 'weights_bytes'"]),
    ],
)
def test_a_run_that_lacks_something_is_refused(
    steps: Path, tmp_path: Path, change: Edit, words: list[str], refused: Refusals
) -> None:
    shutil.copytree(steps, tmp_path / "run")
    edited(tmp_path / "run" / "run.json", change)
    refused(["calibrate", "fit", tmp_path / "run", "--out", tmp_path / "p.json"], *words)
    assert not (tmp_path / "p.json").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: path.unlink(), ["steps.csv", "no such file"]),
        (lambda path: path.write_text(""), ["column 'session' is missing", "it has no columns"]),
        (lambda path: path.write_bytes(b"\xff\xfe\x00"), ["steps.csv", "not a text file"]),
        (lambda path: path.write_text(path.read_text().replace("duration_us", "duration_ms", 1)), ["another unit", "convert it to us"]),
        (lambda path: row(path, "duration_us", "nan"), ["line 5", "duration_us is nan"]),
        (lambda path: row(path, "duration_us", "soon"), ["line 5", "'soon'"]),
        (lambda path: row(path, "elapsed_s", "inf"), ["line 5", "elapsed_s is inf"]),
        (lambda path: row(path, "workspace_bytes", "0"), ["line 5", "workspace_bytes is 0"]),
        (lambda path: path.write_text(path.read_text()[:-30]), ["fewer values than there are columns"]),
        (lambda path: path.write_text("\n".join(path.read_text().splitlines()[:30]) + "\n"), ["cannot identify", "at least 12"]),
    ],
)  # fmt: skip
def test_steps_that_cannot_be_used_are_refused(
    steps: Path, tmp_path: Path, change: Callable[[Path], object], words: list[str], refused: Refusals
) -> None:
    shutil.copytree(steps, tmp_path / "run")
    change(tmp_path / "run" / "steps.csv")
    refused(["calibrate", "fit", tmp_path / "run", "--out", tmp_path / "p.json"], *words)


def test_timed_steps_are_not_judged_and_the_message_says_what_reads_them(steps: Path, refused: Refusals) -> None:
    judge = ["calibrate", "judge", "--run", str(steps), "--model", MODEL, "--gpu", "cpu", "--profile", "auto"]
    refused(judge, "timed steps, not a served run", "kvtwin calibrate fit")


# ── profiles ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture(scope="module")
def profile(steps: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "p.json"
    assert main(["calibrate", "fit", str(steps), "--out", str(path)]) == 0
    return path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(schema_version=9), ["schema version 9", "reads 1", "fit it again"]),
        (lambda d: d["memory"].update(schema_version=9), ["memory lines have schema version 9"]),
        (without("provenance"), ["it does not say 'provenance'"]),
        (without("terms", "decode"), ["a term is missing or malformed", "'decode'"]),
        (lambda d: d.update(drawn_terms=[{}]), ["a term is missing or malformed", "'dense'"]),
        (lambda d: d.update(drawn_terms="x"), ["drawn_terms is 'x'", "a list of tables"]),
        (lambda d: d.update(samples=[1]), ["samples is '[1]'", "a table of lists of factors"]),
        (lambda d: d["error"].update(misfit=-1), ["the spread of its step is -1"]),
    ],
)
def test_a_profile_that_lacks_something_is_refused(
    profile: Path, tmp_path: Path, change: Edit, words: list[str], refused: Refusals
) -> None:
    path = tmp_path / "p.json"
    shutil.copy(profile, path)
    edited(path, change)
    run = [
        "run",
        "--model",
        MODEL,
        "--gpu",
        "cpu",
        "--max-model-len",
        "512",
        "--workload",
        "uniform",
        "--num-requests",
        "2",
    ]
    refused([*run, "--profile", path], *words, "p.json")


# ── recorded runs of servers ─────────────────────────────────────────────────────────────────────────────────────────
ROWS = [
    {"request_id": str(i), "input_toks": 10, "output_toks": 5, "arrival_time": 1e6 + i, "queued_ts": float(i), "scheduled_ts": i + 0.1,
     "first_token_ts": i + 0.2, "last_token_ts": i + 0.6}
    for i in range(40)
]  # fmt: skip
SERVED = ["--model", "llama-3.1-8b", "--gpu", "h100-sxm-80gb", "--profile", "auto"]


def served(folder: Path, meta: str = '{"model": "m"}', rows: str | None = None) -> Path:
    folder.mkdir()
    if meta:
        (folder / "meta.json").write_text(meta)
    text = "".join(json.dumps(one) + "\n" for one in ROWS) if rows is None else rows
    (folder / "requests.jsonl").write_text(text)
    return folder


def changed(**values: object) -> str:
    first = {key: value for key, value in {**ROWS[0], **values}.items() if value != "gone"}
    return "".join(json.dumps(one) + "\n" for one in [first, *ROWS[1:]])


@pytest.mark.parametrize(
    ("meta", "rows", "words"),
    [
        ("", None, ["no meta.json", "unknown engine"]),
        ("{", None, ["meta.json", "not JSON"]),
        ("[]", None, ["meta.json", "holds list"]),
        ('{"model": "m"}', "", ["requests.jsonl", "it has no rows"]),
        ('{"model": "m"}', "{\n", ["requests.jsonl:1", "not JSON"]),
        ('{"model": "m"}', changed(scheduled_ts="gone"), ["requests.jsonl:1", "'scheduled_ts'"]),
        ('{"model": "m"}', changed(first_token_ts="soon"), ["requests.jsonl:1: first_token_ts", "'soon'"]),
        ('{"model": "m"}', changed(last_token_ts=None), ["requests.jsonl:1: last_token_ts", "None"]),
    ],
)
@pytest.mark.parametrize("command", ["judge", "fit"])
def test_a_served_run_that_lacks_something_is_refused(
    command: str, meta: str, rows: str | None, words: list[str], tmp_path: Path, refused: Refusals
) -> None:
    run = str(served(tmp_path / "run", meta, rows))
    what = ["judge", "--run", run] if command == "judge" else ["fit", run, "--out", str(tmp_path / "p.json")]
    refused(["calibrate", *what, *SERVED], *words)


def test_a_time_line_without_its_clock_is_refused(tmp_path: Path, refused: Refusals) -> None:
    run = served(tmp_path / "run")
    (run / "timeseries.csv").write_text("t,running,waiting,kv_cache_pct\n" + "".join(f"{i},1,0,5\n" for i in range(5)))
    refused(["calibrate", "judge", "--run", run, *SERVED], "started_at is None", "timeseries.csv")


BENCH: dict[str, Any] = {
    "date": "d", "backend": "vllm", "model_id": "m", "input_lens": [100, 50], "output_lens": [3, 2], "start_times": [10.5, 10.0],
    "ttfts": [0.1, 0.2], "itls": [[0.02, 0.04], [0.03]], "errors": ["", ""],
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_id": ""}, ["does not say 'model_id'"]),
        ({"itls": None}, ["no array 'itls'", "--save-detailed"]),
        ({"ttfts": [0.1]}, ["itls has 2 values and ttfts 1"]),
        ({"ttfts": ["a", 0.2]}, ["ttfts: number 1 is 'a'"]),
        ({"ttfts": [-0.1, 0.2]}, ["ttfts: number 1 is -0.1", "at least 0"]),
        ({"itls": [["x", "y"], [0.03]]}, ["itls of request 1: number 1 is 'x'"]),
        ({"itls": [0.02, [0.03]]}, ["itls of request 1 is no list"]),
        ({"start_times": [float("nan"), 1]}, ["start_times: number 1 is nan"]),
    ],
)
def test_a_bench_file_that_cannot_be_used_is_refused(
    change: dict[str, object], words: list[str], tmp_path: Path, refused: Refusals
) -> None:
    path = tmp_path / "b.json"
    path.write_text(json.dumps({**BENCH, **change}))
    refused(["calibrate", "judge", "--run", path, *SERVED], *words, "b.json")


def test_what_a_failed_request_got_is_not_looked_at(tmp_path: Path) -> None:
    from calibration.recorded.runs import read_run as read_served

    path = tmp_path / "b.json"
    path.write_text(
        json.dumps({**BENCH, "output_lens": [3, 0], "itls": [[0.02, 0.04], [0.5]], "errors": ["", "refused"]})
    )
    assert read_served(path).ttft_s.tolist() == [0.1]


@pytest.mark.parametrize("suffix", [".json", ".csv"])
@pytest.mark.parametrize("command", ["judge", "fit"])
def test_bytes_that_are_no_text_are_refused(suffix: str, command: str, tmp_path: Path, refused: Refusals) -> None:
    path = tmp_path / f"b{suffix}"
    path.write_bytes(b"\xff\xfe\x00\x01")
    what = (
        ["judge", "--run", str(path)] if command == "judge" else ["fit", str(path), "--out", str(tmp_path / "p.json")]
    )
    refused(["calibrate", *what, *SERVED], path.name, "UTF-8" if suffix == ".json" else "utf-8")


def test_a_word_among_numbers_is_found_where_it_is(tmp_path: Path) -> None:
    from calibration.tables import read_csv

    (tmp_path / "t.csv").write_text("layer,tokens,time_us\na,1,2.5\na,2,fast\n")
    with pytest.raises(CalibrationError, match="row 2 has time_us = 'fast' among numbers"):
        read_csv(tmp_path / "t.csv", ("layer", "tokens", "time_us"))


# ── budgets ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_making_of_what_is_measured_is_estimated_and_must_leave_time_for_steps() -> None:
    limits = MeasureSettings(model="llama-3.1-8b").limits(model_shape("llama-3.1-8b"))
    making = Making.of(model_shape("llama-3.1-8b"), limits, drawn=True, cache_bytes=2, block_bytes=16 * 131072)
    assert making.weights == model_shape("llama-3.1-8b").num_parameters
    assert making.pool == limits.num_gpu_blocks * 16 * 131072 // 2
    seconds = making.seconds(1e9)
    assert seconds == pytest.approx(SLOWNESS * (making.weights + making.pool) / 1e9)
    making.check(seconds, seconds / MOST_MAKING)
    with pytest.raises(CalibrationError, match=r"takes about \d+ s, more than 50% of the 10 s .*--budget \d+s or more"):
        making.check(seconds, 10.0)
    read = Making.of(model_shape("llama-3.1-8b"), limits, drawn=False, cache_bytes=1, block_bytes=16 * 65536)
    assert (read.weights, read.pool) == (0, 0), "files are read, and fp8 caches are not filled"


def test_a_budget_that_making_would_eat_up_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refusals
) -> None:
    pytest.importorskip("torch", reason="measuring needs torch")
    monkeypatch.setattr("calibration.measuring.measure.drawing_rate", lambda device: 1e5)
    monkeypatch.setattr("calibration.measuring.measure.make_rig", lambda settings: pytest.fail("it was made"))
    out = tmp_path / "run"
    refused(["calibrate", "measure", "--budget", "10s", "--out", out], MODEL, "takes about", "--budget")
    assert not out.exists()


def test_making_counts_as_spent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="measuring needs torch")
    import time

    from calibration.measuring.measure import make_rig

    def slowly(settings: MeasureSettings) -> object:
        time.sleep(1.5)
        return make_rig(settings)

    monkeypatch.setattr("calibration.measuring.measure.make_rig", slowly)
    settings = MeasureSettings(model=MODEL, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=64, clock="thread")
    run = measure(settings, 4.0, tmp_path / "run", command="test")
    assert run.steps[0].elapsed_s > 1.5


def test_a_first_pass_that_is_not_whole_is_said_with_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refusals
) -> None:
    pytest.importorskip("torch", reason="measuring needs torch")
    monkeypatch.setattr("calibration.measuring.session.MOST_OVERRUN", 0.3)
    limits = ["--max-num-batched-tokens", "64", "--max-num-seqs", "4", "--max-model-len", "64", "--clock", "thread"]
    out = tmp_path / "run"
    words = ["the first pass is not whole", "--budget", "are kept in"]
    refused(["calibrate", "measure", "--budget", "2s", "--out", out, *limits], *words)
    settings = MeasureSettings(model=MODEL, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=64, clock="thread")
    done, whole = first_pass(read_run(out), settings)
    assert 0 < done < whole == len(design(settings.limits(model_shape(MODEL)), 0)) - 1


# ── the scripts ──────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        (validate_profiles.main, ["nowhere", "L2"], "nowhere/runs/llmservingsim"),
        (validate_profiles.main, ["nowhere", "L1"], "nowhere/batch/splitwise/perf_model.csv: No such file"),
        (build_profiles.main, ["nowhere", "--out", "profiles"], "meta.yaml: missing"),
    ],
)
def test_a_script_without_its_data_says_which_file_it_lacks(
    script: Callable[[list[str]], int],
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert script(arguments) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "nothing was made"


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        (validate_profiles.main, ["data", "L9"], "there is no level 'L9'; there are L1, L2, L3, L4, L5, gaps, self"),
        (interval_coverage.main, ["--sets", "0"], "--sets is 0; at least one run is needed"),
    ],
)
def test_a_script_refuses_what_it_does_not_know(
    script: Callable[[list[str]], int], arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        script(arguments)
    assert left.value.code == 2
    assert words in capsys.readouterr().err
