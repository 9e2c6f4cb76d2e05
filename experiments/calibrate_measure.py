"""`kvtwin calibrate measure`: what is measured, and what is said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from calibration.errors import CalibrationError
from calibration.measuring.measure import first_pass, measure
from calibration.measuring.quality import assess
from calibration.measuring.session import MOST_OVERRUN
from calibration.measuring.settings import DEFAULT_MODEL, MeasureSettings

from .outputs import make_room
from .terminal import Progress, print_json, say


def run_measure(out: Path, *, model: str | None, budget: str, json: bool, **settings: Any) -> int:
    """Measure into `out` and print; `settings` are those of `MeasureSettings`. Returns the exit code.

    Raises: CalibrationError, ConfigError, OSError.
    """
    device, clock = settings["device"], settings["clock"]
    wanted = MeasureSettings(model=model or DEFAULT_MODEL["cuda" if device.startswith("cuda") else "cpu"], **settings)
    command = f"kvtwin calibrate measure --device {device} --model {Path(wanted.model).name} --budget {budget}"
    command += "" if clock == "wall" else f" --clock {clock}"
    make_room(*((out,) if out.exists() else (None, out)))  # what is refused leaves no folder behind
    with Progress("kvtwin calibrate measure") as progress:
        run = measure(wanted, seconds(budget), out, command=command, tell=progress.say, note=progress.note)
    done, whole = first_pass(run, wanted)
    if done < whole:
        needed = run.spent_s * whole / max(done, 1)
        raise CalibrationError(
            f"the first pass is not whole: {done} of {whole} designed steps were timed in {run.spent_s:.0f} s, {MOST_OVERRUN:g} times the "
            f"budget; nothing can be fitted without it. They are kept in {out}: give the command again with --budget "
            f"{needed / MOST_OVERRUN:.0f}s or more, or measure a smaller range (--max-num-batched-tokens, --max-num-seqs, --max-model-len)"
        )
    quality, _ = assess(run.steps, run.document.get("clocks", ()), run.document.get("skipped", ()))
    if json:
        print_json({"out": str(out), "spent_s": run.spent_s, "quality": quality.as_dict(), **run.document})
        return 0
    say(
        f"{quality.steps:,} steps of {run.document['model']['name']} on {run.document['provenance']['device_name']} in "
        f"{run.spent_s:.0f} s; repeats differ by {quality.noise_floor:.1%}, {quality.outliers} outliers, "
        f"drift {quality.drift:+.1%}"
    )
    for flag in quality.flags:
        say(f"  note: {flag}")
    say(f"wrote {out}")
    return 0


def seconds(text: str) -> float:
    """A time such as `120s`, `2m`, `1.5h` or `90`. Raises CalibrationError."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number, unit = (text[:-1], text[-1]) if text[-1:] in units else (text, "s")
    try:
        value = float(number) * units[unit]
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise CalibrationError(f"--budget is {text!r}; it is a time such as 120s or 2m")
    return value
