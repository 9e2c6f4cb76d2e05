"""An end-to-end correction of a fitted profile from the first requests of a real run, judged on the others.

The profile keeps its kernels; its host times become what the run's first requests take beyond them. Errors are stated twice, as
kernels only and as corrected, over the requests that were not fitted to.
"""

from __future__ import annotations

import copy
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.assembly import cost_model
from sim.costs.fitted import chosen_profile
from sim.costs.overlap import OverlappedHost, overlapped
from sim.costs.profile import FittedProfile
from sim.costs.protocol import CostModel
from sim.resolve import resolve
from sim.scenario import Scenario

from .errors import CalibrationError
from .host import Correction, CorrectionFit, corrected, fit_correction, text
from .runs import RecordedRun
from .split import DRAWS, SEED
from .tent import Array
from .twin import SimulatedRun, simulate_requests

FIRST = 30
"""Requests of a run that are fitted to unless another number is asked for."""
LEAST_OTHERS = 20
"""Fewer other requests cannot say how good a correction is."""


def fit_requests(run: RecordedRun, scenario: Scenario, first: int, *, date: str, command: str) -> dict[str, Any]:
    """The corrected profile document.

    Raises: CalibrationError when the scenario's profile is no fitted one, or the run has too few requests; ConfigError, ScenarioError.
    """
    if not 5 <= first <= run.ttft_s.size - LEAST_OTHERS:
        raise CalibrationError(
            f"{run.name}: {first} of its {run.ttft_s.size} requests cannot be fitted to; at least 5 are, and at least {LEAST_OTHERS} "
            "others must be left to judge the fit"
        )
    resolved = resolve(scenario)
    prices = cost_model(resolved)
    ahead = isinstance(prices, OverlappedHost)
    kernels = prices.inner if isinstance(prices, OverlappedHost) else prices
    if not isinstance(kernels, FittedProfile):
        raise CalibrationError(
            f"prices {prices.name!r} are no fitted profile; choose one to correct, such as --profile auto"
        )

    def simulated(times: Correction) -> SimulatedRun:
        cost: CostModel = corrected(kernels, times)
        return simulate_requests(scenario, run.requests, overlapped(cost) if ahead else cost)

    def of(source: RecordedRun | SimulatedRun) -> Array:
        return np.asarray([np.nanmedian(values[:first]) for values in (source.tpot_s, source.ttft_s)])

    fit = fit_correction(lambda times: of(simulated(times)), of(run))
    base = chosen_profile(
        resolved["gpu"]["profile"], resolved.model, resolved.gpu, resolved["engine"]["tensor_parallel_size"]
    )
    document: dict[str, Any] = copy.deepcopy(dict(base.data))
    document["name"] = f"{base.name}.corrected"
    drawn = _drawn(fit, run, simulated(fit.found), first)
    document["host"] = {
        "step_us": round(fit.found.step_s * 1e6, 2),
        "seq_us": round(fit.found.seq_s * 1e6, 3),
        "token_us": round(fit.found.token_s * 1e6, 3),
        "samples": {
            f"{name}_us": [round(getattr(one, f"{name}_s") * 1e6, 3) for one in drawn]
            for name in ("step", "seq", "token")
        },
        "origin": f"fitted to the first {first} requests of {run.name} ({run.provenance})",
    }
    errors = {
        "kernels_only": _errors(run, simulated(Correction()), first),
        "corrected": _errors(run, simulated(fit.found), first),
    }
    shown = ", ".join(f"{name} {value:+.1%}" for name, value in errors["corrected"].items())
    document["error"] |= {
        **errors,
        # What a correction leaves of requests that it was not fitted to is how far it can be trusted; no less than what was known before.
        "misfit": max(abs(errors["corrected"]["tpot"]), document["error"].get("misfit", 0.0)),
        "end_to_end": f"corrected by {text(fit.found)} on the first {first} requests of {run.name}; on the others {shown}",
    }
    document["identifiability"] = [
        *document["identifiability"],
        f"of the correction, {' and '.join(fit.identified)} were fitted to two medians: they leave {fit.residuals[0]:+.1%} and "
        f"{fit.residuals[1]:+.1%}; time a sequence could not be told from time a step",
    ]
    document["provenance"] |= {"date": date, "command": command, "corrected_on": asdict(fit.found) | {"run": run.name}}
    return document


def _drawn(fit: CorrectionFit, run: RecordedRun, twin: SimulatedRun, first: int) -> list[Correction]:
    """Corrections fitted to requests drawn with replacement from the first ones, each measured and simulated.

    What the fit's plane leaves of all of them stays; a draw adds by how much its medians are further off than theirs.
    """
    rng = np.random.default_rng(SEED + 3)
    pairs = ((run.tpot_s[:first], twin.tpot_s[:first]), (run.ttft_s[:first], twin.ttft_s[:first]))

    def off(chosen: npt.NDArray[np.int_]) -> Array:
        return np.asarray([np.nanmedian(theirs[chosen]) / np.nanmedian(ours[chosen]) - 1 for ours, theirs in pairs])

    everyone = off(np.arange(first))
    left = np.asarray(fit.residuals)
    return [fit.drawn(left + off(rng.integers(0, first, first)) - everyone) for _ in range(DRAWS)]


def _errors(run: RecordedRun, twin: SimulatedRun, first: int) -> dict[str, float]:
    """Relative errors of means over the requests from `first` on, and of the makespan."""
    found = {
        name: float(np.nanmean(getattr(twin, f"{name}_s")[first:]) / np.nanmean(getattr(run, f"{name}_s")[first:]) - 1)
        for name in ("ttft", "tpot", "e2el")
    }
    return {
        name: round(value, 5) for name, value in (found | {"makespan": twin.makespan_s / run.makespan_s - 1}).items()
    }
