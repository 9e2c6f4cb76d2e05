"""How far the embedded profiles are from what others measured: `python -m experiments.validate_profiles DATA [L1 L2 L3 L4 L5 gaps self]`.

Splits, statistics and thresholds were fixed before the figures were looked at; what was changed in a model afterwards, and on
what grounds, is said in docs/validation.md. Every level prints the target, the fitted
profile and the roofline on the same footing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from calibration.judging.judge import judge
from calibration.judging.uncertainty import draws, next_value
from calibration.numerics.tent import Array
from calibration.readers.splitwise import noise_floor
from calibration.recorded.host import corrected, fit_correction, text
from calibration.recorded.runs import RecordedRun, read_run
from calibration.recorded.twin import SimulatedRun, preempted, simulate_requests
from sim.costs.fitted import FOLDER, profile_names
from sim.costs.profile import FittedProfile
from sim.costs.profile_file import read_profile
from sim.costs.protocol import CostModel

from .bad_input import exit_status
from .published.case_costs import COMPOSED, KERNELS_ONLY, STATED_GAPS, costs_of
from .published.cliff import print_cliff
from .published.gaps import print_gaps
from .published.profile_sources import HOST_REQUESTS, PREFIXES, RTX_4090, RTX_PRO_6000, RUNS, Case
from .published.silicon import print_silicon
from .self_test import print_self_test

DRAWS = 12
"""Draws of a profile's uncertainty that are simulated."""


def print_kernels(data: Path) -> None:
    """L1: kernel points and axes that the fits did not see, as stored in each profile."""
    print("\nL1 held-out kernel points (target: median 5 %, 95th percentile 15 %; held-out axis: median 10 %)")
    for kind, noise in noise_floor(data / "batch" / "splitwise" / "perf_model.csv").items():
        print(f"  noise floor, Splitwise's repeats, {kind:<50} {noise['median']:7.1%} {noise['p95']:7.1%}")
    for name in profile_names():
        error = read_profile(FOLDER / f"{name}.json").data["error"]
        for key, value in error.items():
            if key.startswith("held_out"):
                noise_p95, left_out = value.get("same_tile_noise_p95"), value.get("left_out_points")
                print(
                    f"  {name:<36} {key:<46} {value['median']:7.1%} {value['p95']:7.1%}"
                    + (f" {value['points']:>6} points" if "points" in value else "")
                    + (f", noise of the table {noise_p95:.1%}" if noise_p95 else "")
                    + (
                        f", deeper but faster {value['deeper_faster_share']:.1%}"
                        if "deeper_faster_share" in value
                        else ""
                    )
                    + (f", {left_out} calls served by the cache left out" if left_out else "")
                )


def print_unpressed(data: Path) -> None:
    """L2: RTX PRO 6000, no memory pressure."""
    run = read_run(data / RUNS / RTX_PRO_6000.run, data / PREFIXES)
    costs: dict[str, CostModel] = dict(costs_of(RTX_PRO_6000))
    label, cost = first_requests_correction(run)
    costs[label] = cost
    print("\nL2 RTX PRO 6000, Llama-3.1-8B (targets: TPOT mean 2 %, E2E mean 3 %, makespan 3 %, TTFT p90 10 %)")
    print("  to beat, a peer's own figures: TPOT -1.0 %, E2E -1.8 %, TTFT mean -4.0 %")
    _print_runs(RTX_PRO_6000, run, costs)


def first_requests_correction(run: RecordedRun) -> tuple[str, FittedProfile]:
    """The kernels of the RTX PRO 6000 with times a step and a token from the means of the run's first requests and nothing else."""
    kernels = costs_of(RTX_PRO_6000)[KERNELS_ONLY]
    assert isinstance(kernels, FittedProfile)
    scenario = RTX_PRO_6000.scenario()

    def of(source: RecordedRun | SimulatedRun) -> Array:
        return np.asarray([np.nanmedian(values[:HOST_REQUESTS]) for values in (source.tpot_s, source.ttft_s)])

    fit = fit_correction(
        lambda times: of(simulate_requests(scenario, run.requests, corrected(kernels, times))), of(run)
    )
    return f"corrected on the first {HOST_REQUESTS} requests: {text(fit.found)}", corrected(kernels, fit.found)


