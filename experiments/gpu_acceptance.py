"""The acceptance run of a GPU, in one command that fits into a short slot: `python -m experiments.gpu_acceptance --out DIR`.

Everything that only a GPU can show, what is worth most first: decode attention beside a copy, the tests marked `gpu`, ten thousand
steps of an 8B model under pressure, `kvtwin validate`, all kernels, and then what is good to know. Each stage is a process
with a time limit; `acceptance.json` in the folder is written after each, with the machine and the command beside the figures. The same
folder again goes on with the stages that have not ended; `--only` names those to be run anew. `--device cpu --small` tries the run
itself, on any machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sim.core.config import ConfigError
from sim.results.files import write_json

from .acceptance.stages import STAGES, Stage
from .bad_input import exit_status
from .calibrate_measure import seconds
from .outputs import make_room
from .terminal import say

SLOT_S = 600.0
"""The slot that the stages' limits are for; with a larger budget they are larger too."""
LEAST_S = 5.0
"""With less left no further stage is begun."""


def accept(
    device: str, out: Path, budget_s: float, *, only: Sequence[str] = (), small: bool = False, command: str
) -> bool:
    """Carry out the stages that `out` does not hold yet, or those in `only`; True when all bars are met. Writes `acceptance.json`."""
    started_s = time.perf_counter()
    results = {
        name: found
        for name in STAGES
        if name not in only
        and (found := _read(out / f"{name}.json"))
        and (found.get("device"), found.get("small"))
        == (device, small)  # what another run found is no verdict of this one
    }
    for name, stage in STAGES.items():
        if only and name not in only:
            continue
        if (kept := results.get(name)) and kept["finished"]:
            say(f"{name}: kept, {_verdict(stage, kept)}")
            continue
        left_s = budget_s - (time.perf_counter() - started_s)
        if left_s < LEAST_S:
            say(f"{name}: not reached")
            continue
        limit_s = min(stage.limit_s * max(1.0, budget_s / SLOT_S), left_s)
        results[name] = _carry_out(name, stage, device, out, limit_s, small=small)
        say(f"{name}: {_verdict(stage, results[name])}")
        _write(out, results, device, budget_s, command)
    return bool(_write(out, results, device, budget_s, command)["ok"])


def _carry_out(name: str, stage: Stage, device: str, out: Path, limit_s: float, *, small: bool) -> dict[str, Any]:
    """One stage in a process of its own, ended with all that it began when its time is up."""
    say(f"{name} (at most {limit_s:.0f} s): {stage.question}")
    file = out / f"{name}.json"
    file.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "experiments.acceptance.stages",
        name,
        "--device",
        device,
        "--out",
        str(file.resolve()),
    ]
    command += ["--limit", f"{limit_s:.0f}", *(["--small"] if small else [])]
    started_s = time.perf_counter()
    with (out / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=Path(__file__).resolve().parents[1],
        )
        try:
            process.wait(limit_s)
            ended = f"exit code {process.returncode} and no verdict; see {name}.log"
        except subprocess.TimeoutExpired:
            ended = f"not done after {limit_s:.0f} s"
        finally:  # also when this run is interrupted: the stage is in a session of its own, and would go on
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    found = _read(file) or {
        "device": device,
        "small": small,
        "finished": False,
        "failures": [],
        "skipped": "",
        "facts": {},
    }
    if not found["finished"]:
        found["failures"].append(ended)
    found["seconds"] = round(time.perf_counter() - started_s, 1)
    write_json(file, found)
    return found


def _write(out: Path, results: dict[str, dict[str, Any]], device: str, budget_s: float, command: str) -> dict[str, Any]:
    """The verdict over what is there. On the CPU a stage may have nothing to do; on a GPU that is a bar not met."""
    gpu = device.startswith("cuda")
    missing = [name for name, stage in STAGES.items() if stage.required and name not in results]
    bad = [name for name, each in results.items() if each["failures"] or (gpu and each["skipped"])]
    document = {
        "ok": not missing and not any(STAGES[name].required for name in bad),
        "not_met": bad,
        "not_reached": missing,
        "provenance": {**results.get("machine", {}).get("facts", {}), "command": command},
        "budget_s": budget_s,
        "stages": results,
    }
    write_json(out / "acceptance.json", document)
    return document


def _read(file: Path) -> dict[str, Any] | None:
    """What a stage has left; None if it left nothing. Raises ConfigError for a file that is no JSON."""
    if not file.is_file():
        return None
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not what a stage writes: {error}") from None
    return found


def _verdict(stage: Stage, found: dict[str, Any]) -> str:
    if found["skipped"]:
        return f"skipped: {found['skipped']}"
    if found["failures"]:
        more = f" (and {len(found['failures']) - 1} more)" if len(found["failures"]) > 1 else ""
        return f"{'NOT MET' if stage.required else 'no bar, but'}: {found['failures'][0]}{more}"
    return f"met, {found['seconds']:g} s"


def _unmet(document: dict[str, Any]) -> str:
    """Which bars are not met, and which nobody has looked at yet."""
    lists = [
        f"{words}: {', '.join(document[key])}"
        for key, words in (("not_met", "not met"), ("not_reached", "not run yet"))
        if document.get(key)
    ]
    return f"not all bars are met ({'; '.join(lists)})"


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out the run; 0 when every bar is met, 1 when one is not, 2 for bad input."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        prog="python -m experiments.gpu_acceptance",
    )
    parser.add_argument("--device", default="cuda", help="cuda or cuda:N; cpu, with --small, to try the run itself")
    parser.add_argument("--out", type=Path, required=True, help="folder for what was found")
    parser.add_argument("--budget", default="600s", help="time for all stages together, such as 600s or 10m")
    parser.add_argument(
        "--only", action="append", default=[], choices=list(STAGES), help="a stage to run (anew); may be repeated"
    )
    parser.add_argument("--small", action="store_true", help="the smallest sizes")
    chosen = parser.parse_args(argv)
    command = f"python -m experiments.gpu_acceptance --device {chosen.device} --budget {chosen.budget}"
    command += "".join(f" --only {name}" for name in chosen.only) + (" --small" if chosen.small else "")

    def work() -> int:
        if chosen.device == "cpu" and not chosen.small:
            raise ConfigError("--device is cpu, which has nothing to accept; add --small to try the run itself")
        _find(chosen.device)
        budget_s = seconds(chosen.budget)
        make_room(chosen.out)
        met = accept(chosen.device, chosen.out, budget_s, only=chosen.only, small=chosen.small, command=command)
        written = chosen.out / "acceptance.json"
        say(f"{'all bars are met' if met else _unmet(_read(written) or {})}; wrote {written}")
        return 0 if met else 1

    return exit_status(parser.prog, work)


def _find(device: str) -> None:
    """Raises ConfigError when there is no such device, or no torch."""
    try:
        from gpu.device import find_device
    except ImportError as error:
        raise ConfigError(f"a model is really run, which needs torch: {error}") from None
    find_device(device)


if __name__ == "__main__":
    sys.exit(main())
