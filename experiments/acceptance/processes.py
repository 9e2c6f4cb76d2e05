"""The two stages that are other commands: the tests marked `gpu`, and `kvtwin validate` in several processes at once."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from sim.core.policies import PRESETS

from .job import Job, SkippedError

ROOT = Path(__file__).resolve().parents[2]
WORKERS = 8
"""Processes at once, at most: the device is shared by them, and most of their time goes to compiling and to the host."""
SMALL_TESTS = ("test_real_device.py",)
SELECTED = "gpu and not slow and not benchmarks"
NO_TESTS = 5
"""Pytest's exit code when nothing was selected."""


def run_tests(job: Job) -> None:
    """The tests marked `gpu`, those apart that are stages of their own."""
    folder = ROOT / "tests"
    if not folder.is_dir() or importlib.util.find_spec("pytest") is None:
        raise SkippedError("there are no tests, or no pytest, in this installation")
    marked = [
        file for file in sorted(folder.rglob("test_*.py")) if "pytest.mark.gpu" in file.read_text(encoding="utf-8")
    ]
    if job.small:
        marked = [file for file in marked if file.name in SMALL_TESTS]
    job.note(selected=SELECTED, files=[file.name for file in marked])
    side_by_side = importlib.util.find_spec("xdist") is not None and not job.small
    counts = Counter[str]()
    alone = [file for file in marked if "pytest.mark.alone" in file.read_text(encoding="utf-8")]
    passes = [("tests", f"{SELECTED} and not alone", marked, side_by_side)]
    for name, selected, files, together in (*passes, ("tests-alone", f"{SELECTED} and alone", alone, False)):
        if files:
            counts += _one_pass(job, job.out.with_name(f"{name}.xml"), selected, files, together=together)
            job.note(passed=counts["passed"], skipped=counts["skipped"])
    if job.cuda and not counts["passed"]:
        job.fail("no test was run")


def _one_pass(job: Job, junit: Path, selected: str, files: Sequence[Path], *, together: bool) -> Counter[str]:
    """Run the tests of one selection; how many passed and were skipped."""
    junit.unlink(missing_ok=True)  # an earlier run's is not this one's
    command = [
        sys.executable, "-m", "pytest", "-m", selected, "-q", "-p", "no:cacheprovider", "-p", "no:benchmark",
        "-W", "default",  # another release of torch may warn of other things: no bar
        "--continue-on-collection-errors",  # a file whose imports are missing is an error; the others are run
        f"--junitxml={junit}", *(["-n", str(_workers())] if together else []), *map(str, files),
    ]  # fmt: skip
    environment = {**os.environ, **({"REQUIRE_GPU": "1"} if job.cuda else {})}
    process, before = subprocess.Popen(command, cwd=ROOT, env=environment), len(job.failures)
    try:
        process.wait(max(job.left_s - 20, 1))
    except subprocess.TimeoutExpired:
        job.fail("the tests did not end in time")
        _interrupt(process)
    if not junit.is_file():
        job.fail(f"pytest wrote nothing; exit code {process.returncode}")
        return Counter()
    found = read_junit(junit)
    job.fail(*found["failed"])
    if process.returncode not in (0, NO_TESTS) and len(job.failures) == before:
        job.fail(f"pytest ended with exit code {process.returncode}, and no test failed")
    return Counter(passed=found["passed"], skipped=found["skipped"])


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """End pytest so that it writes down what it has; if it does not, end it all the same."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def read_junit(junit: Path) -> dict[str, Any]:
    """Counts, and the first line of every failure, of a JUnit file."""
    cases = list(ElementTree.parse(junit).getroot().iter("testcase"))
    failed = []
    for case in cases:
        for problem in (*case.iter("failure"), *case.iter("error")):
            message = (problem.get("message") or "").partition("\n")[0]
            failed.append(f"{case.get('classname')}::{case.get('name')}: {message[:300]}")
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {"passed": len(cases) - len(failed) - skipped, "skipped": skipped, "failed": failed}


def run_validate(job: Job) -> None:
    """All scenarios under all presets, the scenarios dealt out over several processes."""
    from ..validation import SCENARIOS, Cell

    names = list(SCENARIOS)[:1] if job.small else list(SCENARIOS)
    presets = ["vllm-v1"] if job.small else list(PRESETS)
    workers = min(_workers(), len(names))
    folder = job.out.parent / "validate"
    running = [_validate(job, names[turn::workers], folder / str(turn), presets) for turn in range(workers)]
    late: set[int] = set()
    for turn, process in enumerate(running):
        try:
            process.wait(max(job.left_s - 10, 1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            late.add(turn)
            job.fail(f"process {turn} of {workers} did not end in time: {', '.join(names[turn::workers])}")
    cells: list[Cell] = []
    for turn, process in enumerate(running):
        file = folder / str(turn) / "validate.json"
        if file.is_file():
            cells += [Cell(**cell) for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]]
        elif turn not in late:
            job.fail(f"process {turn} of {workers} ended with exit code {process.returncode} and no verdict")
    if not job.failures and len(cells) != len(names) * len(presets):
        job.fail(f"{len(cells)} cells of {len(names) * len(presets)} have a verdict")
    wrong = [f"{cell.scenario} under {cell.preset}: {cell.error or 'differs'}" for cell in cells if not cell.ok]
    job.note(cells=len(cells), well=len(cells) - len(wrong), steps=sum(cell.facts.get("steps", 0) for cell in cells))
    job.fail(*wrong)


def _validate(job: Job, scenarios: list[str], out: Path, presets: list[str]) -> subprocess.Popen[bytes]:
    (out / "validate.json").unlink(missing_ok=True)  # an earlier run's is not this one's
    flags = [flag for name in scenarios for flag in ("--scenario", name)]
    flags += [flag for name in presets for flag in ("--preset", name)]
    run = "import sys; from experiments.cli import main; sys.exit(main())"
    return subprocess.Popen(
        [sys.executable, "-c", run, "validate", "--device", job.device, "--out", str(out), *flags], cwd=ROOT
    )


def _workers() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(WORKERS, cores // 2))
