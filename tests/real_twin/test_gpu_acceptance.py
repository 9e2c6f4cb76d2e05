"""The acceptance run of a GPU, tried on the CPU: stages in processes of their own, limits, what is kept, the verdict."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments import gpu_acceptance
from experiments.acceptance.job import Job
from experiments.acceptance.kept import keep, shorten
from experiments.acceptance.pressure import PressureSettings, run_pressure
from experiments.acceptance.processes import read_junit
from experiments.acceptance.stages import BARRED, COPY_SHARE, STAGES
from experiments.acceptance.stages import main as stage_main
from experiments.gpu_acceptance import accept, main
from gpu.decode_account import SHAPES

REQUIRED = [name for name, stage in STAGES.items() if stage.required]


def verdict(out: Path) -> dict:
    return json.loads((out / "acceptance.json").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_the_whole_run_on_the_cpu_asks_every_question(tmp_path, capsys):
    only = [flag for name in REQUIRED for flag in ("--only", name)]
    code = main(["--device", "cpu", "--small", "--budget", "10m", "--out", str(tmp_path), *only])
    found = verdict(tmp_path)
    assert code == 0, found["stages"]
    assert found["ok"]
    assert list(found["stages"]) == REQUIRED
    assert found["not_reached"] == []
    assert found["provenance"]["command"].startswith("python -m experiments.gpu_acceptance --device cpu --budget 10m")
    assert found["provenance"]["torch"]
    assert found["stages"]["decode"]["skipped"] == "kernels are timed on CUDA devices only"
    assert found["stages"]["tests"]["facts"]["skipped"] > 0  # there is no GPU
    assert found["stages"]["validate"]["facts"]["cells"] == found["stages"]["validate"]["facts"]["well"] == 1
    assert found["stages"]["kernels"]["facts"]["compiled"][0]["target"] == "sm_90"
    assert found["stages"]["pressure"]["facts"]["allocator_calls"] == 0
    assert "all bars are met" in capsys.readouterr().out
    kept = sorted(file.name for file in tmp_path.iterdir())
    assert kept == ["acceptance.json", "acceptance.log", "tests.xml", "validate.zip"]  # few files, no folders


def test_ten_thousand_steps_in_small_leak_nothing_and_allocate_nothing():
    figures, missed = run_pressure(PressureSettings.of("cpu", small=True))
    assert missed == []
    assert figures["steps"] >= 120
    assert figures["metered_steps"] > 20
    assert (figures["leaked_blocks"], figures["allocator_calls"], figures["oom_steps"]) == (0, 0, 0)
    assert figures["preemptions"] > 0
    assert sum(each["steps"] for each in figures["step_ms"].values()) == figures["steps"]


def test_a_run_that_is_broken_off_says_how_far_it_came():
    figures, missed = run_pressure(PressureSettings.of("cpu", small=True, limit_s=1e-6))
    assert not figures["finished"]
    assert missed[0] == "broken off after 1e-06 s"
    assert "0 steps of 120" in missed


def test_the_bars_are_those_that_are_measured():
    assert set(BARRED) <= set(SHAPES)
    assert (BARRED, COPY_SHARE) == (((64, 8192), (128, 4096)), 0.85)
    assert list(STAGES)[:4] == ["machine", "decode", "pressure", "tests"]


def test_a_stage_that_does_not_end_is_ended_and_what_it_knows_is_kept(tmp_path, monkeypatch):
    monkeypatch.setitem(
        STAGES, "kernels", type(STAGES["kernels"])(question="?", limit_s=0.3, run=STAGES["kernels"].run)
    )
    assert not accept("cpu", tmp_path, 60.0, only=["kernels"], small=True, command="it")
    stage = verdict(tmp_path)["stages"]["kernels"]
    assert stage["failures"] == ["not done after 0 s"]
    assert not stage["finished"]
    assert stage["seconds"] < 10
    assert verdict(tmp_path)["not_reached"] == [name for name in REQUIRED if name != "kernels"]


def test_the_same_folder_goes_on_and_named_stages_are_run_anew(tmp_path, monkeypatch, capsys):
    carried: list[str] = []

    def carry_out(name, stage, device, out, work, limit_s, *, small, so_far):
        carried.append(name)
        finished = name != "pressure"
        job = Job(device=device, out=work / f"{name}.json", limit_s=limit_s, small=small, finished=finished)
        job.fail(*(["broken"] if name == "pressure" else []))
        return json.loads(job.out.read_text(encoding="utf-8"))

    monkeypatch.setattr(gpu_acceptance, "_carry_out", carry_out)
    assert not accept("cpu", tmp_path, 60.0, command="first")
    assert carried == list(STAGES)
    carried.clear()
    assert not accept("cpu", tmp_path, 60.0, command="second")
    assert carried == ["pressure"]  # it had not ended
    for device, small in (("cuda", False), ("cpu", True)):  # what another device, or a try, has shown is no verdict
        carried.clear()
        accept(device, tmp_path, 60.0, small=small, command="another")
        assert carried == list(STAGES)
    assert not accept("cpu", tmp_path, 60.0, command="again")
    carried.clear()
    accept("cpu", tmp_path, 60.0, only=["decode"], command="third")
    assert carried == ["decode"]
    carried.clear()
    accept("cpu", tmp_path, 0.0, command="fourth")
    assert carried == []
    assert "pressure: not reached" in capsys.readouterr().out
    assert verdict(tmp_path)["not_met"] == ["pressure"]


def test_a_stage_that_is_skipped_is_a_bar_not_met_on_a_gpu(tmp_path, monkeypatch):
    def carry_out(name, stage, device, out, work, limit_s, *, small, so_far):
        return {
            "device": device,
            "small": small,
            "finished": True,
            "failures": [],
            "skipped": "why not" if name == "tests" else "",
            "facts": {},
            "seconds": 0,
        }

    monkeypatch.setattr(gpu_acceptance, "_carry_out", carry_out)
    for name in ("cpu", "gpu"):
        (tmp_path / name).mkdir()
    assert accept("cpu", tmp_path / "cpu", 60.0, command="it")
    assert not accept("cuda", tmp_path / "gpu", 60.0, command="it")
    assert verdict(tmp_path / "gpu")["not_met"] == ["tests"]


def test_what_is_not_installed_is_said_first_and_its_stages_fall_away(tmp_path, monkeypatch, capsys):
    carried: list[str] = []

    def carry_out(name, stage, device, out, work, limit_s, *, small, so_far):
        carried.append(name)
        return {
            "device": device,
            "small": small,
            "finished": True,
            "seconds": 0,
            "failures": [],
            "skipped": "",
            "facts": {},
        }

    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name == "simpy" else find(name, *more))
    monkeypatch.setattr(gpu_acceptance, "_carry_out", carry_out)
    assert not accept("cuda", tmp_path, 60.0, command="it")
    assert carried == ["machine", "decode", "kernels", "sweep"]  # what needs torch and triton only
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "pressure falls away: it needs simpy, which is not installed"
    assert verdict(tmp_path)["not_met"] == ["pressure", "tests", "validate", "loop"]
    monkeypatch.undo()
    monkeypatch.setattr(gpu_acceptance, "_carry_out", carry_out)
    carried.clear()
    assert accept("cuda", tmp_path, 60.0, command="it")  # it is there now
    assert carried == ["pressure", "tests", "validate", "loop"]


@pytest.mark.parametrize("stage", ["machine", "decode", "kernels"])
def test_what_needs_torch_and_triton_only_runs_where_nothing_else_is(stage, tmp_path):
    """On a machine without an index: in a process in which everything but torch, triton and numpy is said to be absent."""
    absent = (
        "simpy",
        "plotly",
        "pydantic",
        "typer",
        "rich",
        "pandas",
        "scipy",
        "pyarrow",
        "hypothesis",
        "transformers",
    )
    (tmp_path / "sitecustomize.py").write_text(
        f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
""",
        encoding="utf-8",
    )
    root = Path(gpu_acceptance.__file__).resolve().parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"}
    flags = ["--device", "cpu", "--limit", "60", "--small", "--out", str(tmp_path / "found.json")]
    command = [sys.executable, "-m", "experiments.acceptance.stages", stage, *flags]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["finished"]