def print_pressed(data: Path) -> None:
    """L3: RTX 4090 under KV saturation."""
    run = read_run(data / RUNS / RTX_4090.run, data / PREFIXES)
    print("\nL3 RTX 4090, Llama-3.1-8B, KV saturated, pool sized by the ledger (the run had 2,588 blocks)")
    print("  targets: TTFT mean 1.5 %, TPOT mean 1 %, makespan 1 %, TTFT p90 and p99 2 %, KV mean 2 points,")
    print("           running and waiting within 5 %, ticks with more than one preempted 25 %, most preempted 30 %")
    print(
        "  to beat, a peer's own figures: TTFT +0.6 %, TPOT +0.2 %, latency +0.5 %; plain kernel sum: 2.8 / 1.0 / 1.7 %"
    )
    _print_runs(RTX_4090, run, dict(costs_of(RTX_4090)))


def _print_runs(case: Case, run: RecordedRun, costs: dict[str, CostModel]) -> None:
    for label, cost in costs.items():
        twin = simulate_requests(case.scenario(), run.requests, cost)
        judged = judge(run, twin)
        errors = {metric.name: metric.error for metric in judged.metrics}
        print(f"  {label}: {twin.summary['num_gpu_blocks']:,} blocks, verdict {judged.verdict}")
        for name in ("ttft", "tpot", "e2el"):
            figures = (
                f"{statistic} {errors[f'{name}_{statistic}_s']:+.2%}" for statistic in ("mean", "p50", "p90", "p99")
            )
            print(f"    {name:<9} {'  '.join(figures)}")
        print(f"    makespan  {errors['makespan_s']:+.2%}")
        for path in judged.trajectories:
            means = f"{path.measured_mean:.3g} measured, {path.predicted_mean:.3g} simulated"
            print(f"    {path.name:<9} distance {path.distance:.1%}, mean {means}")
        _print_preempted(run, twin)
        if label.startswith((STATED_GAPS, COMPOSED)):
            _print_intervals(case, run, cost)


def _print_intervals(case: Case, run: RecordedRun, cost: CostModel) -> None:
    """What the profile's own uncertainty makes of the predictions."""
    twins = [simulate_requests(case.scenario(), run.requests, one) for one in draws(cost, DRAWS)]
    shown = []
    for name, of in (("ttft", "ttft_s"), ("tpot", "tpot_s"), ("e2el", "e2el_s")):
        measured = float(np.nanmean(getattr(run, of)))
        low, high = next_value([float(np.nanmean(getattr(twin, of))) / measured for twin in twins])
        shown.append(f"{name} mean [{low - 1:+.1%}, {high - 1:+.1%}]")
    low, high = next_value([twin.makespan_s / run.makespan_s for twin in twins])
    print(
        f"    90 % intervals by {DRAWS} draws of the profile: {', '.join(shown)}, makespan [{low - 1:+.1%}, {high - 1:+.1%}]"
    )


def _print_preempted(run: RecordedRun, twin: SimulatedRun) -> None:
    if run.ticks_s is None or run.scheduled_s is None or "kv_usage" not in run.trajectories:
        return
    measured = preempted(run.scheduled_s, run.finished_s, run.ticks_s, run.trajectories["running"])
    simulated = twin.at(run.ticks_s)["preempted"]
    print(
        f"    preempted more than one in {int((measured > 1).sum())} ticks measured, {int((simulated > 1).sum())} simulated; "
        f"most {measured.max():.0f} and {simulated.max():.0f}"
    )


LEVELS: dict[str, Callable[[Path], None]] = {
    "L1": print_kernels,
    "L2": print_unpressed,
    "L3": print_pressed,
    "L4": print_cliff,
    "L5": print_silicon,
    "gaps": print_gaps,
    "self": print_self_test,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the chosen levels. The exit status is 2 on bad input."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m experiments.validate_profiles")
    parser.add_argument("data", type=Path, help="folder of the public data (shared/data)")
    parser.add_argument("levels", nargs="*", metavar="LEVEL", help=f"of {', '.join(LEVELS)}; default: all")
    chosen = parser.parse_args(argv)
    unknown = [level for level in chosen.levels if level not in LEVELS]
    if unknown:
        parser.error(f"there is no level {unknown[0]!r}; there are {', '.join(LEVELS)}")

    def work() -> int:
        for level in chosen.levels or LEVELS:
            LEVELS[level](chosen.data)
        return 0

    return exit_status(parser.prog, work)


if __name__ == "__main__":
    sys.exit(main())
