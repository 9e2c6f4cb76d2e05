"""Reading the files of one failure, each recognised by its content, and putting together what they say."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sim.memory.allocators import SnapshotError

from .allocator_runs import AllocatorRuns, allocator_runs
from .case import Case
from .curve import Curve, is_curve, read_curves
from .curve_facts import measure
from .engine_log import EngineLog, Stats, is_timeline, read_engine_log, read_timeline
from .errors import DiagnoseError
from .excerpt import excerpt
from .failures import read_failures
from .known import Known, fits_message, read_known, with_weights
from .log_load import read_load
from .oom_message import OomMessage, read_messages, without_hints
from .phases import read_mark
from .request_log import RequestLog, is_request_log, read_request_log
from .snapshot import snapshot_facts
from .table_file import Table, read_table

LONGEST_BYTES = 256 << 20
"""Files beyond this are refused: a diagnosis needs the start-up and the failure, not days of requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one file held, or one curve of it; one of the fields is set."""

    name: str
    """The file."""
    text: str | None = None
    """A message or a log."""
    curve: Curve | None = None
    requests: RequestLog | None = None
    stats: tuple[Stats, ...] = ()
    """Scheduler lines that came as a table."""
    snapshot: Any = None
    """A memory snapshot, as its reader gave it."""
    runs: AllocatorRuns | None = None
    """Its history, replayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the files held."""

    parts: tuple[Part, ...] = ()
    """In the order of the files."""
    notes: tuple[str, ...] = ()

    @property
    def curves(self) -> tuple[Part, ...]:
        """The parts that are memory curves."""
        return tuple(part for part in self.parts if part.curve is not None)

    @property
    def request_logs(self) -> tuple[Part, ...]:
        """The parts that are request logs."""
        return tuple(part for part in self.parts if part.requests is not None)

    @property
    def snapshots(self) -> tuple[Part, ...]:
        """The parts that are memory snapshots."""
        return tuple(part for part in self.parts if part.snapshot is not None)

    @property
    def texts(self) -> tuple[Part, ...]:
        """The parts that are messages or logs."""
        return tuple(part for part in self.parts if part.text is not None)


def read_files(
    paths: Sequence[str | Path],
    read_snapshot: Callable[[Path], Any] | None = None,
    *,
    what_if: Sequence[str] = (),
    progress: Callable[[str], None] = lambda what: None,
) -> Evidence:
    """Read every file; pickles with `read_snapshot`, which must be a reader that runs no code.

    The history of a snapshot is replayed under its own settings and under `what_if` (default: a few that often help).

    Raises:
        DiagnoseError: no file, or one that is missing, a folder, empty, binary, too large, or a broken table.
    """
    if not paths:
        raise DiagnoseError(
            "no file is given; give an out-of-memory message, a server log, a memory curve (CSV) or requests.csv"
        )
    parts: list[Part] = []
    notes: list[str] = []
    for path in _files(paths):
        name = str(path)
        progress(f"reading {name}")
        if read_snapshot is not None and path.is_file() and _starts_as_pickle(path):
            try:
                snapshot = read_snapshot(path)
            except SnapshotError as error:
                raise DiagnoseError(f"{path}: {error}") from None
            progress(f"replaying the history of {name}")
            parts.append(Part(name=name, snapshot=snapshot, runs=allocator_runs(snapshot, what_if)))
            continue
        text = _text(path)
        if text[:64].lstrip().lower().startswith(("<!doctype html", "<html")):
            notes.append(f"{path} is a web page, which is not read")
            continue
        table = read_table(name, text)
        if _is_other_result(table, text):
            notes.append(f"{path} says nothing of a failure that the run's other files do not: left out")
            continue
        if table is not None and is_curve(table):
            parts += [Part(name=curve.name, curve=curve) for curve in read_curves(table)]
        elif table is not None and is_request_log(table):
            parts.append(Part(name=name, requests=read_request_log(table)))
        elif table is not None and is_timeline(table):
            parts.append(Part(name=name, stats=read_timeline(table)))
        elif table is not None and len(table.rows) > 1 and _is_numeric(table.rows[0]):
            raise DiagnoseError(
                f"{path}: a table with the columns {', '.join(table.header[:8])}; known are memory curves (time_s, allocated_bytes, …) "
                "and request logs (request_id, arrival_s, input_tokens, output_tokens, …)"
            )
        else:
            part = excerpt(text)
            if part is not text:
                notes.append(f"{path} is long: its beginning and the lines around the failure were read")
            parts.append(Part(name=name, text=part))
    if what_if and not any(part.snapshot is not None for part in parts):
        raise DiagnoseError("--what-if replays the history of a memory snapshot, and no snapshot is among the files")
    return Evidence(parts=tuple(parts), notes=tuple(notes))


RUN_FILES = ("oom.log", "oom_snapshot.pickle", "memory.csv", "requests.csv")
"""What a folder of results, given as a whole, is read for."""


def _files(paths: Sequence[str | Path]) -> Iterator[Path]:
    """The paths; a folder of a run's results stands for those of its files that tell of memory."""
    for path in map(Path, paths):
        inside = [path / name for name in RUN_FILES if (path / name).is_file()] if path.is_dir() else []
        yield from inside or [path]


def _is_other_result(table: Table | None, text: str) -> bool:
    """Whether it is marks.csv, bill.csv or summary.json of a run."""
    if table is not None:
        return table.has("time_s", "kind", "request_id") or table.has("request_id", "kv_block_fs")
    return text.startswith("{") and '"kvtwin_version"' in text[:400]


def _is_pickle(head: bytes) -> bool:
    """Protocols 2 to 5, all that PyTorch has written."""
    return len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5