def test_what_a_stage_has_found_is_written_down_while_it_goes_on(tmp_path, monkeypatch):
    """Whoever ends the run from outside finds in the folder what was known by then."""
    process = SimpleNamespace(returncode=0, waits=0)
    file, told = tmp_path / "stage.json", []

    def wait(timeout_s):
        process.waits += 1
        if process.waits == 1:
            file.write_text('{"facts": {"steps": 500}}', encoding="utf-8")
        if process.waits == 3:
            file.write_text('{"facts": {"steps": 1000}}', encoding="utf-8")
        if process.waits < 5:
            raise subprocess.TimeoutExpired("stage", timeout_s)

    process.wait = wait
    ended = gpu_acceptance._wait(process, file, gpu_acceptance.time.perf_counter() + 60, told.append)
    assert told == [{"facts": {"steps": 500}}, {"facts": {"steps": 1000}}]
    assert ended == "exit code 0 and no verdict; see acceptance.log"


def test_a_stage_that_dies_does_not_stop_the_next(tmp_path, monkeypatch):
    stage = type(STAGES["decode"])
    broken = stage(question="?", limit_s=60, run=STAGES["decode"].run)
    for name in list(STAGES):
        if name not in ("machine", "decode"):
            monkeypatch.delitem(STAGES, name)
    monkeypatch.setitem(STAGES, "machine", broken)
    starts = subprocess.Popen

    def dies(command, **settings):
        code = "import os; os.abort()" if command[3] == "machine" else "print('words of the second')"
        return starts([sys.executable, "-c", code], **settings)

    monkeypatch.setattr("experiments.gpu_acceptance.subprocess.Popen", dies)
    assert not accept("cpu", tmp_path, 60.0, small=True, command="it")
    found = verdict(tmp_path)
    assert found["not_met"] == ["machine", "decode"]
    assert found["stages"]["machine"]["failures"] == ["exit code -6 and no verdict; see acceptance.log"]
    assert found["stages"]["decode"]["failures"] == ["exit code 0 and no verdict; see acceptance.log"]
    assert "words of the second" in (tmp_path / "acceptance.log").read_text(encoding="utf-8")


