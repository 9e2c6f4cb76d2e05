"""`kvtwin run`: one run, its table on the terminal, its files where asked for."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.results.files import write_csv

from .decision_log import DecisionLogFile
from .outputs import make_room
from .peak_by_op import peak_columns
from .terminal import Progress, print_json, say

if TYPE_CHECKING:
    from sim.results.result import Result
    from sim.scenario import Scenario


def run(
    scenario: Scenario,
    *,
    decision_log: Path | None = None,
    out: Path | None = None,
    html: Path | None = None,
    json: bool = False,
    peak_step: int | None = None,
    memory_snapshot: Path | None = None,
    clock: str | None = None,
    profile_draws: int = 0,
) -> int:
    """Simulate or run for real, write the files, print. Returns the exit code.

    Raises CalibrationError, before anything runs, for draws of a profile that span no interval; StartUpError, after its log was
    written to `out`, when the engine does not start; PeakStepError, after the results were written, when the run had no such step.
    """
    from sim.memory.start_up import StartUpError
    from sim.results.console import print_summary
    from sim.results.files import write_text

    from .prediction_intervals import drawn_prices, interval_lines, prediction_intervals
    from .real_progress import RealProgress
    from .real_run import PeakStepError, run_scenario

    costs = drawn_prices(scenario, profile_draws)
    make_room(out, html, memory_snapshot, decision_log)
    with Progress("kvtwin run") as progress, DecisionLogFile(decision_log) if decision_log else nullcontext() as log:
        progress.say("simulating" if scenario.run.executor != "torch" else "running for real")
        try:
            result = run_scenario(
                scenario,
                decision_log=log.write if log else None,
                peak_step=peak_step,
                memory_snapshot=memory_snapshot,
                clock=clock,
                progress=RealProgress(progress.say, progress.note),
            )
        except StartUpError as error:
            if out is not None:
                write_text(out / "oom.log", error.log)
            raise
        except PeakStepError as error:
            _write(error.result, out, html)  # what ran is not lost
            raise
        if costs:
            progress.say(f"simulating {profile_draws} draws of the profile")
            summary: Any = result.summary
            summary["prediction_intervals"] = prediction_intervals(scenario, costs)
    written = _write(result, out, html) + [path for path in (decision_log, memory_snapshot) if path is not None]
    if json:
        print_json(result.summary)
        return 0
    print_summary(result)
    for line in _device_lines(result.summary):
        say(line)
    if costs:
        for line in interval_lines(result.summary["prediction_intervals"]):
            say(line)
    for path in written:
        say(f"wrote {path}")
    return 0


def _device_lines(summary: Mapping[str, Any]) -> list[str]:
    """What a real run says beside its summary: which operation held the peak, and whatever fell back."""
    lines = []
    for executor in summary.get("executors", ()):
        if "peak_by_op" in executor:
            peak = executor["peak_by_op"]
            lines.append(
                f"step {peak['step']}, {peak['tokens']} tokens of {peak['sequences']} sequences: {peak['answer']}"
            )
        lines += [
            f"warning: {entry['operation']} fell back to {entry['served']} {entry['calls']} times: {entry['reason']}"
            for entry in executor["fallbacks"]
        ]
        eager = (executor["graphs"] or {}).get("eager_steps", {})
        lines += [
            f"note: {steps} decode steps went without a graph: {reason}"
            for reason, steps in eager.items()
            if reason.startswith("more than")
        ]
    return lines


def _write(result: Result, out: Path | None, html: Path | None) -> list[Path]:
    written: list[Path] = []
    if out is not None:
        written.append(result.save(out))
        for executor in result.summary.get("executors", ()):
            if "peak_by_op" in executor:
                written.append(out / "peak_by_op.csv")
                write_csv(written[-1], peak_columns(executor["peak_by_op"]))
    if html is not None:
        written.append(result.report(html))
    return written
