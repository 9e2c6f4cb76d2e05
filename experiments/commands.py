"""What is asked of a scenario: `kvtwin run`, `ledger`, `capacity` and `compare` with their flags.

What a command does is in a module of its own, imported when it is called.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sim.scenario import Scenario

from .command_app import app, example
from .options import Json, Out, Workers, takes_scenario

Replications = Annotated[
    int, typer.Option("--replications", metavar="N", help="Independent sets of requests, at least 2.")
]


@app.command(
    "run",
    epilog=example(
        "kvtwin run --model llama-3.1-8b --gpu h100-sxm-80gb --workload azure-conv --num-requests 1000 --html report.html"
    ),
)
@takes_scenario
def run_command(
    scenario: Scenario,
    decision_log: Annotated[
        Path | None, typer.Option("--decision-log", metavar="FILE", help="Write every decision (JSON Lines).")
    ] = None,
    out: Out = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the one-file HTML report.")] = None,
    peak_step: Annotated[
        int | None,
        typer.Option(
            "--peak-step",
            metavar="N",
            min=0,
            help="Executor torch: name the operation that holds the memory peak of step N (peak_by_op.csv in --out).",
        ),
    ] = None,
    memory_snapshot: Annotated[
        Path | None,
        typer.Option(
            "--memory-snapshot",
            metavar="FILE",
            help="Executor torch on CUDA: write PyTorch's memory snapshot of the run.",
        ),
    ] = None,
    clock: Annotated[
        str | None,
        typer.Option(
            "--clock",
            metavar="wall|thread",
            help="Executor torch on the CPU: wall time, or the time that the thread had a core, for a machine that others use too.",
        ),
    ] = None,
    profile_draws: Annotated[
        int,
        typer.Option(
            "--profile-draws",
            metavar="N",
            min=0,
            help="Simulate again with N draws of the profile's uncertainty: the interval of every prediction.",
        ),
    ] = 0,
    json: Json = False,
) -> int:
    """One run: simulate, or run for real with --executor torch, and print what came of it."""
    from .run import run

    return run(
        scenario,
        decision_log=decision_log,
        out=out,
        html=html,
        json=json,
        peak_step=peak_step,
        memory_snapshot=memory_snapshot,
        clock=clock,
        profile_draws=profile_draws,
    )


@app.command(
    "ledger", epilog=example("kvtwin ledger --model llama-3.1-8b --gpu h100-sxm-80gb --max-model-len 8192 --explain")
)
@takes_scenario
def ledger_command(
    scenario: Scenario,
    explain: Annotated[bool, typer.Option("--explain", help="Show each line's formula with its numbers.")] = False,
    fit: Annotated[
        str | None,
        typer.Option(
            "--fit",
            metavar="LOAD",
            help="Say whether '64 requests x 8192 tokens' fits, and what would have to change; exit code 1 when it does not.",
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write the waterfall as one page.")
    ] = None,
    out: Out = None,
    json: Json = False,
) -> int:
    """The memory account before anything runs: every line, the KV pool, the maximum concurrency."""
    from .ledger import ledger

    return ledger(scenario, explain=explain, fit=fit, html=html, out=out, json=json)


@app.command(
    "capacity",
    epilog=example(
        "kvtwin capacity --model llama-3.1-8b --gpu h100-sxm-80gb --workload azure-conv --slo ttft_p99=2.0,tpot_p99=0.05 --target-rate 50"
    ),
)
@takes_scenario
def capacity_command(
    scenario: Scenario,
    target_rate: Annotated[
        float | None, typer.Option("--target-rate", metavar="PER_S", help="Say how many GPUs this rate needs.")
    ] = None,
    replications: Replications = 5,
    workers: Workers = None,
    out: Out = None,
    json: Json = False,
) -> int:
    """The highest rate at which the objectives hold, with its interval, and what limits it."""
    from .capacity import capacity

    return capacity(scenario, target_rate=target_rate, replications=replications, workers=workers, out=out, json=json)


@app.command("compare", epilog=example("kvtwin compare baseline.toml watermark.toml --replications 10"))
def compare_command(
    files: Annotated[
        list[Path], typer.Argument(metavar="A.toml B.toml…", help="Scenario files, the baseline first; same workload.")
    ],
    replications: Replications = 10,
    seed: Annotated[
        int | None,
        typer.Option("--seed", metavar="N", min=0, help="Root of all random streams, instead of the baseline's."),
    ] = None,
    workers: Workers = None,
    out: Out = None,
    json: Json = False,
) -> int:
    """The same requests served by two or more scenarios: differences with intervals, and a verdict a metric."""
    from .compare import compare

    return compare(files, replications=replications, seed=seed, workers=workers, out=out, json=json)
