"""From files to a diagnosis: read everything, put it together, judge it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sim.catalog.gpus import gpu as gpu_named
from sim.catalog.models import model_shape
from sim.core.config import ConfigError

from .case import Case
from .diagnosis import Diagnosis
from .gather import Evidence, Part, case_of, cases_by_file, further_cases, read_files
from .known import Known
from .weigh import judge


def diagnose(
    paths: Sequence[str | Path],
    *,
    model: str | None = None,
    gpu: str | None = None,
    snapshot: Any = None,
    read_snapshot: Callable[[Path], Any] | None = None,
    what_if: Sequence[str] = (),
    **settings: Any,
) -> Diagnosis:
    """The diagnosis of one failure from the files it left: messages, logs, memory curves, request logs, together.

    `model` and `gpu` are names of the catalogue, or a `config.json`; a model it does not have only costs precision. `settings`
    are fields of `Known` (`tensor_parallel_size`, `gpu_memory_utilization`, `max_num_seqs`, ...). `snapshot` is a memory snapshot
    that was read elsewhere; `read_snapshot` reads one from a path, and is what pickles among `paths` are given to. `what_if` are
    allocator settings under which the history of a snapshot is replayed, beside its own.

    Raises:
        DiagnoseError: no files, or one that cannot be used, or an unknown GPU or setting; the message says what would be right.
    """
    return investigate(
        read_files(paths, read_snapshot, what_if=what_if), model=model, gpu=gpu, snapshot=snapshot, **settings
    )[1]


def diagnose_text(
    text: str, *, model: str | None = None, gpu: str | None = None, snapshot: Any = None, **settings: Any
) -> Diagnosis:
    """The same for a text at hand, such as a message pasted from a log."""
    evidence = Evidence(parts=(Part(name="text", text=text),))
    return investigate(evidence, model=model, gpu=gpu, snapshot=snapshot, **settings)[1]


def investigate(
    evidence: Evidence,
    *,
    model: str | None = None,
    gpu: str | None = None,
    snapshot: Any = None,
    **settings: Any,
) -> tuple[Case, Diagnosis]:
    """The case that `evidence` makes, and its diagnosis. Arguments and errors are those of `diagnose`."""
    given, notes = given_known(model, gpu, settings)
    case = case_of(evidence, given, snapshot)
    return case, judge(
        case,
        (*evidence.notes, *notes),
        further=further_cases(evidence, case),
        by_file=cases_by_file(evidence, given),
    )


def given_known(model: str | None, gpu: str | None, settings: dict[str, Any]) -> tuple[Known, tuple[str, ...]]:
    """What the user gave, and a note when the model is a repository (`owner/name`) that the catalogue does not have.

    Raises:
        ConfigError: any other unknown model, an unknown GPU, a share that is none, or a configuration file that cannot be read.
        TypeError: a setting that does not exist.
    """
    share = settings.get("gpu_memory_utilization")
    if share is not None and not 0 < share <= 1:
        raise ConfigError(
            f"gpu_memory_utilization is {share:g}; it is the share of the GPU's memory that the engine may use, above 0 and at most 1"
        )
    known = Known(**{name: value for name, value in settings.items() if value is not None})
    if gpu is not None:
        known = replace(known, gpu=gpu_named(gpu))
    if model is None:
        return known, ()
    try:
        return replace(known, shape=model_shape(model), model_name=model), ()
    except ConfigError as error:
        if model.count("/") != 1 or model.endswith(".json"):
            raise
        return replace(known, model_name=model), (f"{error} Without its shape sizes are matched less surely.",)
