"""How often intervals hold the truth: known costs are measured with noise, fitted as any run is, and a whole run is predicted.

    python -m experiments.interval_coverage --sets 40

A set is a designed run of timed steps whose true costs are `TRUE`, each step with noise of its own; its profile goes through the
fit, the file and the draws that a user's would. Counted is how often the true weight lies in its 95 % interval, and how often what a
simulation with the true costs comes to lies in the 90 % interval of the prediction.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from calibration.document import write
from calibration.judging.uncertainty import SHARE, draws, next_value
from calibration.measuring.design import DesignPoint, Limits, design, pass_order
from calibration.measuring.session import REFERENCE_EVERY
from calibration.measuring.step_log import Step, StepRun
from calibration.recorded.twin import SimulatedRun, simulate_requests
from calibration.timed_steps.fit_run import fit_run_profile
from calibration.timed_steps.model import StepModel, dense_knots, names
from calibration.timed_steps.tables import tables
from sim.catalog.host import HOST
from sim.catalog.models import model_shape
from sim.core.request import RequestSpec
from sim.costs.fitted import fitted_cost
from sim.costs.profile import FittedProfile
from sim.costs.profile_file import ProfileFile, model_terms
from sim.scenario import Scenario

from .terminal import say

MODEL = "tiny-llama-test"
LIMITS = Limits(
    max_num_batched_tokens=512, max_num_seqs=32, max_model_len=1024, block_size=16, num_gpu_blocks=4096, num_cpu_blocks=128
)  # fmt: skip
TRUE = {
    "step": 3000.0, "sample_launch": 150.0, "rows": 20.0, "decode_launch": 100.0, "decode_seq": 40.0, "decode_context": 0.25,
    "decode_excess": 0.02, "chunk_launch": 120.0, "chunk_seq": 30.0, "chunk_pair": 0.02, "chunk_masked": 0.01, "chunk_context": 0.3,
    "copied_block": 6.0, "swapped_block": 12.0,
}  # fmt: skip
"""Weights in microseconds; matrices take `TOKEN_US` a token."""
TOKEN_US = 30.0
NOISE = 0.03
PASSES = 3
DRAWS = 12
REQUESTS = 60
PREDICTED = ("ttft_s", "tpot_s", "e2el_s", "makespan_s")
SETS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What came of so many sets."""

    sets: int
    weights: float
    """Share of identified true weights inside their 95 % intervals."""
    predictions: dict[str, float]
    """Share of true means (and makespans) inside the 90 % interval of their prediction, by name."""

    @property
    def all_predictions(self) -> float:
        """Over all of them."""
        return float(np.mean(list(self.predictions.values())))


def true_model() -> StepModel:
    """The costs that are known."""
    knots = dense_knots(LIMITS.max_num_batched_tokens)
    rises = {
        name: TOKEN_US * (high - low)
        for name, (low, high) in zip(names(knots)[len(TRUE) :], pairwise(knots), strict=True)
    }
    return StepModel(knots=knots, values={**TRUE, **rises})


def noisy_run(seed: int, noise: float = NOISE, passes: int = PASSES, *, bend: float = 0.0) -> StepRun:
    """A designed run priced by `true_model`, each step with noise.

    `bend` plants a misfit: steps take `exp(bend x a number of the step's own)` times as long, the same in every repeat.
    """
    rng = np.random.default_rng([20260, seed])
    points = design(LIMITS, 0)
    took = dict(
        zip(
            (point.point for point in points),
            true_model().predict([point.shape for point in points]).tolist(),
            strict=True,
        )
    )
    odd = np.random.default_rng(7).standard_normal(len(points))
    order: list[tuple[int, DesignPoint]] = []
    for number in range(passes):
        for count, point in enumerate(pass_order(points, 0, number)):
            order += [(-1, points[0])] * (count % REFERENCE_EVERY == 0)
            order.append((number, point))
    steps = tuple(
        Step(
            session=0,
            pass_=number,
            point=point.point,
            group=point.group,
            elapsed_s=0.01 * place,
            duration_us=took[point.point] * float(np.exp(bend * odd[point.point] + noise * rng.standard_normal())),
            shape=point.shape,
            workspace_bytes=4096 + 1024 * point.shape.num_tokens,
        )
        for place, (number, point) in enumerate(order, start=1)
    )
    return StepRun(name=f"set {seed}", document=_document(), steps=steps)


def _document() -> dict[str, Any]:
    shape = model_shape(MODEL)
    sizes = {size: getattr(shape, size) for size in ("num_layers", "hidden_size", "intermediate_size", "vocab_size")}
    return {
        "provenance": {
            "device": "cpu", "device_name": "known costs", "gpu": HOST.name, "torch": "none", "triton": None, "kvtwin_version": "0",
            "date": "today", "command": "python -m experiments.interval_coverage",
        },
        "model": {"name": MODEL, **sizes, "attention": [asdict(kind) for kind in shape.attention]},
        "settings": {"dtype": "float32", "kv_cache_dtype": "float32", "clock": "wall"},
        "limits": LIMITS.as_dict(),
        "memory": {},
    }  # fmt: skip


