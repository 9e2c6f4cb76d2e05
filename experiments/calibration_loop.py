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
import datetime
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from calibration.document import write
from calibration.errors import CalibrationError
from calibration.judging.judge import Judgement, Margins
from calibration.judging.page import page
from calibration.measuring.measure import LEAST_BUDGET_S, make_rig, measure
from calibration.measuring.settings import DEFAULT_MODEL, MeasureSettings
from calibration.measuring.step_log import StepRun
from calibration.timed_steps.fit_page import fit_page
from calibration.timed_steps.fit_run import fit_run_profile
from sim.results.files import write_json, write_text

from .bad_input import exit_status
from .calibrate_measure import seconds
from .loop_runs import held_out_scenario, judge_folder, replay, run_for_real
from .outputs import make_room
from .terminal import say
from .validation.worlds import first_difference

BAR = 0.10
"""How far mean TPOT and mean E2E latency may be off."""
BARRED = ("tpot_mean_s", "e2el_mean_s")
ROUNDS = 3


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
        return all(one.difference is None for one in self.rounds) and _within(self.judged, self.bar)

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


def _within(judged: Round, bar: float) -> bool:
    return all(abs(error) <= bar for error in judged.errors_at_speed.values())


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

    def work() -> int:
        if chosen.rounds < 1:
            raise CalibrationError(f"--rounds is {chosen.rounds}; at least one real run is needed")
        if not 0 < chosen.bar < 1:
            raise CalibrationError(f"--bar is {chosen.bar:g}; it is a share between 0 and 1, such as {BAR}")
        budget_s, least_s = seconds(chosen.budget), LEAST_BUDGET_S * (chosen.rounds + 1)
        if budget_s < least_s:
            raise CalibrationError(
                f"--budget is {chosen.budget}; measuring takes turns with {chosen.rounds} real runs, for which at least {least_s:g}s are "
                "needed"
            )
        make_room(chosen.out)
        result = run_loop(settings, budget_s, chosen.out, rounds=chosen.rounds, bar=chosen.bar, command=command)
        _print(result, chosen.out)
        return 0 if result.ok else 1

    return exit_status(parser.prog, work)


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
    say(f"{verdict(result)}; wrote {out}")


def verdict(result: LoopResult) -> str:
    """Of the judged round, and how many others would have failed the same bar: one good round of three is not three."""
    judged, bar = result.judged, f"{result.bar:.0%}"
    within = "within" if _within(judged, result.bar) else "NOT within"
    text = f"round {judged.number}, the nearest to the device's usual speed, is {within} {bar}"
    if any(one.difference is not None for one in result.rounds):
        text += ", but decisions are NOT the same"
    others = sum(not _within(one, result.bar) for one in result.rounds if one is not judged)
    return f"{text}; {others} of the {len(result.rounds) - 1} others are not" if others else text


if __name__ == "__main__":
    sys.exit(main())
