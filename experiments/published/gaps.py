"""The stated gap between two kernels of a captured graph, against what recorded runs say of it (L3's run is not looked at).

A run's decode steps take longer than their kernels. Put down to gaps alone, what is missing gives a time a gap: an upper bound where
other things are missing too, too little where kernels are priced too dear.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from calibration.document import HOST_STATED
from calibration.recorded.runs import RecordedRun, read_run
from calibration.recorded.twin import SimulatedRun, simulate_requests
from sim.catalog.gpus import gpu
from sim.catalog.models import model_shape
from sim.costs.fitted import fitted_cost
from sim.costs.profile import FittedProfile

from .profile_sources import PREFIXES, RTX_PRO_6000, RUNS
from .silicon import cost_of, steady_tpot_s

STATED_US = float(str(HOST_STATED["kernel_gap_us"]))
TRIED_US = (0.0, 0.4, 0.8, 1.2, 1.6, 2.0, 2.4)
"""Gaps under which the run is simulated; a line through the errors says where they vanish."""
QUARTERS = (0.25, 0.5, 0.75)


def with_gap(cost: FittedProfile, gap_us: float) -> FittedProfile:
    """The same prices with so long gaps."""
    return FittedProfile(replace(cost.terms, gap_s=cost.terms.gap_s * gap_us / STATED_US), name=cost.name)


def implied_by_rows(path: Path) -> Any:
    """Columns `model_path`, `tp_size`, `gap_us`, one row a published vLLM row whose engine had its clients to itself. A DataFrame."""
    import pandas as pd

    table = pd.read_csv(path)
    table = table[(table["backend"] == "vllm") & table["gemm_quant_mode"].isna()]
    found = []
    for row in table.itertuples():
        cost = cost_of("profile", str(row.system), str(row.model_path), int(row.tp_size), None)
        assert isinstance(cost, FittedProfile)
        shape = int(row.batch_size), int(row.isl), int(row.osl)
        none, stated = (steady_tpot_s(with_gap(cost, gap), *shape) for gap in (0.0, STATED_US))
        found.append((row.silicon_tpot_ms / 1e3 - none) / (stated - none) * STATED_US)
    return table[["model_path", "tp_size"]].assign(gap_us=found)


def implied_by_run(run: RecordedRun) -> dict[str, float]:
    """The gap at which each statistic of a simulation agrees with the run, in microseconds."""
    settings = RTX_PRO_6000.settings
    cost = fitted_cost(RTX_PRO_6000.profile, model_shape(settings["model"]), gpu(settings["gpu"]))
    twins = [simulate_requests(RTX_PRO_6000.scenario(), run.requests, with_gap(cost, gap)) for gap in TRIED_US]
    statistics: dict[str, Callable[[RecordedRun | SimulatedRun], float]] = {
        "TPOT mean": lambda one: float(np.nanmean(one.tpot_s)),
        "TPOT median": lambda one: float(np.nanmedian(one.tpot_s)),
        "makespan": lambda one: float(one.makespan_s),
    }
    found = {}
    for name, of in statistics.items():
        slope, start = np.polyfit(TRIED_US, [of(twin) / of(run) - 1 for twin in twins], 1)
        found[name] = float(-start / slope)
    return found


def print_gaps(data: Path) -> None:
    """What rows of H100s and the run of an RTX PRO 6000 say of the gap."""
    print(f"\ngap between kernels of a captured graph (stated: {STATED_US} us)")
    table = implied_by_rows(data / "runs" / "silicon_h100_dense.csv")
    for (model, ranks), part in table.groupby(["model_path", "tp_size"])["gap_us"]:
        quarters = ", ".join(f"{part.quantile(share):.2f}" for share in QUARTERS)
        print(f"  H100, {model} TP{ranks:.0f}: quarters {quarters} us, {len(part)} rows")
    run = read_run(data / RUNS / RTX_PRO_6000.run, data / PREFIXES)
    for name, gap_us in implied_by_run(run).items():
        print(f"  RTX PRO 6000, Llama-3.1-8B, {name}: {gap_us:.2f} us")
