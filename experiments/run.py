"""`kvtwin run`: one run, its table on the terminal, its files where asked for."""

from __future__ import annotations

import errno
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from .decision_log import DecisionLogFile
from .terminal import Progress, print_json, say

if TYPE_CHECKING:
    from sim.results.result import Result
    from sim.scenario import Scenario


def run(
    scenario: Scenario,
    *,
    decision_log: Path | None = None,
    out: Path | None = None,
    html: Path | None = None,
    json: bool = False,
) -> int:
    """Simulate, write the files, print. Returns the exit code.

    Raises StartUpError, after its log was written to `out`, when the engine does not start.
    """
    import sim
    from sim.memory.start_up import StartUpError
    from sim.results.console import print_summary
    from sim.results.files import write_text

    _make_room(out, html)
    with Progress("kvtwin run") as progress, DecisionLogFile(decision_log) if decision_log else nullcontext() as log:
        progress.say("simulating")
        try:
            result = sim.simulate(scenario, decision_log=log.write if log else None)
        except StartUpError as error:
            if out is not None:
                write_text(out / "oom.log", error.log)
            raise
    written = _write(result, out, html) + ([decision_log] if decision_log else [])
    if json:
        print_json(result.summary)
        return 0
    print_summary(result)
    for path in written:
        say(f"wrote {path}")
    return 0


def _make_room(out: Path | None, html: Path | None) -> None:
    """Find out before a long run, not after it, that the results have nowhere to go. Raises OSError."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    if html is not None:
        html.parent.mkdir(parents=True, exist_ok=True)
        if html.is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a folder; a file name is needed", str(html))


def _write(result: Result, out: Path | None, html: Path | None) -> list[Path]:
    written: list[Path] = []
    if out is not None:
        written.append(result.save(out))
    if html is not None:
        written.append(result.report(html))
    return written
