"""A run folder of timed steps: `run.json` says what was measured on what, `steps.csv` has one row a step.

Both are written whole or not at all, so that a run can be stopped at any time and gone on with. The folder explains itself:
`run.json` names every column of `steps.csv` with its unit and meaning.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.core.batch_shape import BatchShape
from sim.results.files import write_json, write_text

from .errors import CalibrationError
from .tables import UNIT_SUFFIXES
from .text_files import check_keys, read_object, read_text

SCHEMA = "kvtwin-steps"
SCHEMA_VERSION = 1
RUN, STEPS = "run.json", "steps.csv"
COLUMNS: dict[str, str] = {
    "session": "number of the session (a run that was stopped and gone on with has several), from 0",
    "pass": "number of the pass over the design, from 0; -1 for the reference step between",
    "point": "number of the designed step; repeats have the same; 0 is the reference step",
    "group": "reference, corner, space (space filling) or moves (block copies and swaps)",
    "elapsed_s": "seconds spent on this run, all sessions together, when the step ended",
    "duration_us": "duration of the step in microseconds: by CUDA events on a GPU, elsewhere by the clock that `settings` name",
    "prefill": "prompt chunks as tokens@context: tokens computed now @ tokens cached before; separated by spaces",
    "decode_seqs": "sequences that compute one token",
    "decode_context_tokens": "KV tokens that their attention reads, the new ones included, all sequences together",
    "decode_max_context_tokens": "the longest of them",
    "sampled_seqs": "sequences from which a token is sampled",
    "copied_blocks": "KV blocks copied on the device before the step",
    "swapped_blocks": "KV blocks moved between device and host before the step, both directions together",
    "workspace_bytes": "most bytes of the workspace in use at once",
    "process_bytes": "resident memory of the process after the step; empty where the system does not tell",
    "device_bytes": "bytes that torch has reserved on the GPU; empty on the CPU",
    "served_by": "eager, or graph of N for decodes that a captured graph of N sequences served",
}
"""Columns of steps.csv and what they mean."""
_OPTIONAL = ("process_bytes", "device_bytes")
_TEXT = ("group", "prefill", "served_by")
NEEDED: dict[str, tuple[str, ...]] = {
    "model": ("name", "num_layers", "hidden_size", "intermediate_size", "vocab_size", "attention"),
    "settings": ("dtype", "kv_cache_dtype", "clock"),
    "limits": ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "block_size"),
    "memory": (),
}
"""What run.json must say of what was measured, by part."""
PROVENANCE_KEYS = ("device", "device_name", "torch", "kvtwin_version", "date", "command")
"""What a run must say of its origin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One timed step: a row of steps.csv."""

    session: int
    pass_: int
    point: int
    group: str
    elapsed_s: float
    duration_us: float
    shape: BatchShape
    workspace_bytes: int
    process_bytes: int | None = None
    device_bytes: int | None = None
    served_by: str = "eager"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRun:
    """A run folder, read and checked."""

    name: str
    document: Mapping[str, Any]
    """run.json: schema, provenance, model, limits, memory, sessions, columns."""
    steps: tuple[Step, ...]
    """In the order in which they were timed."""

    @property
    def spent_s(self) -> float:
        """Seconds spent measuring, all sessions together."""
        return self.steps[-1].elapsed_s if self.steps else 0.0


def is_step_run(folder: Path) -> bool:
    """Whether a folder says that it holds timed steps."""
    return (folder / STEPS).is_file() or (folder / RUN).is_file()


def write_run(folder: Path, document: Mapping[str, Any], steps: Sequence[Step]) -> None:
    """Write both files, each atomically. Raises OSError."""
    write_json(folder / RUN, {**document, "columns": COLUMNS})
    write_text(folder / STEPS, _csv(steps))


def read_run(folder: Path) -> StepRun:
    """The run in `folder`.

    Raises: CalibrationError when it has no provenance, another schema version or unit, or malformed rows; OSError.
    """
    if not (folder / RUN).is_file():
        raise CalibrationError(f"{folder}: no {RUN}; steps measured on an unknown device cannot be used")
    return StepRun(name=folder.name, document=_document(folder / RUN), steps=tuple(_steps(folder / STEPS)))


def _document(path: Path) -> Mapping[str, Any]:
    document = read_object(path)
    if document.get("schema") != SCHEMA:
        raise CalibrationError(f'{path}: not a run of timed steps: its "schema" must be {SCHEMA!r}')
    if document.get("schema_version") != SCHEMA_VERSION:
        raise CalibrationError(
            f"{path}: schema version {document.get('schema_version')!r}, this version of kvtwin reads {SCHEMA_VERSION}; "
            "measure again"
        )
    provenance = document.get("provenance") or {}
    for key in PROVENANCE_KEYS:
        if not provenance.get(key):
            raise CalibrationError(f"{path}: its provenance does not say {key!r}; a run of unknown origin is not used")
    for key, needed in NEEDED.items():
        if not isinstance(document.get(key), dict):
            raise CalibrationError(f"{path}: it does not say {key!r}; `kvtwin calibrate measure` writes it")
        check_keys(document[key], needed, f"{path}: {key}")
    for name in NEEDED["limits"]:
        value = document["limits"][name]
        if not isinstance(value, int) or value < 1:
            raise CalibrationError(f"{path}: limits {name} is {value!r}; it is a whole number, at least 1")
    return document


def _steps(path: Path) -> list[Step]:
    if not path.is_file():
        raise CalibrationError(f"{path}: there is no such file; without its steps a run says nothing")
    reader = csv.DictReader(io.StringIO(read_text(path)))
    present = reader.fieldnames or []
    for column in COLUMNS:
        if column not in present:
            raise CalibrationError(f"{path}: column {column!r} is missing{_other_unit(column, present)}")
    found = []
    for line, row in enumerate(reader, start=2):
        try:
            found.append(_step(row))
        except (TypeError, ValueError) as error:
            raise CalibrationError(f"{path}: line {line} is not a timed step: {error}") from error
    return found


def _other_unit(column: str, present: Sequence[str]) -> str:
    stem = next((column.removesuffix(suffix) for suffix in UNIT_SUFFIXES if column.endswith(suffix)), None)
    others = [name for name in present if stem and name in {stem + suffix for suffix in UNIT_SUFFIXES} | {stem}]
    if others:
        return f"; it has {others[0]!r} instead, which is another unit (or none): convert it to {column.rpartition('_')[2]}"
    return f"; it has {', '.join(present) or 'no columns'}"


def _step(row: Mapping[str, str]) -> Step:
    if None in row.values():
        raise ValueError("it has fewer values than there are columns")
    duration, elapsed = float(row["duration_us"]), float(row["elapsed_s"])
    if not 0 <= elapsed < float("inf"):
        raise ValueError(f"elapsed_s is {row['elapsed_s']}, which is no time")
    if not 0 < duration < float("inf"):
        raise ValueError(f"duration_us is {row['duration_us']}, which is no duration")
    counts = {name: int(row[name]) for name in COLUMNS if name not in (*_TEXT, *_OPTIONAL, "elapsed_s", "duration_us")}
    if any(value < 0 for name, value in counts.items() if name != "pass"):
        raise ValueError("a count is below 0")
    if not counts["workspace_bytes"]:
        raise ValueError("workspace_bytes is 0; every step needs some")
    return Step(
        session=counts["session"],
        pass_=counts["pass"],
        point=counts["point"],
        group=row["group"],
        elapsed_s=elapsed,
        duration_us=duration,
        shape=BatchShape(
            prefill=tuple(_chunk(text) for text in row["prefill"].split()),
            decode_seqs=counts["decode_seqs"],
            decode_context_tokens=counts["decode_context_tokens"],
            decode_max_context_tokens=counts["decode_max_context_tokens"],
            sampled_seqs=counts["sampled_seqs"],
            copied_blocks=counts["copied_blocks"],
            swapped_blocks=counts["swapped_blocks"],
        ),
        workspace_bytes=counts["workspace_bytes"],
        **{name: int(row[name]) if row[name] else None for name in _OPTIONAL},
        served_by=row["served_by"],
    )


_SHAPE = (
    "decode_seqs",
    "decode_context_tokens",
    "decode_max_context_tokens",
    "sampled_seqs",
    "copied_blocks",
    "swapped_blocks",
)


def _chunk(text: str) -> tuple[int, int]:
    tokens, at, context = text.partition("@")
    if not at:
        raise ValueError(f"prefill has {text!r}; chunks are written tokens@context")
    return int(tokens), int(context)


def _csv(steps: Sequence[Step]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    for step in steps:
        shape = step.shape
        writer.writerow(
            [
                *(step.session, step.pass_, step.point, step.group),
                *(round(step.elapsed_s, 4), round(step.duration_us, 3)),
                " ".join(f"{tokens}@{context}" for tokens, context in shape.prefill),
                *(getattr(shape, name) for name in _SHAPE),
                step.workspace_bytes,
                *("" if value is None else value for value in (step.process_bytes, step.device_bytes)),
                step.served_by,
            ]
        )
    return stream.getvalue()
