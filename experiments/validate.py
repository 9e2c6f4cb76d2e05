"""`kvtwin validate`: the gate. Scenarios × presets in both worlds; any difference, leak, fallback or error is exit code 1."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sim import __version__
from sim.core.policies import PRESETS
from sim.results.files import write_json, write_text
from sim.scenario_errors import ScenarioError, choices

from .outputs import make_room
from .terminal import Progress, print_json, say
from .validation import SCENARIOS, Cell, check_cell, reference_answers
from .validation.reports import junit_text, page_text


def validate(
    *,
    device: str = "cpu",
    scenarios: Sequence[str] = (),
    presets: Sequence[str] = (),
    junit: Path | None = None,
    html: Path | None = None,
    out: Path | None = None,
    json: bool = False,
) -> int:
    """Check every cell (or those named), write the files, print. Returns the exit code.

    Raises ScenarioError for an unknown name or a machine without torch, ConfigError for a device that is not there.
    """
    facts = _facts(device)
    make_room(out, junit, html)
    chosen = [SCENARIOS[name] for name in _known("--scenario", scenarios, list(SCENARIOS))]
    names = _known("--preset", presets, list(PRESETS))
    started_s = time.perf_counter()
    cells: list[Cell] = []
    with Progress("kvtwin validate") as progress:
        for scenario in chosen:
            progress.say(f"{scenario.name} ({len(cells)} of {len(chosen) * len(names)} cells done)")
            reference = _reference(scenario.name, device)
            cells += [check_cell(scenario, name, device, reference) for name in names]
            if out is not None:  # what is known is known even when the run is broken off
                write_json(
                    out / "validate.json", {"ok": False, "cells": [asdict(cell) for cell in cells], "provenance": facts}
                )
    facts["seconds"] = round(time.perf_counter() - started_s, 1)
    document = {"ok": all(cell.ok for cell in cells), "cells": [asdict(cell) for cell in cells], "provenance": facts}
    written = []
    if out is not None:
        written = [
            write_json(out / "validate.json", document),
            write_text(out / "validate.xml", junit_text(cells, facts["seconds"])),
            write_text(out / "validate.html", page_text(cells, facts)),
        ]
    if junit is not None:
        written.append(write_text(junit, junit_text(cells, facts["seconds"])))
    if html is not None:
        written.append(write_text(html, page_text(cells, facts)))
    if json:
        print_json(document)
    else:
        _print(cells, device, written)
    return 0 if document["ok"] else 1


def _reference(name: str, device: str) -> dict[str, list[int]] | None:
    """The answers with unlimited memory; None when that run itself fails, which each cell then reports."""
    try:
        return reference_answers(SCENARIOS[name], device=device)
    except RuntimeError:
        return None


def _known(flag: str, given: Sequence[str], known: list[str]) -> list[str]:
    for name in given:
        if name not in known:
            raise ScenarioError(f"{flag} is {name!r}; {choices(name, known)}")
    return list(given) or known


def _facts(device: str) -> dict[str, Any]:
    """Where the verdict comes from. Finds out before a long run whether there is such a device."""
    try:
        import torch

        from gpu.device import find_device
        from gpu.machine import cpu_name
    except ImportError as error:
        raise ScenarioError(f"kvtwin validate really runs a model, which needs torch: {error}") from None
    found = find_device(device)
    cuda = found.type == "cuda"
    return {
        "kvtwin_version": __version__,
        "device": torch.cuda.get_device_name(found) if cuda else f"cpu ({cpu_name()})",
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _print(cells: Sequence[Cell], device: str, written: Sequence[Path]) -> None:
    for cell in cells:
        if not cell.ok:
            say(f"{cell.scenario} under {cell.preset}: {cell.error}")
    bad = sum(not cell.ok for cell in cells)
    steps = sum(cell.facts.get("steps", 0) for cell in cells)
    preemptions = sum(cell.facts.get("preemptions", 0) for cell in cells)
    say(
        f"{len(cells) - bad} of {len(cells)} cells agree on {device}: {steps:,} steps, {preemptions} preemptions, decisions and tokens "
        "compared one by one"
    )
    for path in written:
        say(f"wrote {path}")