def _starts_as_pickle(path: Path) -> bool:
    with path.open("rb") as stream:
        return _is_pickle(stream.read(2))


def _is_numeric(row: Sequence[str]) -> bool:
    cells = [cell.strip() for cell in row if cell.strip()]
    return bool(cells) and sum(cell.lstrip("-").replace(".", "", 1).isdigit() for cell in cells) >= len(cells) / 2


def _text(path: Path) -> str:
    """The file as text, `-` being what is piped in; bytes that are not UTF-8 are replaced: logs are cut off in the middle of characters."""
    expected = "expected a text file: a message, a log or a CSV"
    if str(path) == "-":
        piped = getattr(sys.stdin, "buffer", None)
        return _decoded(path, sys.stdin.read().encode() if piped is None else piped.read(), expected)
    try:
        if path.is_dir():
            raise DiagnoseError(f"{path}: found a folder without {', '.join(RUN_FILES)}; {expected}")
        if not path.exists():
            raise DiagnoseError(f"{path}: no such file; {expected}")
        if path.stat().st_size > LONGEST_BYTES:
            raise DiagnoseError(
                f"{path}: has more than {LONGEST_BYTES >> 20} MiB; cut out the start-up and the lines before the failure"
            )
        raw = path.read_bytes()
    except (OSError, ValueError) as error:
        if isinstance(error, DiagnoseError):
            raise
        raise DiagnoseError(
            f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}); {expected}"
        ) from None
    return _decoded(path, raw, expected)


def _decoded(path: Path, raw: bytes, expected: str) -> str:
    """The bytes as text. Raises DiagnoseError for an empty file, a pickle and binary data."""
    if not raw.strip(b"\xef\xbb\xbf \t\r\n\0"):
        raise DiagnoseError(f"{path}: found an empty file; {expected}")
    head = raw[:65536]
    if _is_pickle(head):
        raise DiagnoseError(
            f"{path}: found a pickle, which is not run here; {expected}, or a PyTorch memory snapshot through its own reader"
        )
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return raw.decode("utf-16", errors="replace")
    if b"\0" in head:
        raise DiagnoseError(f"{path}: found binary data (a zero byte at offset {head.index(0)}); {expected}")
    return raw.decode("utf-8-sig", errors="replace").replace("\r\n", "\n").replace("\r", "\n")


def case_of(evidence: Evidence, given: Known, snapshot: Any = None) -> Case:
    """Put together what the texts, tables and the user say. What the user gives wins over what a text says.

    Of curves, request logs and snapshots the first of each kind; `further_cases` has the others.
    """
    text = without_hints("\n".join(part.text for part in evidence.texts if part.text is not None))
    messages = read_messages(text)
    read = next(iter(evidence.snapshots), None)
    chosen = snapshot if snapshot is not None else read.snapshot if read else None
    facts = None if chosen is None else snapshot_facts(chosen)
    runs = allocator_runs(snapshot) if snapshot is not None else read.runs if read else None
    if facts is not None and facts.oom_frame and not messages:
        text = f"{text}\n{facts.oom_frame}".lstrip("\n")
    oom = _first_complete(messages) or (facts.oom_message if facts else None)
    known = given.over(read_known(text))
    known = replace(known, gpu=given.gpu or fits_message(known.gpu, oom.total.bytes if oom and oom.total else None))
    known = with_weights(known, text)
    failures = read_failures(text)
    line = oom.line if oom else failures[0].line if failures else None
    curve = next((part.curve for part in evidence.curves), None)
    return Case(
        known=known,
        text=text,
        oom=oom,
        num_messages=len(messages),
        failures=failures,
        mark=read_mark(text, line),
        log=_log(text, [stats for part in evidence.parts for stats in part.stats]),
        load=read_load(text, line) if text else None,
        curve=curve,
        curve_facts=measure(curve) if curve else None,
        requests=next((part.requests for part in evidence.request_logs), None),
        snapshot=facts,
        allocator=runs,
    )


def further_cases(evidence: Evidence, case: Case) -> tuple[tuple[str, Case], ...]:
    """Each curve, request log and snapshot after the first of its kind, as a case of its own, by the name of its file."""
    known, found = case.known, []
    for part in (*evidence.curves[1:], *evidence.request_logs[1:], *evidence.snapshots[1:]):
        facts = None if part.snapshot is None else snapshot_facts(part.snapshot)
        one = Case(
            known=known,
            oom=facts.oom_message if facts else None,
            curve=part.curve,
            curve_facts=measure(part.curve) if part.curve else None,
            requests=part.requests,
            snapshot=facts,
            allocator=part.runs,
        )
        found.append((part.name, one))
    return tuple(found)


def cases_by_file(evidence: Evidence, given: Known) -> tuple[tuple[str, Case], ...]:
    """Every file alone, of kinds of which there are several: texts that tell of a failure, curves, request logs, snapshots."""
    found = []
    for parts in (evidence.texts, evidence.curves, evidence.request_logs, evidence.snapshots):
        cases = [(part.name, case_of(Evidence(parts=(part,)), given)) for part in parts if len(parts) > 1]
        cases = [(name, case) for name, case in cases if not case.text or case.oom or case.failures]
        found += cases if len(cases) > 1 else []
    return tuple(found)


def _log(text: str, stats: Sequence[Stats]) -> EngineLog | None:
    log = read_engine_log(text) if text else None
    if not stats:
        return log
    return replace(log or EngineLog(account={}), stats=tuple(stats))


def _first_complete(messages: Sequence[OomMessage]) -> OomMessage | None:
    """The first message with figures of the device; else the first."""
    return next((message for message in messages if message.has_numbers), messages[0] if messages else None)
