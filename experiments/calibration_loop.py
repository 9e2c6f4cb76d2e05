"""The closed loop: measure a device, fit a profile, predict a scenario that was not measured, run it for real, judge.

    python -m experiments.calibration_loop --device cpu --budget 60s --out loop

Measuring and real runs take turns, and the reference step of the design is timed also between the steps of a real run: so it
is known how fast the device was then, compared with when it was measured. Errors are stated as they are, and for prices at
the device's speed during the run; the second are barred (10 % on mean TPOT and mean E2E latency), in the round whose speed
was most usual. On an idle machine both are the same. A replay of a run's durations through the simulator must make the same
decisions, one by one. Exit status 1 when something does not hold.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import sim
from calibration.design import design
from calibration.document import write
from calibration.errors import CalibrationError
from calibration.fit_page import fit_page
from calibration.fit_run import fit_run_profile
from calibration.judge import Judgement, Margins, judge
from calibration.judge_page import page
from calibration.measure import DEFAULT_MODEL, REFERENCE_EVERY, MeasureSettings, make_rig, measure
from calibration.runs import read_run
from calibration.speed import at_speed
from calibration.step_log import StepRun
from calibration.twin import simulate_requests
from sim.core.config import ConfigError
from sim.core.plan import Executor, StepPlan, StepResult
from sim.costs.profile import FittedProfile
from sim.resolve import resolve
from sim.results.files import write_json, write_text
from sim.scenario import Scenario, ScenarioError
from sim.simulation import cost_model
from sim.world.executors import Recording, RecordingExecutor, ReplayExecutor

from .calibrate import seconds
from .real_run import run_scenario
from .terminal import say
from .validation.worlds import first_difference

if TYPE_CHECKING:
    from calibration.rig import StepRig

BAR = 0.10
"""How far mean TPOT and mean E2E latency may be off."""
BARRED = ("tpot_mean_s", "e2el_mean_s")
ROUNDS = 3
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One real run, and what the profile said of it."""

    number: int
    speed: float
    """What the reference step took during it, over what it took while measuring (medians): above 1 the device was slower."""
    difference: str | None
    """Where its decisions and those of its replay part; None when they are the same."""
    errors: dict[str, float]
    """Relative errors of `BARRED`."""
    errors_at_speed: dict[str, float]
    """The same, for prices at the device's speed during the run."""
    verdict: str
    """Of the whole judgement, at that speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopResult:
    """What came of the loop."""

    profile: dict[str, Any]
    rounds: tuple[Round, ...]
    judged: Round
    """The round at the device's usual speed."""
    bar: float

    @property
    def ok(self) -> bool:
        """Decisions are the same in every round, and the judged one is within the bar."""
        same = all(one.difference is None for one in self.rounds)
        return same and all(abs(error) <= self.bar for error in self.judged.errors_at_speed.values())

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "ok": self.ok,
            "bar": self.bar,
            "judged": self.judged.number,
            "decisions_equal": all(one.difference is None for one in self.rounds),
            "rounds": [asdict(one) for one in self.rounds],
            "held_out_error": self.profile["error"]["held_out"],
            "quality": self.profile["quality"],
            "provenance": self.profile["provenance"],
        }


def run_loop(
    settings: MeasureSettings,
    budget_s: float,
    out: Path,
    *,
    rounds: int = ROUNDS,
    bar: float = BAR,
    command: str = "python -m experiments.calibration_loop",
    tell: Callable[[str], None] = lambda text: None,
) -> LoopResult:
    """Carry out the loop; everything it makes is in `out`.

    Raises: CalibrationError when `out` holds a loop already; what measuring, fitting and judging raise.
    """
    if (out / "steps").exists():
        raise CalibrationError(f"{out} holds a loop already; give another --out")
    rig = make_rig(settings)
    scenario = held_out_scenario(settings)
    for number in range(rounds):
        measure(settings, budget_s * (number + 1) / (rounds + 1), out / "steps", command=command, tell=tell, rig=rig)
        tell(f"real run {number + 1} of {rounds}")
        real = run_for_real(scenario, settings.clock, rig=rig)
        real.result.save(out / f"real-{number}")
        difference = first_difference(real.decisions, replay(scenario, real))
        write_json(
            out / f"real-{number}" / "lockstep.json", {"difference": difference, "reference_us": real.reference_us}
        )
    run = measure(settings, budget_s, out / "steps", command=command, tell=tell, rig=rig)
    tell("fitting and judging")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    profile = fit_run_profile(run, date=today, command=command, gpu=None)
    write(profile, out / "profile.json")
    write_text(out / "fit.html", fit_page(run, profile))
    judged = [_judged(out, number, run, bar) for number in range(rounds)]
    best = min((one for one, _ in judged), key=lambda one: abs(math.log(one.speed)))
    write_text(out / "judge.html", page(judged[best.number][1]))
    profile["error"]["end_to_end"] = _sentence(best)
    write(profile, out / "profile.json")
    result = LoopResult(profile=profile, rounds=tuple(one for one, _ in judged), judged=best, bar=bar)
    write_json(out / "loop.json", result.as_dict())
    return result


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

    def close(self, releases: Any) -> None:
        """Passed on."""
        self._inner.close(releases)


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
        result=dataclasses.replace(result, provenance={**result.provenance, "clock": clock}),
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


