"""A memory curve: what was allocated and reserved over time, beside what the engine was serving.

Columns (units are part of the names; bytes, KiB, MiB or GiB): `time_s`, `allocated_bytes`, and where they were recorded
`reserved_bytes`, `in_use_bytes` (the whole process), `total_bytes`, `workspace_bytes` (temporary tensors of a step),
`active_sequences`, `tokens` (in the KV cache), `requests`, `batch_tokens`, `prefill_tokens`, `decode_sequences`, `beams`,
`phase`, `replica`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from .errors import DiagnoseError
from .table_file import BYTE_UNITS, TIME_UNITS, Table

Floats = npt.NDArray[np.float64]

_STEMS = ("allocated", "reserved", "in_use", "total", "workspace")
_LINES = ("headroom", "other_processes", "cuda_graphs", "non_torch", "kv_used", "kv_free")
"""What kvtwin's own recorder knows of a device beside that."""
_SEQUENCES = ("active_sequences", "running", "num_seqs", "active_seqs", "sequences")
_TOKENS = ("tokens", "kv_tokens", "cached_tokens", "num_tokens")
_DIMENSIONS = {
    "requests": ("requests", "num_requests", "requests_in_flight"),
    "batch_tokens": ("batch_tokens", "num_batched_tokens", "num_scheduled_tokens", "step_tokens"),
    "prefill_tokens": ("prefill_tokens", "prefill_batch_tokens", "new_tokens"),
    "decode_sequences": ("decode_sequences", "decode_seqs", "num_decode_seqs"),
    "beams": ("beams", "beam_width", "best_of"),
}
"""Further dimensions of a load, and the names under which they are recorded."""
_LEAST_ROWS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Arrays `[rows]`, in the order of time. None for what was not recorded."""

    name: str
    time_s: Floats
    allocated: Floats
    """Bytes in live tensors."""
    reserved: Floats | None = None
    """Bytes the allocator holds."""
    in_use: Floats | None = None
    """Bytes of the whole process."""
    total_bytes: float | None = None
    """Physical memory, where recorded."""
    sequences: Floats | None = None
    """Active sequences."""
    tokens: Floats | None = None
    """Tokens in the KV cache."""
    workspace: Floats | None = None
    """Bytes that a step needed for temporary tensors."""
    dimensions: Mapping[str, Floats] = field(default_factory=dict)
    """What else of the load was recorded: `requests`, `batch_tokens`, `prefill_tokens`, `decode_sequences`, `beams`."""
    lines: Mapping[str, Floats] = field(default_factory=dict)
    """Bytes by line, as kvtwin records them: `headroom` (negative: missing), `other_processes`, `cuda_graphs`, `non_torch`, `kv_used`,
    `kv_free`."""
    workspace_phases: tuple[str, ...] = ()
    """The phase of a step in which it needed its workspace, one a row; empty when not recorded."""
    phases: tuple[str, ...] = ()
    """One a row; empty when not recorded."""

    @property
    def load(self) -> Floats | None:
        """What memory should follow: tokens, else active sequences."""
        return self.tokens if self.tokens is not None else self.sequences

    @property
    def idle(self) -> npt.NDArray[np.bool_] | None:
        """Rows at which nothing was served; None when the load was not recorded."""
        served = self.sequences if self.sequences is not None else self.tokens
        return None if served is None else np.equal(served, 0)


_MOST_BYTES = 2.0**50
"""A pebibyte: no device has so much, so the unit is wrong."""


def is_curve(table: Table) -> bool:
    """True for a table that has a time and an allocated column, with or without their units."""
    return any(name.startswith("time") for name in table.header) and any(
        name.startswith("allocated") for name in table.header
    )


def read_curves(table: Table) -> tuple[Curve, ...]:
    """The curves in `table`: one, or one a replica where more than one is recorded. Raises as `read_curve` does."""
    replicas = list(dict.fromkeys(table.text("replica")))
    if len(replicas) < 2:
        return (read_curve(table),)
    at = table.header.index("replica")
    return tuple(
        read_curve(
            replace(
                table,
                name=f"{table.name}, replica {replica}",
                rows=tuple(row for row in table.rows if row[at].strip() == replica),
            )
        )
        for replica in replicas
    )


def read_curve(table: Table) -> Curve:
    """The curve in `table`, sorted by time; rows without a figure for allocated memory are left out.

    Raises:
        DiagnoseError: a unit is missing, a cell is no number, memory is negative or beyond any device, or there are fewer than four rows.
    """
    time = table.quantity("time", TIME_UNITS)
    found = {stem: table.quantity(stem, {k: float(v) for k, v in BYTE_UNITS.items()}) for stem in _STEMS}
    allocated = found["allocated"]
    if time is None or allocated is None:
        raise DiagnoseError(
            f"{table.name}: has no {'time' if time is None else 'allocated'} column; a memory curve needs time_s and allocated_bytes"
        )
    moments, bytes_ = np.asarray(time), np.asarray(allocated)
    keep = np.isfinite(moments) & np.isfinite(bytes_)
    if int(keep.sum()) < _LEAST_ROWS:
        raise DiagnoseError(
            f"{table.name}: {int(keep.sum())} rows with time and allocated memory; at least {_LEAST_ROWS} are needed"
        )
    if (bytes_[keep] < 0).any():
        raise DiagnoseError(f"{table.name}: allocated memory is negative in line {int(np.argmax(bytes_ < 0)) + 2}")
    if (bytes_[keep] > _MOST_BYTES).any():
        line = int(np.argmax(np.where(keep, bytes_, 0.0) > _MOST_BYTES)) + 2
        raise DiagnoseError(
            f"{table.name}: allocated memory is {bytes_[line - 2]:g} bytes in line {line}, more than any device has"
        )
    order = np.argsort(moments[keep], kind="stable")

    def column(values: Sequence[float] | None) -> Floats | None:
        return None if values is None else _filled(np.asarray(values)[keep][order])

    total = column(found["total"])
    phases = table.text("phase") if table.has("phase") else []
    chosen = np.flatnonzero(keep)[order]
    return Curve(
        name=table.name,
        time_s=moments[keep][order],
        allocated=bytes_[keep][order],
        reserved=column(found["reserved"]),
        in_use=column(found["in_use"]),
        total_bytes=None if total is None else float(total.max()),
        sequences=column(_counts(table, _SEQUENCES)),
        tokens=column(_counts(table, _TOKENS)),
        workspace=column(found["workspace"]),
        dimensions={
            name: values
            for name, columns in _DIMENSIONS.items()
            if (values := column(_counts(table, columns))) is not None
        },
        lines={
            stem: values
            for stem in _LINES
            if (values := column(table.quantity(stem, {k: float(v) for k, v in BYTE_UNITS.items()}))) is not None
        },
        workspace_phases=tuple(table.text("workspace_phase")[int(row)] for row in chosen)
        if table.has("workspace_phase")
        else (),
        phases=tuple(phases[int(row)] for row in chosen) if phases else (),
    )


def _counts(table: Table, names: Sequence[str]) -> list[float] | None:
    name = next((name for name in names if name in table.header), None)
    return None if name is None else table.counts(name)


def _filled(values: Floats) -> Floats | None:
    """Missing figures repeat the last one; None when there is none at all."""
    if not np.isfinite(values).any():
        return None
    seen = np.where(np.isfinite(values), np.arange(len(values)), -1)
    last = np.maximum.accumulate(seen)
    last[last < 0] = int(np.flatnonzero(np.isfinite(values))[0])
    filled: Floats = values[last]
    return filled
