"""`kvtwin calibrate`: fit a profile to measurements, and judge a profile against a recorded run."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sim.scenario import Scenario

from .options import Json, takes_scenario
from .terminal import Progress, print_json, say

if TYPE_CHECKING:
    from calibration.judge import Judgement, Metric

calibrate_app = typer.Typer(
    help="Fit a profile to measurements, and judge one against a recorded run.",
    rich_markup_mode=None,
    no_args_is_help=True,
)


@calibrate_app.command(
    "fit", epilog="\b\nExample:\n  kvtwin calibrate fit kernels/aiconfigurator/h100_sxm --out h100.json"
)
@takes_scenario
def fit_command(
    scenario: Scenario,
    source: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="Kernel tables (a folder of LLMServingSim or aiconfigurator), whole steps (DistServe's JSON, Splitwise's CSV), or a "
            "real run (requests.jsonl, a vLLM bench JSON, an llm-d CSV), whose first requests correct --profile.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Write the profile here.")],
    first: Annotated[
        int | None,
        typer.Option("--first", metavar="N", min=1, help="Requests of a run that are fitted to; default: 30."),
    ] = None,
    prefixes: Annotated[
        Path | None,
        typer.Option("--prefixes", metavar="FILE", help="A lengths.csv of a run's requests, for their prefix hits."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write errors, intervals and residuals as one page.")
    ] = None,
    json: Json = False,
) -> int:
    """Fit a cost profile: non-negative terms, errors on held-out points, intervals, and what stayed unknown."""
    from calibration.document import write
    from calibration.fit_requests import FIRST, fit_requests
    from calibration.runs import read_run
    from calibration.sources import fit_source, is_run

    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    ranks, model, gpu = scenario.engine.tensor_parallel_size, scenario.model.model, scenario.gpu.gpu
    chosen = "".join(f" --{name} {value}" for name, value in (("model", model), ("gpu", gpu)) if value)
    command = f"kvtwin calibrate fit {source.name} --tensor-parallel-size {ranks}{chosen}"
    with Progress("kvtwin calibrate fit") as progress:
        progress.say("fitting")
        if is_run(source):
            number = first or FIRST
            command += f" --profile {scenario.gpu.profile} --first {number}"
            profile = fit_requests(read_run(source, prefixes), scenario, number, date=today, command=command)
        else:
            profile = fit_source(source, tensor_parallel_size=ranks, date=today, command=command, model=model, gpu=gpu)
        write(profile, out)
    if html is not None:
        from .fit_report import page

        html.write_text(page(profile), encoding="utf-8")
    shown = {
        key: profile[key]
        for key in ("name", "kind", "gpu", "error", "intervals", "identifiability", "range", "provenance")
    }
    if json:
        print_json(shown | {"out": str(out)})
    else:
        _print_fit(profile, out)
    return 0


@calibrate_app.command(
    "judge",
    epilog=(
        "\b\nExample:\n  kvtwin calibrate judge --run runs/rtx4090-llama-3.1-8b --model llama-3.1-8b --gpu rtx-4090 "
        "--engine-version 0.19 --profile auto"
    ),
)
@takes_scenario
def judge_command(
    scenario: Scenario,
    recorded: Annotated[
        Path | None,
        typer.Option("--run", metavar="PATH", help="The recorded run: a folder with requests.jsonl, or an llm-d CSV."),
    ] = None,
    prefixes: Annotated[
        Path | None,
        typer.Option("--prefixes", metavar="FILE", help="A lengths.csv of the same requests, for their prefix hits."),
    ] = None,
    margin: Annotated[
        float, typer.Option("--margin", metavar="SHARE", help="How far means may be off and still count as equivalent.")
    ] = 0.05,
    tail_margin: Annotated[
        float, typer.Option("--tail-margin", metavar="SHARE", help="The same for percentiles and trajectories.")
    ] = 0.10,
    draws: Annotated[
        int,
        typer.Option(
            "--draws",
            metavar="N",
            min=0,
            help="Simulate again with N draws of the profile's uncertainty: the interval of every prediction.",
        ),
    ] = 0,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write the judgement as one page.")
    ] = None,
    json: Json = False,
) -> int:
    """Simulate a recorded run's requests and compare: exit code 0 when the twin is equivalent within the margins, 1 when not."""
    from calibration.errors import CalibrationError
    from calibration.judge import EQUIVALENT, Margins, judge
    from calibration.judge_page import page
    from calibration.runs import read_run
    from calibration.twin import simulate_requests
    from calibration.uncertainty import with_intervals
    from sim.resolve import resolve
    from sim.simulation import cost_model

    if recorded is None:
        raise CalibrationError("no recorded run is given; for example --run runs/rtx4090-llama-3.1-8b")
    if scenario.workload.trace is not None or scenario.workload.workload is not None:
        raise CalibrationError("the requests are the recorded run's: leave --trace and --workload out")
    margins = Margins(mean=margin, tail=tail_margin, trajectory=tail_margin)
    run = read_run(recorded, prefixes)
    with Progress("kvtwin calibrate judge") as progress:
        progress.say("simulating")
        judged = judge(run, simulate_requests(scenario, run.requests), margins)
        if draws:
            progress.say(f"simulating {draws} draws of the profile")
            judged = with_intervals(
                judged,
                cost_model(resolve(scenario)),
                draws,
                lambda cost: simulate_requests(scenario, run.requests, cost),
                lambda recorded, twin: judge(recorded, twin, margins),
            )
    if html is not None:
        html.write_text(page(judged), encoding="utf-8")
    if json:
        print_json(judged.as_dict())
    else:
        _print_judgement(judged)
        if html is not None:
            say(f"wrote {html}")
    return 0 if judged.verdict == EQUIVALENT else 1


