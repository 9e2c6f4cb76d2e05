"""Build the embedded profiles from the public kernel tables: `python -m experiments.build_profiles DATA [--date D]`.

Everything is fitted to kernel tables alone: no run of a server is looked at, and host time is 0 ("kernels only").
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calibration.document import write
from calibration.kernels.fit_card import fit_card_profile
from calibration.kernels.fit_gpu import fit_gpu_profile
from calibration.kernels.fit_model import fit_model_profile, skew_table
from calibration.readers import aiconfigurator, llmservingsim
from sim.costs.fitted import FOLDER

from .bad_input import exit_status
from .published.profile_sources import CARDS, END_TO_END, GPU_TABLES, KERNELS, NOT_JUDGED, RUNS
from .terminal import say

COMMAND = "python -m experiments.build_profiles DATA"


def fitted_cards(data: Path, date: str) -> list[dict[str, Any]]:
    """Documents from LLMServingSim tables: of each model, and of each card's kernel terms.

    Raises: CalibrationError, ConfigError, OSError.
    """
    documents: list[dict[str, Any]] = []
    for folders in CARDS:
        sources = [llmservingsim.read_profile(data / RUNS / "profiles" / folder, ranks) for folder, ranks in folders]
        skew = next((table for table in map(skew_table, sources) if table is not None), None)
        documents += [fit_model_profile(one, date=date, command=COMMAND, sibling_skew=skew) for one in sources]
        documents.append(fit_card_profile(sources, date=date, command=COMMAND))
    return [_with_end_to_end(document) for document in documents]


def fitted_gpus(data: Path, date: str) -> list[dict[str, Any]]:
    """Documents from aiconfigurator tables. Raises: CalibrationError, ConfigError, OSError."""
    tables = (aiconfigurator.read_tables(data / KERNELS / name) for name in GPU_TABLES)
    return [_with_end_to_end(fit_gpu_profile(one, date=date, command=COMMAND)) for one in tables]


def _with_end_to_end(document: dict[str, Any]) -> dict[str, Any]:
    """What validation found, beside the errors of the fit."""
    document["error"]["end_to_end"] = END_TO_END.get(document["name"], NOT_JUDGED)
    return document


def build_all(data: Path, out: Path, date: str) -> dict[str, Path]:
    """Write every profile into `out`; returns their paths by name. Raises: CalibrationError, ConfigError, OSError."""
    documents = [*fitted_cards(data, date), *fitted_gpus(data, date)]
    out.mkdir(parents=True, exist_ok=True)
    paths = {document["name"]: out / f"{document['name']}.json" for document in documents}
    for document in documents:
        write(document, paths[document["name"]])
    return paths


def main(argv: Sequence[str] | None = None) -> int:
    """Build and say what was built. The exit status is 2 on bad input."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m experiments.build_profiles")
    parser.add_argument("data", type=Path, help="folder of the public data (shared/data)")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder that the profiles go to")
    parser.add_argument(
        "--date", default=datetime.datetime.now(datetime.UTC).date().isoformat(), help="date of the fit; today"
    )
    chosen = parser.parse_args(argv)

    def work() -> int:
        for name, path in build_all(chosen.data, chosen.out, chosen.date).items():
            say(f"{name:<44} {path.stat().st_size / 1000:7.1f} kB")
        return 0

    return exit_status(parser.prog, work)


if __name__ == "__main__":
    sys.exit(main())