def scenario() -> tuple[Scenario, tuple[RequestSpec, ...]]:
    """A run that no set was fitted to: prompts and decodes mix, and a queue forms at times."""
    rng = np.random.default_rng(1)
    arrivals = np.cumsum(rng.exponential(0.06, REQUESTS))
    requests = tuple(
        RequestSpec(
            request_id=str(i),
            arrival_s=float(at),
            input_tokens=int(rng.integers(20, 600)),
            output_tokens=int(rng.integers(5, 120)),
        )
        for i, at in enumerate(arrivals)
    )
    return Scenario(
        model={"model": MODEL},
        gpu={"gpu": HOST.name, "profile": "auto"},
        engine={
            "num_gpu_blocks_override": 400,
            "max_model_len": 1024,
            "max_num_seqs": 32,
            "max_num_batched_tokens": 512,
        },
    ), requests


def true_cost() -> FittedProfile:
    """Prices of the known costs, by the tables that a fit of them would write."""
    data = {
        "terms": tables(true_model(), LIMITS.max_num_seqs, LIMITS.max_model_len),
        "host": {},
        "error": {},
        "range": {"max_tokens": 512, "max_seqs": 32, "max_context_tokens": 1024},
    }
    known = ProfileFile(
        name="true", kind="model", gpu=HOST.name, model=MODEL, tensor_parallel_size=1, data=data, where="true"
    )
    return FittedProfile(model_terms(known, 2, copy_block_s=0.0, swap_block_s=0.0), name="true")


def numbers(run: SimulatedRun) -> dict[str, float]:
    """What is predicted of a run."""
    means = {name: float(np.nanmean(getattr(run, name))) for name in PREDICTED[:-1]}
    return {**means, PREDICTED[-1]: run.makespan_s}


def coverage(sets: int, *, noise: float = NOISE, count: int = DRAWS, truth: FittedProfile | None = None) -> Coverage:
    """Count over so many sets. `truth` prices the run that is predicted; the known costs, unless it is another."""
    what, requests = scenario()
    true = numbers(simulate_requests(what, requests, truth or true_cost()))
    held: dict[str, list[bool]] = {name: [] for name in true}
    weights: list[bool] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "p.json"
        for seed in range(sets):
            profile = fit_run_profile(noisy_run(seed, noise), date="today", command="coverage")
            write(profile, path)
            cost = fitted_cost(str(path), model_shape(MODEL), HOST)
            drawn = [numbers(simulate_requests(what, requests, one)) for one in draws(cost, count)]
            for name, value in true.items():
                low, high = next_value([one[name] for one in drawn])
                held[name].append(low <= value <= high)
            weights += _weights_held(profile)
    return Coverage(
        sets=sets,
        weights=float(np.mean(weights)),
        predictions={name: float(np.mean(values)) for name, values in held.items()},
    )


def _weights_held(profile: dict[str, Any]) -> list[bool]:
    """Whether each true weight lies in its interval; those that the fit says it cannot tell apart are left out."""
    unknown = {
        text.split(":")[0] for text in profile["identifiability"] if "not told apart" in text or "not measured" in text
    }
    found = []
    for name, true in true_model().values.items():
        fitted = profile["weights"][name]
        if name in unknown or fitted["us"] == 0:
            continue
        low, high = fitted["interval"]
        found.append(fitted["us"] * (1 + low) <= true <= fitted["us"] * (1 + high))
    return found


def print_coverage(sets: int) -> None:
    """Both rates, for steps that the model explains but for noise."""
    found = coverage(sets)
    shown = ", ".join(f"{name.removesuffix('_s')} {share:.0%}" for name, share in found.predictions.items())
    say(
        f"  a whole run predicted from {sets} noisy sets ({NOISE:.0%} on each step, {PASSES} passes): {SHARE:.0%} intervals of {DRAWS} "
        f"draws hold the truth in {found.all_predictions:.0%} ({shown}); 95 % intervals of the weights in {found.weights:.1%}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Count and print."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        prog="python -m experiments.interval_coverage",
    )
    parser.add_argument("--sets", type=int, default=SETS, help="synthetic runs to fit")
    chosen = parser.parse_args(argv)
    if chosen.sets < 1:
        parser.error(f"--sets is {chosen.sets}; at least one run is needed to count anything")
    print_coverage(chosen.sets)
    return 0


if __name__ == "__main__":
    sys.exit(main())
