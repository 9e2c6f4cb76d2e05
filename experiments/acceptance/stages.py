"""The stages: what each asks of the device. `python -m experiments.acceptance.stages NAME …` carries one out in this process."""

from __future__ import annotations

import argparse
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .job import Job, SkippedError
from .processes import run_tests, run_validate

COPY_SHARE = 0.85
"""Share of the measured copy bandwidth that paged decode attention is to reach."""
BARRED = ((64, 8192), (128, 4096))
"""(sequences, KV tokens of each) at which it is to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage."""

    question: str
    limit_s: float
    """Most seconds that it may take."""
    run: Callable[[Job], None]
    needs: tuple[str, ...] = ()
    """Modules that it needs besides torch and numpy."""
    makes: tuple[str, ...] = ()
    """Files and folders beside its findings that are worth keeping."""
    required: bool = True
    """Whether the acceptance fails when it was not reached."""


def machine(job: Job) -> None:
    """What the figures depend on."""
    from gpu.machine import machine_facts, now
    from gpu.nvml import nvml_reading

    job.note(**machine_facts(job.device), date=now(), nvml=nvml_reading(job.device))


def decode(job: Job) -> None:
    """Decode attention of one layer beside a copy measured in the same run, and beside what others published."""
    ops, speed, published = _bench(job)
    from gpu import bench
    from gpu.decode_account import SHAPES
    from gpu.decode_error import LARGEST_ERROR

    rows: list[dict[str, Any]] = []
    for shape in (*BARRED, *(each for each in SHAPES if each not in BARRED)):
        timing = bench.time_decode(ops, *shape, speed)
        rows.append(published(timing))
        job.note(decode=rows)
        if not (timing.relative_error is not None and timing.relative_error <= LARGEST_ERROR):  # NaN neither
            job.fail(f"{timing.name}: off by {timing.relative_error} of its answer, more than {LARGEST_ERROR}")
        if shape in BARRED and timing.copy_share < COPY_SHARE:
            job.fail(f"{timing.name}: {timing.copy_share:.1%} of a copy, less than {COPY_SHARE:.0%}")


def kernels(job: Job) -> None:
    """All other kernels timed; all kernels compiled with this machine's triton and held to their budgets."""
    from ..kernels import compile_all

    if job.cuda:
        from gpu import bench

        ops, speed, published = _bench(job)
        job.note(kernels=[published(timing) for timing in bench.time_others(ops, speed)])
    reports = compile_all((_target(job),), "rms_norm" if job.small else None)
    job.note(compiled=[report.as_json() for report in reports])
    job.fail(*(f"{report.name}: {'; '.join(report.problems)}" for report in reports if not report.ok))


def sweep(job: Job) -> None:
    """Decode attention with other tiles, stages and splits: not a bar, but what to choose from."""
    ops, speed, _ = _bench(job)
    from gpu import bench

    rows: list[dict[str, Any]] = []
    for shape in BARRED:
        for timing in bench.sweep_decode(ops, *shape, speed):
            rows.append({"name": timing.name, "microseconds": timing.microseconds, "copy_share": timing.copy_share})
            job.note(sweep=rows)


def pressure(job: Job) -> None:
    """An 8B model under pressure for ten thousand steps: no leak, and no allocator call in steady state."""
    from .pressure import PressureSettings, run_pressure

    settings = PressureSettings.of(job.device, small=job.small, limit_s=job.left_s - 10)
    figures, missed = run_pressure(settings, lambda so_far: job.note(**so_far))
    job.note(**figures)
    job.fail(*missed)


def loop(job: Job) -> None:
    """Measure, fit, predict a scenario that was not measured, run it."""
    from ..calibration_loop import main

    folder = job.out.parent / "loop"
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier try: the loop adds to none
    code = main(["--device", job.device, "--budget", "10s" if job.small else "40s", "--out", str(folder)])
    job.note(exit_code=code)
    if code:
        job.fail(f"the loop did not close: exit code {code}")


def _bench(job: Job) -> tuple[Any, float, Callable[[Any], dict[str, Any]]]:
    """Kernels, the copy bandwidth, and a function that sets published figures beside a timing."""
    if not job.cuda:
        raise SkippedError("kernels are timed on CUDA devices only")
    import torch

    from gpu import bench
    from gpu.device import find_device, make_current
    from gpu.ops import Ops

    from ..kernels import published_times, timing_row

    device = find_device(job.device)
    make_current(device)
    copied = bench.time_copy(device)
    found, why_not = published_times(None, torch.cuda.get_device_name(device))
    job.note(copy_gb_per_s=copied.copy_bytes_per_s / 1e9, published_note=why_not)
    return Ops(device, implementation="triton"), copied.copy_bytes_per_s, lambda timing: timing_row(timing, found)


def _target(job: Job) -> str:
    if not job.cuda:
        return "sm_90"
    import torch

    from gpu.compile_check import TARGETS

    major, minor = torch.cuda.get_device_capability()
    name = f"sm_{major}{minor}"
    if name not in TARGETS:
        raise SkippedError(f"budgets are kept for {', '.join(TARGETS)}, not for {name}")
    return name


WORLD = ("simpy", "pydantic")
"""What the simulated world needs."""
STAGES: dict[str, Stage] = {
    "machine": Stage(question="What is measured?", limit_s=60, run=machine),
    "decode": Stage(
        question="Does decode attention reach its share of a copy?", limit_s=100, run=decode, needs=("triton",)
    ),
    "pressure": Stage(
        question="Ten thousand steps: no leak, no allocator call?", limit_s=260, run=pressure, needs=WORLD
    ),
    "tests": Stage(
        question="Are the tests that need a GPU green?", limit_s=260, run=run_tests,
        needs=("pytest", "hypothesis", "typer", "rich", *WORLD), makes=("tests.xml", "tests-alone.xml"),
    ),
    "validate": Stage(
        question="Do both worlds agree?", limit_s=260, run=run_validate, needs=("typer", "rich", *WORLD), makes=("validate",)
    ),
    "kernels": Stage(
        question="How fast are the other kernels, and do all keep their budgets?", limit_s=120, run=kernels,
        needs=("triton",),
    ),
    "sweep": Stage(
        question="Would another tile be faster?", limit_s=120, run=sweep, needs=("triton",), required=False
    ),
    "loop": Stage(
        question="Does the calibration loop close?", limit_s=180, run=loop,
        needs=("scipy", "pandas", "plotly", *WORLD), makes=("loop",), required=False,
    ),
}  # fmt: skip
"""In the order in which they are asked: what is worth most for the time it takes comes first."""


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out one stage; 0 when it has met its bars."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m experiments.acceptance.stages")
    parser.add_argument("stage", choices=list(STAGES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True, help="the file that the findings go to")
    parser.add_argument("--limit", type=float, required=True, help="seconds that the stage may take")
    parser.add_argument("--small", action="store_true", help="the smallest sizes: to try the run, not the device")
    chosen = parser.parse_args(argv)
    job = Job(device=chosen.device, out=chosen.out, limit_s=chosen.limit, small=chosen.small)
    try:
        STAGES[chosen.stage].run(job)
    except SkippedError as reason:
        job.skipped = str(reason)
    except Exception as error:
        traceback.print_exc()
        job.failures.append(f"{type(error).__name__}: {error}")
    job.finished = True
    job.write()
    return 1 if job.failures else 0


if __name__ == "__main__":
    sys.exit(main())