def _judged(out: Path, number: int, run: StepRun, bar: float) -> tuple[Round, Judgement]:
    folder = out / f"real-{number}"
    seen = json.loads((folder / "lockstep.json").read_text(encoding="utf-8"))
    usual_us = np.median([step.duration_us for step in run.steps if step.group == "reference"])
    speed = float(np.median(seen["reference_us"]) / usual_us)
    margins = Margins(mean=bar, tail=bar, trajectory=bar)
    plain, at_its_speed = (judge_folder(folder, out / "profile.json", margins, factor) for factor in (1.0, speed))
    made = Round(
        number=number,
        speed=speed,
        difference=seen["difference"],
        errors=_barred(plain),
        errors_at_speed=_barred(at_its_speed),
        verdict=at_its_speed.verdict,
    )
    return made, at_its_speed


def _sentence(judged: Round) -> str:
    """What a profile says of itself after the loop."""
    tpot, e2el = (judged.errors_at_speed[name] for name in BARRED)
    return (
        f"on a scenario that was not measured, run for real on the same device: mean TPOT {tpot:+.1%}, mean E2E latency {e2el:+.1%} "
        f"(at the device's speed during the run, {judged.speed:.2f} times its usual)"
    )


def _barred(judgement: Judgement) -> dict[str, float]:
    return {metric.name: metric.error for metric in judgement.metrics if metric.name in BARRED}


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out the loop and say what came of it."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        prog="python -m experiments.calibration_loop",
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--model", default=None, help="default: tiny-llama-test on the CPU, llama-3.2-1b on a GPU")
    parser.add_argument("--budget", default="60s", help="time for measuring, such as 60s or 2m")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="real runs")
    parser.add_argument("--bar", type=float, default=BAR, help="share by which mean TPOT and E2E latency may be off")
    parser.add_argument(
        "--clock", default="wall", choices=("wall", "thread"), help="on the CPU: thread, when others use the machine"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for everything the loop makes")
    chosen = parser.parse_args(argv)
    model = chosen.model or DEFAULT_MODEL["cuda" if chosen.device.startswith("cuda") else "cpu"]
    settings = MeasureSettings(model=model, device=chosen.device, clock=chosen.clock)
    command = f"python -m experiments.calibration_loop --device {chosen.device} --budget {chosen.budget}"
    command += "" if chosen.clock == "wall" else f" --clock {chosen.clock}"
    try:
        result = run_loop(
            settings, seconds(chosen.budget), chosen.out, rounds=chosen.rounds, bar=chosen.bar, command=command
        )  # fmt: skip
    except (CalibrationError, ConfigError, ScenarioError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    _print(result, chosen.out)
    return 0 if result.ok else 1


def _print(result: LoopResult, out: Path) -> None:
    quality, error = result.profile["quality"], result.profile["error"]["held_out"]
    say(
        f"{result.profile['name']}: {quality['steps']:,} steps, noise floor {quality['noise_floor']:.1%}, held-out median "
        f"{error['median']:.1%}, 95th percentile {error['p95']:.1%}"
    )
    for one in result.rounds:
        shown = ", ".join(
            f"{name} {value:+.1%} ({one.errors_at_speed[name]:+.1%} at that speed)"
            for name, value in one.errors.items()
        )
        same = "decisions equal" if one.difference is None else one.difference
        chosen = " <- judged" if one is result.judged else ""
        say(f"  round {one.number}: reference step at {one.speed:.2f} times its usual; {same}; {shown}{chosen}")
    for flag in quality["flags"]:
        say(f"  note: {flag}")
    say(f"{'within' if result.ok else 'NOT within'} {result.bar:.0%}; wrote {out}")


if __name__ == "__main__":
    sys.exit(main())
