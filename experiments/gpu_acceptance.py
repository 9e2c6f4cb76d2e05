"""The acceptance run of a GPU, in one command that fits into a short slot: `python -m experiments.gpu_acceptance --out DIR`.

Everything that only a GPU can show, what is worth most first: decode attention beside a copy, ten thousand steps of an 8B model under
pressure, the tests marked `gpu`, `kvtwin validate`, all kernels, and then what is good to know. What is not installed, and which stages
fall away for it, is said first. Each stage is a process with a time limit; `acceptance.json` in the folder is written anew while it
goes on, with the machine and the command beside the figures. The same folder again goes on with the stages that have not
ended; `--only` names those to be run anew. `--device cpu --small` tries the run itself, on any machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sim.core.config import ConfigError
from sim.results.files import write_json

from .acceptance.kept import DOCUMENT, LOG, earlier, keep, shorten
from .acceptance.missing import fallen_away
from .acceptance.stages import STAGES, Stage
from .bad_input import exit_status
from .calibrate_measure import seconds
from .outputs import make_room
from .terminal import say

SLOT_S = 600.0
"""The slot that the stages' limits are for; with a larger budget they are larger too."""
LEAST_S = 5.0
"""With less left no further stage is begun."""
TELL_S = 2.0
"""So often what a stage has found is written down while it goes on."""


def accept(
    device: str, out: Path, budget_s: float, *, only: Sequence[str] = (), small: bool = False, command: str
) -> bool:
    """Carry out the stages that `out` does not hold yet, or those in `only`; True when all bars are met. Writes `acceptance.json`."""
    started_s = time.perf_counter()
    results = {name: found for name, found in earlier(out, device, small=small).items() if name not in only}
    asked = {name: stage for name, stage in STAGES.items() if not only or name in only}
    absent = fallen_away(asked)
    for name, why in absent.items():
        say(f"{name} falls away: it {why}")

    def write_down() -> bool:
        return bool(_write(out, results, device, budget_s, command)["ok"])

    with tempfile.TemporaryDirectory(prefix="kvtwin-acceptance-") as folder:
        for name, stage in asked.items():
            if (kept := results.get(name)) and kept["finished"]:
                say(f"{name}: kept, {_verdict(stage, kept)}")
                continue
            if name in absent:
                results[name] = _nothing(device, small=small) | {"skipped": absent[name]}
                continue
            left_s = budget_s - (time.perf_counter() - started_s)
            if left_s < LEAST_S:
                say(f"{name}: not reached")
                continue
            limit_s = min(stage.limit_s * max(1.0, budget_s / SLOT_S), left_s)

            def so_far(found: dict[str, Any], name: str = name) -> None:
                results[name] = found
                write_down()

            found = _carry_out(name, stage, device, out, Path(folder), limit_s, small=small, so_far=so_far)
            so_far(found)
            say(f"{name}: {_verdict(stage, found)}")
    return write_down()


def _carry_out(
    name: str,
    stage: Stage,
    device: str,
    out: Path,
    work: Path,
    limit_s: float,
    *,
    small: bool,
    so_far: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """One stage in a process of its own, ended with all that it began when its time is up. `so_far` hears what it has found meanwhile."""
    say(f"{name} (at most {limit_s:.0f} s): {stage.question}")
    file, log = work / f"{name}.json", out / LOG
    command = [sys.executable, "-m", "experiments.acceptance.stages", name, "--device", device, "--out", str(file)]
    command += ["--limit", f"{limit_s:.0f}", *(["--small"] if small else [])]
    started_s = time.perf_counter()
    with log.open("ab") as stream:
        stream.write(f"\n== {name}: {stage.question}\n".encode())
        stream.flush()
        process = subprocess.Popen(
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=Path(__file__).resolve().parents[1],
        )
        try:
            ended = _wait(process, file, started_s + limit_s, so_far) or f"not done after {limit_s:.0f} s"
        finally:  # also when this run is interrupted: the stage is in a session of its own, and would go on
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    found = _read(file) or _nothing(device, small=small)
    if not found["finished"]:
        found["failures"].append(ended)
    found["seconds"] = round(time.perf_counter() - started_s, 1)
    found["failures"] += [why for made in stage.makes if (why := keep(work / made, out))]
    shorten(log)
    return found


def _wait(
    process: subprocess.Popen[bytes], file: Path, until_s: float, so_far: Callable[[dict[str, Any]], None]
) -> str:
    """Wait for a stage, and pass on what it writes meanwhile. How it ended; empty when its time is up."""
    told: dict[str, Any] | None = None
    while (left_s := until_s - time.perf_counter()) > 0:
        try:
            process.wait(min(left_s, TELL_S))
            return f"exit code {process.returncode} and no verdict; see {LOG}"
        except subprocess.TimeoutExpired:
            found = _read(file)
            if found is not None and found != told:
                so_far(found)
                told = found
    return ""


def _nothing(device: str, *, small: bool) -> dict[str, Any]:
    """The findings of a stage that has found nothing."""
    return {"device": device, "small": small, "finished": False, "seconds": 0.0, "failures": [], "skipped": "", "facts": {}}  # fmt: skip


def _write(out: Path, results: dict[str, dict[str, Any]], device: str, budget_s: float, command: str) -> dict[str, Any]:
    """The verdict over what is there. On the CPU a stage may have nothing to do; on a GPU that is a bar not met."""
    gpu = device.startswith("cuda")
    missing = [name for name, stage in STAGES.items() if stage.required and name not in results]
    bad = [
        name
        for name, each in results.items()
        if each["failures"] or (gpu and each["skipped"]) or not (each["finished"] or each["skipped"])
    ]
    document = {
        "ok": not missing and not any(STAGES[name].required for name in bad),
        "not_met": bad,
        "not_reached": missing,
        "provenance": {**results.get("machine", {}).get("facts", {}), "command": command},
        "budget_s": budget_s,
        "stages": {name: results[name] for name in STAGES if name in results},
    }
    write_json(out / DOCUMENT, document)
    return document


def _read(file: Path) -> dict[str, Any] | None:
    """What a stage has written so far; None if it has written nothing."""
    if not file.is_file():
        return None
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
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
