"""The self-test of the loop: an injected cost vector, simulated, logged, fitted, and compared with itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from calibration.steps import TERMS, LoggingExecutor, fit_steps
from sim.core.batch_shape import BatchShape
from sim.core.clock import to_s
from sim.core.config import EngineConfig
from sim.core.request import RequestSpec
from sim.costs import FixedCost
from sim.world.run import run_world

from .interval_coverage import SETS, print_coverage

INJECTED = {"base_s": 4e-3, "per_token_s": 30e-6, "per_context_token_s": 0.08e-6, "per_seq_s": 60e-6}
"""Costs about those of an 8B model on one large GPU."""
NOISE = 0.02
"""Standard deviation of the logarithm of a step's noise: that of five repeats in Splitwise's tables is 0.4 to 2 %."""


COVERAGE_SETS = 150
"""Synthetic data sets over which the intervals' coverage is counted."""


def injected() -> FixedCost:
    """Prices that are known."""
    return FixedCost(
        INJECTED["base_s"],
        per_token_s=INJECTED["per_token_s"],
        per_context_token_s=INJECTED["per_context_token_s"],
        per_seq_s=INJECTED["per_seq_s"],
    )


def logged_steps(seed: int, noise: float = 0.0) -> list[tuple[BatchShape, float]]:
    """The steps of a simulated run priced by `INJECTED`, each with noise."""
    rng = np.random.default_rng(seed)
    requests = [
        RequestSpec(
            request_id=str(i),
            arrival_s=float(at),
            input_tokens=int(rng.integers(20, 3000)),
            output_tokens=int(rng.integers(5, 300)),
        )
        for i, at in enumerate(np.cumsum(rng.exponential(0.2, 150)))
    ]
    log: list[tuple[BatchShape, float]] = []
    cost = injected()
    config = EngineConfig(num_gpu_blocks=20_000, max_num_seqs=128, max_num_batched_tokens=2048, max_model_len=8192)
    run_world(config, cost, requests, executor=lambda core: LoggingExecutor(cost, log))
    factors = np.exp(rng.normal(0.0, noise, len(log)))
    return [(shape, seconds * factor) for (shape, seconds), factor in zip(log, factors.tolist(), strict=True)]


def designed_steps(seed: int, noise: float, count: int = 400) -> list[tuple[BatchShape, float]]:
    """Steps chosen to tell the costs apart, as `calibrate measure` chooses them, priced by `INJECTED`, each with noise.

    Batches, contexts and chunks are spread evenly over their logarithms, independently of each other; in a served log they rise and
    fall together.
    """
    rng = np.random.default_rng(seed)

    def drawn(low: int, high: int) -> int:
        return round(float(np.exp(rng.uniform(np.log(low), np.log(high)))))

    shapes = []
    for i in range(count):
        chunk = ((drawn(16, 2048), drawn(1, 8192)),) if i % 3 else ()
        seqs = drawn(1, 128) if i % 3 != 1 else 0
        shapes.append(
            BatchShape(
                prefill=chunk,
                decode_seqs=seqs,
                decode_context_tokens=seqs * drawn(16, 4096),
                sampled_seqs=seqs + len(chunk),
            )
        )
    cost = injected()
    factors = np.exp(rng.normal(0.0, noise, count)).tolist()
    return [(shape, to_s(cost.step_fs(shape)) * factor) for shape, factor in zip(shapes, factors, strict=True)]


def coverage(runs: int, resamples: int = 100) -> tuple[float, float]:
    """Share of true values inside their 95 % intervals over `runs` noisy designed sets, and the median error of a set's worst term."""
    inside, worst = 0, []
    for seed in range(runs):
        fit = fit_steps(designed_steps(seed, NOISE), resamples=resamples)
        inside += sum(fit.intervals[name][0] <= INJECTED[name] <= fit.intervals[name][1] for name in TERMS)
        worst.append(max(abs(fit.values[name] / INJECTED[name] - 1) for name in TERMS))
    return inside / (runs * len(TERMS)), float(np.median(worst))


def print_self_test(data: Path) -> None:
    """Recovered costs without and with noise, and how often intervals hold the truth."""
    exact = fit_steps(logged_steps(1), resamples=2)
    noisy = fit_steps(designed_steps(1, NOISE))
    served = fit_steps(logged_steps(1, NOISE))
    print("\nSelf-test: an injected cost vector, simulated and fitted again (target: within 1 %)")
    for name in TERMS:
        low, high = noisy.intervals[name]
        print(
            f"  {name:<20} injected {INJECTED[name]:.3e}   served, no noise {exact.values[name] / INJECTED[name] - 1:+.4%}   "
            f"designed, {NOISE:.0%} noise {noisy.values[name] / INJECTED[name] - 1:+.2%}, interval [{low:.3e}, {high:.3e}]   "
            f"served, {NOISE:.0%} noise {served.values[name] / INJECTED[name] - 1:+.1%}"
        )
    print_coverage(SETS)
    share, worst = coverage(COVERAGE_SETS)
    print(
        f"  95 % intervals hold the true value in {share:.1%} of {COVERAGE_SETS} noisy designed sets x {len(TERMS)} terms; "
        f"worst term of a set off by {worst:.2%} in the median"
    )
