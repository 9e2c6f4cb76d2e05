"""`kvtwin diagnose`: what a failure left behind, diagnosed and printed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.terminal import Progress, print_json, say

from .allocator_runs import checked_confs
from .gather import read_files
from .investigate import investigate


def run_diagnose(
    files: Sequence[str | Path],
    *,
    model: str | None = None,
    gpu: str | None = None,
    read_snapshot: Callable[[Path], Any] | None = None,
    what_if: Sequence[str] = (),
    out: Path | None = None,
    html: Path | None = None,
    scenario_out: Path | None = None,
    json: bool = False,
    **settings: Any,
) -> int:
    """Diagnose `files` together and print the result; `out` also gets diagnosis.json, `html` a page with pictures. Returns the
    exit code, 0.

    `read_snapshot` reads PyTorch memory snapshots; without it pickles are refused. `what_if` are allocator settings under which
    their history is replayed too. `scenario_out` gets a scenario that fails in the same way, and a file beside it the same with the
    fix.

    "Cannot tell from this" is an answer too. Raises DiagnoseError or ConfigError for bad input.
    """
    with Progress("kvtwin diagnose") as progress:
        confs = checked_confs(what_if)
        evidence = read_files(files, read_snapshot, what_if=confs, progress=progress.say)
        progress.say("weighing")
        case, diagnosis = investigate(evidence, model=model, gpu=gpu, **settings)
    document = diagnosis.as_document()
    written: tuple[Path, ...] = ()
    if scenario_out is not None:
        from .regression import regression

        written = regression(case, diagnosis).write(scenario_out)
    if html is not None:
        from sim.results.files import write_text

        from .page import page

        written = (*written, write_text(html, page(evidence, case, diagnosis)))
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
