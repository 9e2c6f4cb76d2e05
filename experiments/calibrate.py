"""`kvtwin calibrate`: measure a device, fit a profile to measurements, and judge a profile against a recorded run."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

import typer

from sim.results.files import write_text
from sim.scenario import Scenario

from .calibrate_text import print_fit, print_judgement
from .options import Json, takes_scenario
from .outputs import make_room
from .terminal import Progress, print_json, say

calibrate_app = typer.Typer(
    help="Measure a device, fit a profile to measurements, and judge one against a recorded run.",
    rich_markup_mode=None,
    no_args_is_help=True,
)


@calibrate_app.command(
    "measure", epilog="\b\nExample:\n  kvtwin calibrate measure --device cpu --budget 120s --out runs/cpu"
)
def measure_command(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The run's folder; a run in it is gone on with.")],
    device: Annotated[
        str, typer.Option("--device", metavar="NAME", help="What to measure: cpu, cuda or cuda:N.")
    ] = "cpu",
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME|config.json",
            help="The model whose steps are timed; default: tiny-llama-test on the CPU, llama-3.2-1b on a GPU.",
        ),
    ] = None,
    budget: Annotated[
        str, typer.Option("--budget", metavar="TIME", help="How long to measure, all sessions together: 120s, 2m.")
    ] = "120s",
    dtype: Annotated[str, typer.Option("--dtype", metavar="TYPE", help="Format of weights and activations.")] = "auto",
    kv_cache_dtype: Annotated[
        str, typer.Option("--kv-cache-dtype", metavar="TYPE", help="Format of the KV cache.")
    ] = "auto",
    block_size: Annotated[int, typer.Option("--block-size", metavar="TOKENS", min=1, help="Tokens a KV block.")] = 16,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option("--max-num-batched-tokens", metavar="TOKENS", min=1, help="Most tokens of a timed step."),
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option("--max-num-seqs", metavar="N", min=1, help="Most sequences of a timed step.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option("--max-model-len", metavar="TOKENS", min=1, help="Longest sequence of a timed step.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Root of the design and its order.")] = 0,
    clock: Annotated[
        str,
        typer.Option(
            "--clock",
            metavar="wall|thread",
            help="On the CPU: wall time, or the time that the thread had a core, for a machine that others use too.",
        ),
    ] = "wall",
    json: Json = False,
) -> int:
    """Time a designed set of steps on a device, with the executor that serves; memory beside. May be stopped and gone on with."""
    from .calibrate_measure import run_measure

    return run_measure(
        out,
        model=model,
        budget=budget,
        json=json,
        device=device,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        seed=seed,
        clock=clock,
    )


@calibrate_app.command("fit", epilog="\b\nExample:\n  kvtwin calibrate fit runs/cpu --out cpu.json --html cpu.html")
@takes_scenario
def fit_command(
    scenario: Scenario,
    source: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A run of `calibrate measure`, kernel tables (a folder of LLMServingSim or aiconfigurator), whole steps (DistServe's "
            "JSON, Splitwise's CSV), or a server's run (requests.jsonl, a vLLM bench JSON, an llm-d CSV) to correct --profile by.",
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

    from .fit_report import page_of

    make_room(None, out, html)
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
        write_text(html, page_of(source, profile))
    shown = {
        key: profile[key]
        for key in (
            "name",
            "kind",
            "gpu",
            "error",
            "intervals",
            "identifiability",
            "range",
            "provenance",
            "memory",
            "quality",
        )
        if key in profile
    }
    if json:
        print_json(shown | {"out": str(out)})
    else:
        print_fit(profile, out)
        if html is not None:
            say(f"wrote {html}")
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
        typer.Option(
            "--run",
            metavar="PATH",
            help="The recorded run: the --out of run --executor torch, a bench JSON, a folder with requests.jsonl, an llm-d CSV.",
        ),
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
    preemption_margin: Annotated[
        float,
        typer.Option(
            "--preemption-margin", metavar="SHARE", help="How far the ratio of preemptions may be off, either way."
        ),
    ] = 0.25,
    num_draws: Annotated[
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
    from calibration.judge import Margins, judge
    from calibration.judge_page import page
    from calibration.runs import read_run
    from calibration.trajectories import EQUIVALENT
    from calibration.twin import simulate_requests
    from calibration.uncertainty import check_draws, draws, with_intervals
    from sim.assembly import cost_model
    from sim.resolve import resolve

    if recorded is None:
        raise CalibrationError("no recorded run is given; for example --run runs/rtx4090-llama-3.1-8b")
    if scenario.workload.trace is not None or scenario.workload.workload is not None:
        raise CalibrationError("the requests are the recorded run's: leave --trace and --workload out")
    check_draws(num_draws, "--draws")
    make_room(None, html)
    margins = Margins(mean=margin, tail=tail_margin, trajectory=tail_margin, preemptions=preemption_margin)
    run = read_run(recorded, prefixes)
    if run.scenario is not None:  # it says itself what was run; flags change that
        scenario = run.scenario.with_(**{name: keys for name, keys in scenario.given().items() if keys})
    costs = draws(cost_model(resolve(scenario)), num_draws) if num_draws else []
    with Progress("kvtwin calibrate judge") as progress:
        progress.say("simulating")
        judged = judge(run, simulate_requests(scenario, run.requests), margins)
        if costs:
            progress.say(f"simulating {num_draws} draws of the profile")
            judged = with_intervals(
                judged,
                costs,
                lambda cost: simulate_requests(scenario, run.requests, cost),
                lambda recorded, twin: judge(recorded, twin, margins),
            )
    if html is not None:
        write_text(html, page(judged))
    if json:
        print_json(judged.as_dict())
    else:
        print_judgement(judged)
        if html is not None:
            say(f"wrote {html}")
    return 0 if judged.verdict == EQUIVALENT else 1