def test_what_is_kept_is_small_and_flat(tmp_path, monkeypatch):
    out, work = tmp_path / "out", tmp_path / "work"
    out.mkdir()
    (work / "loop").mkdir(parents=True)
    (work / "loop" / "steps.csv").write_text("step\n", encoding="utf-8")
    (work / "tests.xml").write_bytes(b"x" * 100)
    assert keep(work / "loop", out) == keep(work / "tests.xml", out) == keep(work / "not there", out) == ""
    assert sorted(file.name for file in out.iterdir()) == ["loop.zip", "tests.xml"]
    monkeypatch.setattr("experiments.acceptance.kept.LARGEST_BYTES", 99)
    assert keep(work / "tests.xml", out) == "tests.xml has 100 B, more than 99, and was not kept"
    monkeypatch.setattr("experiments.acceptance.kept.LOG_BYTES", 4)
    log = out / "a.log"
    log.write_bytes(b"0123456789")
    shorten(log)
    assert log.read_bytes() == b"0123\n[2 B left out]\n6789"
    log.write_bytes(b"01234567")
    shorten(log)
    assert log.read_bytes() == b"01234567"


def test_a_folder_with_another_document_is_refused(tmp_path, capsys):
    (tmp_path / "acceptance.json").write_text("[]", encoding="utf-8")
    assert main(["--device", "cpu", "--small", "--out", str(tmp_path)]) == 2
    assert "is not what an acceptance run writes" in capsys.readouterr().err


def test_tests_that_need_the_device_for_themselves_are_run_alone(tmp_path, monkeypatch):
    ran: list[tuple[str, bool, bool]] = []

    class Passed(Dead):
        returncode = 0

    def start(command, **settings):
        junit = next(flag for flag in command if flag.startswith("--junitxml=")).partition("=")[2]
        Path(junit).write_text('<testsuite><testcase classname="a" name="b"/></testsuite>', encoding="utf-8")
        files = [Path(file).name for file in command if file.endswith(".py")]
        ran.append((command[command.index("-m", 2) + 1], "-n" in command, "test_real_bugs_memory.py" in files))
        assert "--continue-on-collection-errors" in command
        return Passed()

    monkeypatch.setattr("experiments.acceptance.processes.subprocess.Popen", start)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    job = Job(device="cuda", out=tmp_path / "tests.json", limit_s=60)
    STAGES["tests"].run(job)
    marks = "gpu and not slow and not benchmarks"
    assert ran == [(f"{marks} and not alone", True, True), (f"{marks} and alone", False, True)]
    assert (job.failures, job.facts["passed"]) == ([], 2)