def _print_fit(profile: dict[str, Any], out: Path) -> None:
    say(f"{profile['name']}: fitted to {profile['provenance']['source']}")
    for key, value in profile["error"].items():
        if isinstance(value, dict) and value.get("median") is not None:
            say(f"  {key:<48} median {value['median']:6.1%}   95th percentile {value['p95']:6.1%}")
        elif key in ("kernels_only", "corrected"):
            say(f"  {key.replace('_', ' '):<48} " + ", ".join(f"{name} {off:+.1%}" for name, off in value.items()))
    for term, (low, high) in profile["intervals"].items():
        say(f"  {term:<48} 95 % interval of the term as a whole [{low:+.1%}, {high:+.1%}]")
    for text in profile["identifiability"]:
        say(f"  note: {text}")
    say(f"wrote {out}")


def _print_judgement(judged: Judgement) -> None:
    say(f"{judged.run.name} against {judged.twin.profile}: {judged.verdict}")
    for metric in judged.metrics:
        shown = [
            f"{v * 1e3:+.1f} ms" if metric.absolute else f"{v:+.2%}" for v in (metric.error, metric.low, metric.high)
        ]
        say(
            f"  {metric.name:<26} {metric.measured:10.4g} measured {metric.predicted:10.4g} predicted "
            f"{shown[0]:>9}  [{shown[1]}, {shown[2]}]  {metric.verdict}{_predicted_interval(metric)}"
        )
    for path in judged.trajectories:
        say(
            f"  {path.name:<26} {path.measured_mean:10.4g} measured {path.predicted_mean:10.4g} predicted "
            f"distance {path.distance:.1%}  {path.verdict}"
        )
    for warning in judged.twin.summary["warnings"]:
        say(f"  note: {warning}")


def _predicted_interval(metric: Metric) -> str:
    if metric.predicted_low is None or metric.predicted_high is None:
        return ""
    return f"   prediction [{metric.predicted_low:.4g}, {metric.predicted_high:.4g}]"
