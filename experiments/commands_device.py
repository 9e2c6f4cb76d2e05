"""What is asked of a device: `kvtwin validate` and `kernels` with their flags, and the group `calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .calibrate import calibrate_app
from .command_app import app, example
from .options import Json, Out

app.add_typer(calibrate_app, name="calibrate")


@app.command("validate", epilog=example("kvtwin validate --device cpu --junit validate.xml --html validate.html"))
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


@app.command("kernels", epilog=example("kvtwin kernels --target sm_90"))
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
