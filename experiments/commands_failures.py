"""What is asked of a run that failed: `kvtwin diagnose` and `bisect` with their flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sim.scenario import Scenario

from .command_app import app, example
from .options import Json, Out, takes_scenario


@app.command("diagnose", epilog=example("kvtwin diagnose server.log --model llama-3.1-8b --gpu h100-sxm-80gb"))
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


@app.command(
    "bisect",
    epilog=example("kvtwin bisect requests.csv server.toml --fails oom --state bisect-state.json --out culprit"),
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