def test_an_error_in_a_stage_is_a_bar_not_met(tmp_path, monkeypatch):
    def fails(job: Job) -> None:
        job.note(seen=1)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setitem(STAGES, "decode", type(STAGES["decode"])(question="?", limit_s=1, run=fails))
    out = tmp_path / "decode.json"
    assert stage_main(["decode", "--device", "cpu", "--out", str(out), "--limit", "9"]) == 1
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["finished"]
    assert found["facts"] == {"seen": 1}
    assert found["failures"] == ["RuntimeError: CUDA error: an illegal memory access was encountered"]


class Dead:
    """A process that ended as those do that the system kills for memory."""

    returncode = -9

    def wait(self, timeout_s=None) -> int:
        return self.returncode


@pytest.mark.parametrize(
    ("stage", "left_over", "document", "says"),
    [
        (
            "validate",
            "validate/0/validate.json",
            '{"cells": []}',
            "process 0 of 1 ended with exit code -9 and no verdict",
        ),
        ("tests", "tests.xml", "<testsuites/>", "pytest wrote nothing; exit code -9"),
    ],
)
def test_a_process_that_is_killed_is_a_bar_not_met_whatever_an_earlier_one_left(
    stage, left_over, document, says, tmp_path, monkeypatch
):
    (tmp_path / left_over).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / left_over).write_text(document, encoding="utf-8")
    monkeypatch.setattr("experiments.acceptance.processes.subprocess.Popen", lambda command, **settings: Dead())
    job = Job(device="cpu", out=tmp_path / f"{stage}.json", limit_s=60, small=True)
    STAGES[stage].run(job)
    assert job.failures == [says]


def test_scenarios_without_a_verdict_are_a_bar_not_met(tmp_path, monkeypatch):
    def verdict_on_nothing(command, **settings):
        out = Path(command[command.index("--out") + 1])
        out.mkdir(parents=True)
        (out / "validate.json").write_text('{"cells": []}', encoding="utf-8")
        return Dead()

    monkeypatch.setattr("experiments.acceptance.processes.subprocess.Popen", verdict_on_nothing)
    job = Job(device="cpu", out=tmp_path / "validate.json", limit_s=60, small=True)
    STAGES["validate"].run(job)
    assert job.failures == ["0 cells of 1 have a verdict"]


def test_a_loop_that_is_run_anew_does_not_find_the_earlier_one(tmp_path, monkeypatch):
    steps = tmp_path / "loop" / "steps"
    steps.mkdir(parents=True)
    monkeypatch.setattr("experiments.calibration_loop.main", lambda flags: 2 if steps.exists() else 0)
    job = Job(device="cpu", out=tmp_path / "loop.json", limit_s=60, small=True)
    STAGES["loop"].run(job)
    assert job.failures == []


def test_counts_and_failures_are_read_from_what_pytest_wrote(tmp_path):
    file = tmp_path / "junit.xml"
    file.write_text(
        '<testsuites><testsuite><testcase classname="t.a" name="good"/><testcase classname="t.a" name="bad">'
        '<failure message="assert 1 == 2&#10;more">long</failure></testcase><testcase classname="t.b" name="no">'
        '<skipped message="why"/></testcase></testsuite></testsuites>',
        encoding="utf-8",
    )
    assert read_junit(file) == {"passed": 1, "skipped": 1, "failed": ["t.a::bad: assert 1 == 2"]}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--device", "cpu"], "--device is cpu, which has nothing to accept; add --small"),
        (["--device", "tpu"], "device is 'tpu'"),
        (["--device", "cpu", "--small", "--budget", "never"], "--budget is 'never'"),
    ],
)
def test_bad_input_is_said_in_one_line(flags, words, tmp_path, capsys):
    assert main([*flags, "--out", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1
    taken = tmp_path / "taken"
    taken.write_text("notes", encoding="utf-8")
    assert main(["--device", "cpu", "--small", "--out", str(taken)]) == 2
    assert "is a file; a folder is needed" in capsys.readouterr().err
