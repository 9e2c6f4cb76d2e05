"""What may be typed after `kvtwin`: every command with its flags. What a command does is in a module of its own, imported when called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sim.scenario import Scenario

from .calibrate import calibrate_app
from .options import Json, Out, Workers, takes_scenario


def _example(command: str) -> str:
    """An epilog that typer does not re-wrap."""
    return f"\b\nExample:\n  {command}"


app = typer.Typer(
    name="kvtwin",
    help="The digital twin of an LLM inference engine's GPU memory.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
)

app.add_typer(calibrate_app, name="calibrate")

Replications = Annotated[
    int, typer.Option("--replications", metavar="N", help="Independent sets of requests, at least 2.")
]


@app.command(
    "run",
    epilog=_example(
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
    "ledger", epilog=_example("kvtwin ledger --model llama-3.1-8b --gpu h100-sxm-80gb --max-model-len 8192 --explain")
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
    epilog=_example(
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


@app.command("compare", epilog=_example("kvtwin compare baseline.toml watermark.toml --replications 10"))
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


@app.command("validate", epilog=_example("kvtwin validate --device cpu --junit validate.xml --html validate.html"))
def validate_command(
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="Where to run: cpu, cuda or cuda:N.")] = "cpu",
    scenario: Annotated[
        list[str] | None, typer.Option("--scenario", metavar="NAME", help="Only this scenario; may be repeated.")
    ] = None,
    preset: Annotated[
        list[str] | None, typer.Option("--preset", metavar="NAME", help="Only this preset; may be repeated.")
    ] = None,
    junit: Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit XML.")] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the verdicts as one page.")] = None,
    out: Out = None,
    json: Json = False,
) -> int:
    """The same scenarios for real and simulated: decisions, tokens, leaks. Exit code 1 on any difference."""
    from .validate import validate

    return validate(
        device=device, scenarios=scenario or (), presets=preset or (), junit=junit, html=html, out=out, json=json
    )


@app.command("diagnose", epilog=_example("kvtwin diagnose server.log --model llama-3.1-8b --gpu h100-sxm-80gb"))
def diagnose_command(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE…",
            help="An OOM message, a server log, a PyTorch memory snapshot, a memory curve (CSV), a request log, a folder of results; "
            "- is stdin.",
        ),
    ],
    model: Annotated[str | None, typer.Option("--model", metavar="NAME", help="What was served.")] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", metavar="NAME", help="On which GPU.")] = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option("--tensor-parallel-size", "-tp", metavar="N", min=1, help="GPUs a replica.")
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option("--gpu-memory-utilization", metavar="SHARE", help="The server's memory budget.")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option("--max-num-seqs", metavar="N", min=1, help="Most sequences in a step.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option("--max-num-batched-tokens", metavar="N", min=1, help="Most tokens in a step.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option("--max-model-len", metavar="N", min=1, help="Longest sequence in tokens.")
    ] = None,
    scenario_out: Annotated[
        Path | None,
        typer.Option(
            "--scenario-out",
            metavar="FILE",
            help="Write a scenario that fails in the same way, and beside it the same with the fix.",
        ),
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if",
            metavar="CONF",
            help="Replay a snapshot's history under this PYTORCH_ALLOC_CONF too; may be repeated.",
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write the diagnosis with its pictures as one page.")
    ] = None,
    out: Out = None,
    json: Json = False,
) -> int:
    """Phase, cause, evidence and fixes, from what a failed run left behind."""
    from sim.memory.allocators.snapshot import read_snapshot

    from .investigator import run_diagnose

    return run_diagnose(
        files,
        model=model,
        gpu=gpu,
        read_snapshot=read_snapshot,
        what_if=what_if or (),
        out=out,
        html=html,
        scenario_out=scenario_out,
        json=json,
        tensor_parallel_size=tensor_parallel_size,
        gpu_memory_utilization=gpu_memory_utilization,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
    )


@app.command("kernels", epilog=_example("kvtwin kernels --target sm_90"))
def kernels_command(
    target: Annotated[
        str, typer.Option("--target", metavar="NAME", help="sm_80, sm_90, sm_100, or all of them.")
    ] = "sm_90",
    only: Annotated[str | None, typer.Option("--only", metavar="TEXT", help="Kernels whose name has this.")] = None,
    bench: Annotated[bool, typer.Option("--bench", help="Time them on this machine's GPU.")] = False,
    json: Json = False,
) -> int:
    """Compile every Triton kernel for a target: registers, spills, shared memory, width of reads."""
    from .kernels import kernels

    return kernels(target, only=only, bench=bench, json=json)


@app.command(
    "bisect",
    epilog=_example("kvtwin bisect requests.csv server.toml --fails oom --state bisect-state.json --out culprit"),
)
@takes_scenario
def bisect_command(
    scenario: Scenario,
    requests: Annotated[
        Path, typer.Argument(metavar="REQUESTS", help="The load that fails: a trace in any format that --trace reads.")
    ],
    fails: Annotated[
        str,
        typer.Option(
            "--fails",
            metavar="WHAT",
            help="What counts as failing: any (oom or failed), oom, failed, preempted, rejected, timed_out, or module:function.",
        ),
    ] = "any",
    state: Annotated[
        Path | None,
        typer.Option("--state", metavar="FILE", help="Keep every answer here, and go on from it when it exists."),
    ] = None,
    out: Out = None,
    json: Json = False,
) -> int:
    """The smallest part of a load that still fails, with the shortest lengths and the smallest batch."""
    from .bisect import bisect

    return bisect(requests, scenario, fails=fails, state=state, out=out, json=json)
