"""What a run gives back: one value that holds every number, as plain columns, as tables, as files and as a report.

The columns are kept as the recorder made them. pandas, numpy and plotly are imported only when a table or a report is asked
for, so that a simulation costs no more than its events.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .bill import BILL_COLUMNS
from .files import write_bytes, write_csv, write_json, write_text
from .memory_curve import MEMORY_COLUMNS

if TYPE_CHECKING:
    import pandas as pd

REQUEST_COLUMNS: dict[str, str] = {
    "request_id": "text",
    "arrival_s": "float",
    "input_tokens": "int",
    "output_tokens_requested": "int",
    "output_tokens": "int",
    "priority": "int",
    "outcome": "text",
    "finish_reason": "text",
    "reason": "text",
    "retry_after_s": "float",
    "degraded": "any",
    "queued_s": "float",
    "scheduled_s": "float",
    "first_token_s": "float",
    "finished_s": "float",
    "ttft_s": "float",
    "tpot_s": "float",
    "e2el_s": "float",
    "prefix_hit_tokens": "int",
    "preemptions": "int",
    "recomputed_tokens": "int",
    "peak_blocks": "int",
    "kv_block_seconds": "float",
}
"""Columns of requests.csv, in order, and what kind of value each holds. A missing value is None or not-a-number."""

TIMELINE_COLUMNS: dict[str, str] = {
    "time_s": "float",
    "duration_s": "float",
    "steps": "int",
    "running": "int",
    "waiting": "int",
    "used_blocks": "int",
    "used_blocks_end": "int",
    "cached_blocks": "int",
    "free_blocks": "int",
    "quarantined_blocks": "int",
    "prefill_tokens": "int",
    "decode_tokens": "int",
    "replica": "int",
}
"""Columns of timeline.csv. A row is an interval `[time_s, time_s + duration_s)` of `steps` engine steps with the same
composition; a gap between two rows of a replica is idle time. Blocks are counted at the start of the interval
(`used_blocks_end`: at its end); `waiting` is the longest the queue was in the interval; tokens are those computed in the whole
interval, all steps together."""

ITL_COLUMNS: dict[str, str] = {"request_id": "text", "itl_s": "text"}
"""Columns of itl.csv: a finished request, and every gap between two of its tokens, separated by spaces."""

MARK_COLUMNS: dict[str, str] = {"time_s": "float", "kind": "text", "request_id": "text", "replica": "int"}
"""Columns of marks.csv: one row for each event worth seeing on the time axis; `kind` is an outcome, `preempted` or `oom`."""


class LedgerLine(Protocol):
    """One line of the memory account."""

    @property
    def name(self) -> str:
        """What the bytes are for."""
        ...

    @property
    def bytes(self) -> int:
        """Bytes a rank."""
        ...

    @property
    def formula(self) -> str:
        """How the number came about."""
        ...

    @property
    def inside_budget(self) -> bool:
        """Whether the engine counts the line against its share of the GPU (`gpu_memory_utilization`)."""
        ...


class Ledger(Protocol):
    """The memory account of one rank: lines that do not overlap and together are the GPU's memory."""

    @property
    def lines(self) -> Sequence[LedgerLine]:
        """The lines, in the order in which the account is drawn up."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Result:
    """One finished run. Made by `sim.simulate`; every time is in simulated seconds unless its name says otherwise.

    Raises ValueError when a column of the contract is missing or the columns of a table differ in length. A mapping without any
    column stands for a table without rows.
    """

    # No slots: the tables below are built on first use and kept in the instance's __dict__.

    summary: Mapping[str, Any]
    """The keys of summary.json. `wall_time_s` and `core_time_s` are the only values that differ between equal runs."""
    request_columns: Mapping[str, Sequence[Any]]
    """One list a column of requests.csv, one entry a request."""
    timeline_columns: Mapping[str, Sequence[Any]]
    """One list a column of timeline.csv, one entry an interval of equal engine steps."""
    mark_columns: Mapping[str, Sequence[Any]]
    """One list a column of marks.csv, one entry an event."""
    memory_columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """One list a column of memory.csv, one entry a moment; none when the device was not known."""
    bill_columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """One list a column of bill.csv, one entry a request."""
    itl_columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """One list a column of itl.csv, one entry a finished request; none of a simulation, which makes its gaps again at any time."""
    oom_log: str = ""
    """What an engine would have logged of the steps that ran out of memory; empty when none did."""
    oom_snapshot: Mapping[str, Any] | None = None
    """What PyTorch's memory snapshot would have held when the first of them did."""
    ledger: Ledger | None = None
    """The memory account the pool was sized with; None when the number of blocks was given."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """Where the numbers come from: version, profile, GPU, scenario hash, date, and `command`, which repeats the run."""
    scenario: Mapping[str, Any] = field(default_factory=dict)
    """The scenario as it was run, defaults filled in, as plain nested tables."""

    def __post_init__(self) -> None:
        for name, contract in (
            ("request_columns", REQUEST_COLUMNS),
            ("timeline_columns", TIMELINE_COLUMNS),
            ("mark_columns", MARK_COLUMNS),
            ("memory_columns", MEMORY_COLUMNS),
            ("bill_columns", BILL_COLUMNS),
            ("itl_columns", ITL_COLUMNS),
        ):
            object.__setattr__(self, name, _in_order(name, getattr(self, name), contract))

    @cached_property
    def requests(self) -> pd.DataFrame:
        """One row a request, the columns of requests.csv in their order."""
        return _frame(self.request_columns, REQUEST_COLUMNS)

    @cached_property
    def timeline(self) -> pd.DataFrame:
        """Engine state over time: one row an interval of steps with the same composition; gaps are idle."""
        return _frame(self.timeline_columns, TIMELINE_COLUMNS)

    @cached_property
    def marks(self) -> pd.DataFrame:
        """Preemptions, rejections, aborts, time-outs, failures and out-of-memory events, one row each."""
        return _frame(self.mark_columns, MARK_COLUMNS)

    @cached_property
    def memory(self) -> pd.DataFrame:
        """The memory of every replica over time, the columns of memory.csv in their order."""
        return _frame(self.memory_columns, MEMORY_COLUMNS)

    @cached_property
    def bill(self) -> pd.DataFrame:
        """What each request's KV memory came to, the columns of bill.csv in their order."""
        return _frame(self.bill_columns, BILL_COLUMNS)

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write the one-file HTML report to `path`, atomically, and return the path. It loads nothing from anywhere.

        Raises ModuleNotFoundError when plotly is not installed, OSError when the file cannot be written.
        """
        from .report import report_html

        return write_text(path, report_html(self))

    def save(self, directory: str | os.PathLike[str]) -> Path:
        """Write summary.json, requests.csv, timeline.csv, marks.csv and report.html into `directory`, each atomically.

        Where they are known, memory.csv and bill.csv too; provenance.json and itl.csv for a run on a device; oom.log and
        oom_snapshot.pickle when a step ran out of memory.
        The report comes last, so that a missing plotly costs only the report. Returns the folder.
        Raises ModuleNotFoundError when plotly is not installed, OSError when a file cannot be written.
        """
        folder = Path(directory)
        write_json(folder / "summary.json", self.summary)
        write_csv(folder / "requests.csv", self.request_columns)
        write_csv(folder / "timeline.csv", self.timeline_columns)
        write_csv(folder / "marks.csv", self.mark_columns)
        tables = (("memory.csv", self.memory_columns), ("bill.csv", self.bill_columns), ("itl.csv", self.itl_columns))
        for name, columns in tables:
            if columns["replica" if name == "memory.csv" else "request_id"]:
                write_csv(folder / name, columns)
        if self.provenance.get("profile") == "measured":
            write_json(folder / "provenance.json", self.provenance)
        if self.oom_log:
            write_text(folder / "oom.log", self.oom_log)
        if self.oom_snapshot is not None:
            write_bytes(folder / "oom_snapshot.pickle", pickle.dumps(dict(self.oom_snapshot), protocol=4))
        self.report(folder / "report.html")
        return folder

    def __repr__(self) -> str:
        summary = self.summary
        return (
            f"Result({summary.get('finished', 0)} of {summary.get('num_requests', 0)} requests finished, "
            f"{len(self.timeline_columns['time_s'])} timeline rows, {len(self.mark_columns['time_s'])} marks)"
        )


def _in_order(name: str, columns: Mapping[str, Sequence[Any]], contract: Mapping[str, str]) -> dict[str, Sequence[Any]]:
    """The contract's columns in the contract's order, then any further ones."""
    if not columns:
        return {column: [] for column in contract}
    missing = [column for column in contract if column not in columns]
    if missing:
        raise ValueError(f"{name} lacks {', '.join(missing)}; it needs {', '.join(contract)}")
    rows = len(columns[next(iter(contract))])
    uneven = {column: len(values) for column, values in columns.items() if len(values) != rows}
    if uneven:
        raise ValueError(f"{name}: {next(iter(contract))} has {rows} rows, but {uneven}")
    return {column: columns[column] for column in [*contract, *(extra for extra in columns if extra not in contract)]}


def _frame(columns: Mapping[str, Sequence[Any]], contract: Mapping[str, str]) -> pd.DataFrame:
    """A table whose dtypes do not depend on the rows: an all-missing float column is still float."""
    import pandas as pd

    def series(name: str, values: Sequence[Any]) -> pd.Series:
        kind = contract.get(name, "any")
        if kind == "any":
            return pd.Series(list(values))
        if kind == "text":
            return pd.Series(list(values), dtype=object)
        return pd.Series(list(values), dtype="float64" if kind == "float" or None in values else "int64")

    return pd.DataFrame({name: series(name, values) for name, values in columns.items()})
