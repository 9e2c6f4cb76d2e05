"""How far the embedded profiles are from what others measured: `python -m experiments.validate_profiles DATA [L1 L2 L3 L4 L5 self]`.

Splits, statistics and thresholds were fixed before the figures were looked at. Every level prints the target, the fitted
profile and the roofline on the same footing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from calibration.host import Correction, CorrectionFit, corrected, fit_correction, text
from calibration.judge import judge
from calibration.readers.splitwise import noise_floor
from calibration.runs import RecordedRun, read_run
from calibration.tent import Array
from calibration.twin import SimulatedRun, preempted, simulate_requests
from calibration.uncertainty import draws, interval
from sim.catalog.gpus import gpu
from sim.catalog.models import model_shape
from sim.core.request import RequestSpec
from sim.costs import Roofline
from sim.costs.fitted import FOLDER, fitted_cost, profile_names
from sim.costs.profile import FittedProfile
from sim.costs.profile_file import read_profile
from sim.costs.protocol import CostModel

from .exp0_sessions import UNCACHED, with_sessions
from .profile_sources import A100, HOST_REQUESTS, PREFIXES, RTX_4090, RTX_PRO_6000, RUNS, Case
from .validate_loop import print_self_test
from .validate_silicon import print_silicon

A100_CALIBRATED_ON = ("0.5", "0.84")
KERNELS_ONLY = "profile, kernels only"
STATED_GAPS = "profile, with stated gaps"
DRAWS = 12
"""Draws of a profile's uncertainty that are simulated."""
POOLS = range(1600, 2600, 50)
"""Pool sizes that are tried, in blocks, for the one under which exp-0 at 0.84 a second queues as it did."""


def print_kernels(data: Path) -> None:
    """L1: kernel points and axes that the fits did not see, as stored in each profile."""
    print("\nL1 held-out kernel points (target: median 5 %, 95th percentile 15 %; held-out axis: median 10 %)")
    for kind, noise in noise_floor(data / "batch" / "splitwise" / "perf_model.csv").items():
        print(f"  noise floor, Splitwise's repeats, {kind:<50} {noise['median']:7.1%} {noise['p95']:7.1%}")
    for name in profile_names():
        error = read_profile(FOLDER / f"{name}.json").data["error"]
        for key, value in error.items():
            if key.startswith("held_out"):
                noise_p95 = value.get("same_tile_noise_p95")
                print(
                    f"  {name:<36} {key:<46} {value['median']:7.1%} {value['p95']:7.1%}"
                    + (f" {value['points']:>6} points" if "points" in value else "")
                    + (f", noise of the table {noise_p95:.1%}" if noise_p95 else "")
                )


def costs_of(case: Case) -> dict[str, FittedProfile | Roofline]:
    """The embedded profile and the roofline, for the model and GPU of a case."""
    model, device = model_shape(case.settings["model"]), gpu(case.settings["gpu"])
    ranks = case.settings.get("tensor_parallel_size", 1)
    embedded = fitted_cost(case.profile, model, device, tensor_parallel_size=ranks)
    return {
        KERNELS_ONLY: corrected(embedded, Correction()),
        f"{STATED_GAPS} of {embedded.terms.gap_s * 1e3:.2f} ms a step": embedded,
        "roofline": Roofline(model, device, tensor_parallel_size=ranks),
        **(
            {
                "composed from the card's kernel terms": fitted_cost(
                    device.name, model, device, tensor_parallel_size=ranks
                )
            }
            if case.profile != device.name
            else {}
        ),
    }


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
        if label.startswith(STATED_GAPS):
            _print_intervals(case, run, cost)


def _print_intervals(case: Case, run: RecordedRun, cost: CostModel) -> None:
    """What the profile's own uncertainty makes of the predictions."""
    twins = [simulate_requests(case.scenario(), run.requests, one) for one in draws(cost, DRAWS)]
    shown = []
    for name, of in (("ttft", "ttft_s"), ("tpot", "tpot_s"), ("e2el", "e2el_s")):
        measured = float(np.nanmean(getattr(run, of)))
        low, high = interval([float(np.nanmean(getattr(twin, of))) / measured - 1 for twin in twins])
        shown.append(f"{name} mean [{low:+.1%}, {high:+.1%}]")
    low, high = interval([twin.makespan_s / run.makespan_s - 1 for twin in twins])
    print(f"    90 % of {DRAWS} draws of the profile: {', '.join(shown)}, makespan [{low:+.1%}, {high:+.1%}]")


