"""L4: the capacity cliff of exp-0, Llama-3.1-70B on two A100, corrected on two of its rates and judged on the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from calibration.numerics.tent import Array
from calibration.recorded.host import Correction, CorrectionFit, corrected, fit_correction, text
from calibration.recorded.runs import RecordedRun, read_run
from calibration.recorded.twin import SimulatedRun, simulate_requests
from sim.core.request import RequestSpec
from sim.costs.profile import FittedProfile
from sim.costs.protocol import CostModel

from .case_costs import KERNELS_ONLY, costs_of
from .exp0_sessions import UNCACHED, with_sessions
from .profile_sources import A100

A100_CALIBRATED_ON = ("0.5", "0.84")
POOLS = range(1600, 2600, 25)
"""Pool sizes that are tried, in blocks, for the one under which exp-0 at 0.84 a second queues as it did."""


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
    blocks = queueing_pool(runs, requests, cost)
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


def queueing_pool(runs: dict[str, RecordedRun], requests: dict[str, tuple[RequestSpec, ...]], cost: CostModel) -> int:
    """The pool under which the busier calibration rate queues as it did, in blocks."""
    busy = A100_CALIBRATED_ON[-1]

    def miss(blocks: int) -> float:
        scenario = A100.scenario(num_gpu_blocks_override=blocks)
        return _queue_miss(runs[busy], simulate_requests(scenario, requests[busy], cost))

    return min(POOLS, key=miss)


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
