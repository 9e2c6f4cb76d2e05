"""Regression scenarios of engines that run out of memory while they start."""

from __future__ import annotations

from typing import Any

from sim.catalog.gpus import GIB
from sim.core.config import ConfigError
from sim.scenario import Scenario

from .case import Case
from .diagnosis import Phase
from .errors import DiagnoseError
from .regression_parts import MARGIN, SPARE, Regression, base_of, engine_of, fails, smaller_pool

_MOST_RANKS = 64
_CHUNK = 64 << 20
"""What a capture asks for at a time: so much more than what is left is certain to fail."""


def weights(case: Case) -> Regression:
    """Weights that do not fit, fixed by more GPUs; or, where they would fit, copies beside them while they are loaded.

    Raises DiagnoseError when no number of GPUs makes them fit.
    """
    try:
        base = base_of(case)
    except ConfigError:
        return _more_gpus(case)
    need = _ledger(base).line("weights").bytes
    observed = case.oom.allocated.bytes - need / 2 if case.oom and case.oom.allocated else 0.0
    # So much that not even half of the weights fit beside the copies.
    copies = max(observed, case.total_bytes - need / 2 if case.total_bytes else 0.0)
    return Regression(
        failing=base.with_(faults=[{"kind": "loading", "gib": copies / GIB}]),
        fixed=base,
        fix="weights loaded in the format in which they are kept: published quantised, or quantised tensor by tensor",
    )


def _more_gpus(case: Case) -> Regression:
    failing = engine_of(case)
    ranks = case.known.tp
    while (ranks := 2 * ranks) <= _MOST_RANKS:
        fixed = failing.with_(tensor_parallel_size=ranks)
        try:
            if not fails(fixed):
                return Regression(failing=failing, fixed=fixed, fix=f"--tensor-parallel-size {ranks}")
        except ConfigError:  # heads that do not divide by so many ranks
            continue
    raise DiagnoseError(f"--scenario-out: the weights fit on no number of GPUs up to {_MOST_RANKS}; no file is written")


def capture(case: Case, base: Scenario) -> Regression:
    """Graphs that take more than was estimated; the fix: a pool that leaves them room."""
    left = _device(base).workspace_bytes
    missing = max(case.shortage_bytes or 0.0, MARGIN) + _CHUNK
    fault = {"kind": "graph_capture", "gib": (left + missing) / GIB}
    return smaller_pool(base, [fault], round(missing) + _CHUNK)


def start_peak(case: Case, base: Scenario, phase: Phase) -> Regression:
    """The sampler's warm-up, or a profile with an encoder that does not fit; the fix: a smaller pool, or smaller inputs."""
    if phase is not Phase.SAMPLER_WARM_UP:
        room = case.total_bytes or _ledger(base).total_bytes
        fault = {"kind": "encoder", "gib": room / GIB}
        return Regression(
            failing=base.with_(faults=[fault]),
            fixed=base,
            fix="a smaller profile: --limit-mm-per-prompt, --max-num-batched-tokens or --max-model-len",
        )
    device = _device(base)
    need = sum(peak.bytes for peak in device.ledger.phases if peak.phase == "sampler")
    faults: list[dict[str, Any]] = [{"kind": "sampler_warm_up"}]
    spare = device.workspace_bytes - need
    if spare >= 0:
        faults.append({"kind": "non_torch", "gib": (spare + MARGIN) / GIB})
    return smaller_pool(base, faults, max(MARGIN, -spare) + SPARE)


def _ledger(scenario: Scenario) -> Any:
    from sim.resolve import resolve

    return resolve(scenario).ledger


def _device(scenario: Scenario) -> Any:
    from sim.assembly import device
    from sim.resolve import resolve

    return device(resolve(scenario))
