"""`kvtwin diagnose`: what a failure left behind, diagnosed and printed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.terminal import print_json, say

from .investigate import gathered, judge


def run_diagnose(
    files: Sequence[str | Path],
    *,
    model: str | None = None,
    gpu: str | None = None,
    read_snapshot: Callable[[Path], Any] | None = None,
    out: Path | None = None,
    scenario_out: Path | None = None,
    json: bool = False,
    **settings: Any,
) -> int:
    """Diagnose `files` together and print the result; `out` also gets diagnosis.json. Returns the exit code, 0.

    `read_snapshot` reads PyTorch memory snapshots; without it pickles are refused. `scenario_out` gets a scenario that fails in the
    same way, and a file beside it the same with the fix.

    "Cannot tell from this" is an answer too. Raises DiagnoseError or ConfigError for bad input.
    """
    case, notes = gathered(files, model=model, gpu=gpu, read_snapshot=read_snapshot, **settings)
    diagnosis = judge(case, notes)
    document = diagnosis.as_document()
    written: tuple[Path, ...] = ()
    if scenario_out is not None:
        from .regression import regression

        written = regression(case, diagnosis).write(scenario_out)
    if out is not None:
        from sim.results.files import write_json

        write_json(out / "diagnosis.json", document)
    if json:
        print_json(document)
        return 0
    from .render import print_diagnosis

    print_diagnosis(diagnosis)
    for path in written:
        say(f"wrote {path}")
    return 0