def _print_preempted(run: RecordedRun, twin: SimulatedRun) -> None:
    if run.ticks_s is None or run.scheduled_s is None or "kv_usage" not in run.trajectories:
        return
    measured = preempted(run.scheduled_s, run.finished_s, run.ticks_s, run.trajectories["running"])
    simulated = twin.at(run.ticks_s)["preempted"]
    print(
        f"    preempted more than one in {int((measured > 1).sum())} ticks measured, {int((simulated > 1).sum())} simulated; "
        f"most {measured.max():.0f} and {simulated.max():.0f}"
    )


def print_cliff(data: Path) -> None:
    """L4: exp-0, Llama-3.1-70B on two A100."""
    folder = data / "runs" / "llm-d-benchmark" / A100.run
    runs = rates_of(folder)
    requests = with_sessions(runs, A100_CALIBRATED_ON)
    print("\nL4 2 x A100, Llama-3.1-70B (targets at 0.67 and 1.0: TPOT p50 5 %, TTFT p99 25 %)")

    def twins(cost: CostModel, blocks: int | None = None) -> Callable[[str], SimulatedRun]:
        return lambda rate: simulate_requests(A100.scenario(num_gpu_blocks_override=blocks), requests[rate], cost)

    for label, cost in costs_of(A100).items():
        _print_rates(label, runs, twins(cost))
    fit, cost = two_rates_correction(runs, requests)
    busy = A100_CALIBRATED_ON[-1]
    blocks = min(POOLS, key=lambda size: _queue_miss(runs[busy], twins(cost, size)(busy)))
    left = ", ".join(f"{off:+.1%}" for off in fit.residuals)
    label = f"corrected on 0.5 and 0.84 only: {text(fit.found)} (left: {left}), pool {blocks:,} blocks"
    _print_rates(label, runs, twins(cost, blocks))


def rates_of(folder: Path) -> dict[str, RecordedRun]:
    """The runs in `folder`, by their rate, lowest first: whichever rates are there."""
    found = {path.stem.removeprefix("qps_"): path for path in folder.glob("qps_*.csv")}
    return {rate: read_run(found[rate]) for rate in sorted(found, key=float)}


def two_rates_correction(
    runs: dict[str, RecordedRun], requests: dict[str, tuple[RequestSpec, ...]]
) -> tuple[CorrectionFit, FittedProfile]:
    """The kernels of the A100 with times from the mean TPOT and the median TTFT of the two calibration rates, over the requests that
    found nothing cached.
    """
    kernels = costs_of(A100)[KERNELS_ONLY]
    assert isinstance(kernels, FittedProfile)

    def of(sources: Sequence[RecordedRun | SimulatedRun]) -> Array:
        found = [(np.nanmean(one.tpot_s[UNCACHED]), np.median(one.ttft_s[UNCACHED])) for one in sources]
        return np.asarray(found).ravel()

    def predict(times: Correction) -> Array:
        cost = corrected(kernels, times)
        return of([simulate_requests(A100.scenario(), requests[rate], cost) for rate in A100_CALIBRATED_ON])

    fit = fit_correction(predict, of([runs[rate] for rate in A100_CALIBRATED_ON]), ("step_s", "token_s", "seq_s"))
    return fit, corrected(kernels, fit.found)


def _queue_miss(run: RecordedRun, twin: SimulatedRun) -> float:
    """How far the 99th percentile of TTFT is off, as a logarithm: it tells the pool's size, for the start-up log was not kept."""
    return abs(float(np.log(np.percentile(twin.ttft_s, 99) / np.percentile(run.ttft_s, 99))))


def _print_rates(label: str, runs: dict[str, RecordedRun], simulate: Callable[[str], SimulatedRun]) -> None:
    print(f"  {label}")
    for rate, run in runs.items():
        twin = simulate(rate)
        tpot = np.nanmedian(twin.tpot_s) / np.nanmedian(run.tpot_s) - 1
        tails = [(float(np.percentile(run.ttft_s, q)), float(np.percentile(twin.ttft_s, q))) for q in (50, 90, 99)]
        ttft = "  ".join(
            f"p{q} {a:.2f} s -> {b:.2f} s ({b / a - 1:+.0%})" for q, (a, b) in zip((50, 90, 99), tails, strict=True)
        )
        print(f"    {rate:>4} a second: TPOT p50 {tpot:+.1%}   TTFT {ttft}   {twin.summary['num_gpu_blocks']:,} blocks")


LEVELS: dict[str, Callable[[Path], None]] = {
    "L1": print_kernels,
    "L2": print_unpressed,
    "L3": print_pressed,
    "L4": print_cliff,
    "L5": print_silicon,
    "self": print_self_test,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the chosen levels."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="folder of the public data (shared/data)")
    parser.add_argument("levels", nargs="*", help=f"of {', '.join(LEVELS)}; default: all")
    chosen = parser.parse_args(argv)
    levels: Iterable[str] = chosen.levels or LEVELS
    for level in levels:
        LEVELS[level](chosen.data)


if __name__ == "__main__":
    main()
