"""Measuring a device: designed steps, timed in random order for as long as the budget lasts, written down as they come.

A pass times every designed step once; the first pass is the least that is needed, further ones are repeats. The reference
step comes back every `REFERENCE_EVERY` steps. A run that was stopped goes on where it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibration.errors import CalibrationError
from sim.catalog.dtypes import DTYPE_BYTES
from sim.catalog.models import model_shape
from sim.catalog.shape import ModelShape

from .design import Limits, design
from .making import Making, drawing_rate
from .session import Session
from .settings import MeasureSettings
from .step_log import SCHEMA, SCHEMA_VERSION, StepRun, is_step_run, read_run, write_run

if TYPE_CHECKING:
    from .rig import StepRig

LEAST_BUDGET_S = 2.0
ANNOUNCED_S = 5.0
"""Making that takes longer is said to whoever is not at a terminal too."""


def measure(
    settings: MeasureSettings,
    budget_s: float,
    out: Path,
    *,
    command: str,
    tell: Callable[[str], None] = lambda text: None,
    note: Callable[[str], None] = lambda text: None,
    rig: StepRig | None = None,
) -> StepRun:
    """Measure until `budget_s` seconds are spent on the run in `out`, those of earlier sessions and of making weights and pool included,
    and the first pass is whole (or `MOST_OVERRUN` times the budget is spent); returns the run.

    `tell` hears how far it is, `note` what is about to take long; `rig` is one that `make_rig` made of the same settings, whose making
    does not count.

    Raises: CalibrationError for a budget that is too small, also for making what is measured, or a run in `out` that is of something
    else; ConfigError for a model or device that cannot be run; OSError.
    """
    if budget_s < LEAST_BUDGET_S:
        raise CalibrationError(f"the budget is {budget_s:g} s; at least {LEAST_BUDGET_S:g} s are needed for one pass")
    shape = model_shape(settings.model)
    before = read_run(out) if is_step_run(out) else None
    if before is not None:
        _check_same(before, settings, shape, out)
        done, all_points = first_pass(before, settings)
        if before.spent_s >= budget_s and done == all_points:
            return before
    from gpu.machine import machine_facts, now

    started_s = time.perf_counter()
    spent_s = before.spent_s if before is not None else 0.0
    if rig is None:
        seconds = _check_making(settings, shape, budget_s - spent_s)
        say = note if seconds >= ANNOUNCED_S else tell
        say(f"making {shape.name} and its KV pool, about {seconds:.0f} s of the budget of {budget_s:g} s")
        rig = make_rig(settings)
    limits, points = rig.limits, design(rig.limits, settings.seed, graphs=rig.has_graphs)
    facts = {**machine_facts(settings.device), "date": now(), "command": command}
    if before is not None:
        _check_same_device(before, facts, out)
    session = Session(rig, points, settings.seed, before, budget_s, started_s)
    document = _document(settings, shape, limits, before, facts, rig.memory)

    def save() -> None:
        found = {
            "skipped": [{"point": point, "why": why} for point, why in session.skipped.items()],
            "clocks": session.clocks,
        }
        write_run(out, document | {name: rows for name, rows in found.items() if rows}, session.steps)

    session.work(save, tell)
    at_end = rig.non_torch_bytes()
    if at_end is not None:
        document["memory"] = {**document["memory"], "non_torch_bytes_at_end": at_end}
        save()
    return read_run(out)


def make_rig(settings: MeasureSettings) -> StepRig:
    """What runs the steps. Raises: ConfigError for a model or device that cannot be run; CalibrationError when it does not fit."""
    from gpu.out_of_memory import OUT_OF_MEMORY

    from .rig import StepRig

    shape = model_shape(settings.model)
    try:
        return StepRig(
            shape,
            settings.limits(shape),
            source=settings.model,
            device=settings.device,
            dtype=settings.dtype,
            kv_cache_dtype=settings.kv_cache_dtype,
            seed=settings.seed,
            clock=settings.clock,
        )
    except OUT_OF_MEMORY as error:
        said = str(error).splitlines()[0]
        raise CalibrationError(
            f"{shape.name}, its KV pool and its workspace do not fit {settings.device}: {said} Take a smaller --model, or lower "
            "--max-num-seqs, --max-model-len or --max-num-batched-tokens"
        ) from None


def _check_making(settings: MeasureSettings, shape: ModelShape, budget_s: float) -> float:
    """Seconds that making weights and pool will take. Raises: CalibrationError where that leaves too little of the budget; ConfigError
    for a model or device that cannot be run.
    """
    from gpu.decoder_config import DecoderConfig
    from gpu.device import find_device
    from gpu.timing import check_clock
    from gpu.weight_files import weights_folder

    check_clock(find_device(settings.device), settings.clock)
    DecoderConfig.of(shape, settings.model)
    making = Making.of(
        shape,
        settings.limits(shape),
        drawn=weights_folder(settings.model) is None,
        cache_bytes=DTYPE_BYTES.get(settings.cache_dtype(shape), 1),
        block_bytes=settings.block_bytes(shape),
    )
    seconds = making.seconds(drawing_rate(settings.device))
    making.check(seconds, budget_s)
    return seconds


def first_pass(run: StepRun, settings: MeasureSettings) -> tuple[int, int]:
    """How many of the designed steps the first pass of a run has timed (or found too large), and how many there are."""
    shape = model_shape(settings.model)
    graphs = any(step.served_by.startswith("graph") for step in run.steps)
    done = {step.point for step in run.steps if step.pass_ == 0} | {
        one["point"] for one in run.document.get("skipped", ())
    }
    return len(done), len(design(settings.limits(shape), settings.seed, graphs=graphs)) - 1


def _document(
    settings: MeasureSettings,
    shape: ModelShape,
    limits: Limits,
    before: StepRun | None,
    facts: dict[str, Any],
    memory: dict[str, Any],
) -> dict[str, Any]:
    sessions = [
        *(before.document.get("sessions", ()) if before else ()),
        {"date": facts["date"], "command": facts["command"]},
    ]
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "provenance": before.document["provenance"] if before else facts,
        "model": settings.model_facts(shape),
        "settings": settings.formats(shape),
        "limits": limits.as_dict(),
        "memory": before.document["memory"] if before else memory,
        "sessions": sessions,
    }


def _check_same(before: StepRun, settings: MeasureSettings, shape: ModelShape, out: Path) -> None:
    """Raise CalibrationError when the run in `out` is of another model, range or seed."""
    now_ = {
        "model": settings.model_facts(shape),
        "settings": settings.formats(shape),
        "limits": settings.limits(shape).as_dict(),
    }
    for table, values in now_.items():
        for key, value in values.items():
            was = before.document[table].get(key)
            if was != value:
                raise CalibrationError(
                    f"{out} holds a run with {table} {key} = {was}, this one has {value}; give another --out, or the same settings"
                )


def _check_same_device(before: StepRun, facts: dict[str, Any], out: Path) -> None:
    for key in ("device", "device_name", "driver", "torch", "triton", "threads"):
        was = before.document["provenance"].get(key)
        if was != facts[key]:
            raise CalibrationError(
                f"{out} holds a run measured with {key} {was}, this one has {facts[key]}; give another --out: the two cannot be mixed"
            )
