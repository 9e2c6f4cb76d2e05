"""The real runs of the closed loop: a scenario that no fit sees, run on its device, replayed through the simulator, judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sim
from calibration.judging.judge import Judgement, Margins, judge
from calibration.judging.speed import at_speed
from calibration.measuring.design import design
from calibration.measuring.session import REFERENCE_EVERY
from calibration.measuring.settings import MeasureSettings
from calibration.recorded.runs import read_run
from calibration.recorded.twin import simulate_requests
from sim.assembly import cost_model
from sim.core.plan import Executor, StepPlan, StepResult, Untold
from sim.costs.profile import FittedProfile
from sim.resolve import resolve
from sim.scenario import Scenario
from sim.world.executors import Recording, RecordingExecutor, ReplayExecutor

from .real_run import run_scenario

if TYPE_CHECKING:
    from calibration.measuring.rig import StepRig

HELD_OUT: dict[str, dict[str, Any]] = {
    "cpu": {
        "engine": {"num_gpu_blocks_override": 90, "max_model_len": 512, "max_num_seqs": 32, "max_num_batched_tokens": 256},
        "workload": {"workload": "uniform", "num_requests": 100, "rate": 50.0, "input_tokens": [16, 200], "output_tokens": [8, 80]},
    },
    "cuda": {
        "engine": {"num_gpu_blocks_override": 1200, "max_model_len": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 2048},
        "workload": {"workload": "uniform", "num_requests": 200, "rate": 20.0, "input_tokens": [64, 1024], "output_tokens": [32, 256]},
    },
}  # fmt: skip
"""Scenarios that no fit sees, by device: contexts come and go, prompts are chunked, and the pool is too small at times."""
Wrap = Callable[[Any], Executor]


def held_out_scenario(settings: MeasureSettings) -> Scenario:
    """What is predicted and run: the device's scenario, with the model that is measured."""
    kind = "cuda" if settings.device.startswith("cuda") else "cpu"
    return Scenario(
        model={"model": settings.model, "dtype": settings.dtype},
        run={"executor": "torch", "device": settings.device, "seed": 1 + settings.seed},
        **{**HELD_OUT[kind], "engine": {**HELD_OUT[kind]["engine"], "block_size": settings.block_size}},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RealRun:
    """A real run with what a replay of it needs."""

    result: sim.Result
    recording: Recording
    decisions: list[dict[str, Any]]
    reference_us: list[float]
    """What the reference step took, each time that it was timed in between."""


class _Visiting:
    """Lets another executor work, and times the reference step before every `REFERENCE_EVERY`-th plan. The run does not notice."""

    def __init__(self, inner: Any, rig: StepRig, took_us: list[float]) -> None:
        self._inner, self._rig, self._took_us, self._plans = inner, rig, took_us, 0
        self._reference = design(rig.limits, 0)[0]

    def execute(self, plan: StepPlan) -> StepResult:
        """As the other executor does."""
        if self._plans % REFERENCE_EVERY == 0:
            self._took_us.append(self._rig.run(self._reference).duration_us)
        self._plans += 1
        result: StepResult = self._inner.execute(plan)
        return result

    def close(self, untold: Untold) -> None:
        """Passed on."""
        self._inner.close(untold)


def run_for_real(
    scenario: Scenario, clock: str = "wall", *, rig: StepRig | None = None, wrap: Wrap | None = None
) -> RealRun:
    """Run `scenario` on its device. With `rig`, its reference step is timed in between. `wrap` gets the executor and returns what is
    used in its place (to plant a drift).
    """
    recorders: list[RecordingExecutor] = []
    decisions: list[dict[str, Any]] = []
    reference_us: list[float] = []

    def wrapped(inner: Any) -> Executor:
        if rig is not None:
            inner = _Visiting(inner, rig, reference_us)
        recorders.append(RecordingExecutor(inner if wrap is None else wrap(inner)))
        return recorders[-1]

    result = run_scenario(scenario, decision_log=decisions.append, clock=clock, wrap=wrapped)
    return RealRun(
        result=result,
        recording=recorders[0].recording,
        decisions=decisions,
        reference_us=reference_us,
    )


def replay(scenario: Scenario, real: RealRun) -> list[dict[str, Any]]:
    """The decisions of the simulator when every step takes as long as it really took."""
    decisions: list[dict[str, Any]] = []
    simulated = scenario.with_(executor="model", device=None, gpu=real.result.provenance["gpu"])
    sim.simulate(
        simulated,
        cost=sim.costs.FixedCost(1.0),
        executor=lambda core: ReplayExecutor(real.recording),
        decision_log=decisions.append,
    )
    return decisions


def judge_folder(folder: Path, profile: Path, margins: Margins, speed: float = 1.0) -> Judgement:
    """A real run in `folder` against its simulation with `profile`, all of whose times are multiplied by `speed`."""
    run = read_run(folder)
    assert run.scenario is not None  # a run of ours says what it ran
    scenario = run.scenario.with_(profile=str(profile))
    cost = cost_model(resolve(scenario))
    assert isinstance(cost, FittedProfile)
    return judge(run, simulate_requests(scenario, run.requests, at_speed(cost, speed)), margins)
