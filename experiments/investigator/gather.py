"""Reading the files of one failure, each recognised by its content, and putting together what they say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .case import Case
from .curve import Curve, is_curve, read_curve
from .curve_facts import measure
from .engine_log import EngineLog, Stats, is_timeline, read_engine_log, read_timeline
from .errors import DiagnoseError
from .excerpt import excerpt
from .failures import read_failures
from .known import Known, fits_message, read_known, with_weights
from .oom_message import OomMessage, read_messages, without_hints
from .phases import read_mark
from .request_log import RequestLog, is_request_log, read_request_log
from .snapshot import SnapshotFacts, snapshot_facts
from .table_file import read_table

LONGEST_BYTES = 256 << 20
"""Files beyond this are refused: a diagnosis needs the start-up and the failure, not days of requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the files held."""

    texts: tuple[str, ...] = ()
    """Messages and logs."""
    curves: tuple[Curve, ...] = ()
    requests: tuple[RequestLog, ...] = ()
    stats: tuple[Stats, ...] = ()
    """Scheduler lines that came as a table."""
    snapshots: tuple[Any, ...] = ()
    """Memory snapshots, as their reader gave them."""
    notes: tuple[str, ...] = ()


def read_files(paths: Sequence[str | Path], read_snapshot: Callable[[Path], Any] | None = None) -> Evidence:
    """Read every file; pickles with `read_snapshot`, which must be a reader that runs no code.

    Raises:
        DiagnoseError: no file, or one that is missing, a folder, empty, binary, too large, or a broken table.
    """
    if not paths:
        raise DiagnoseError(
            "no file is given; give an out-of-memory message, a server log, a memory curve (CSV) or requests.csv"
        )
    texts: list[str] = []
    curves: list[Curve] = []
    requests: list[RequestLog] = []
    stats: list[Stats] = []
    snapshots: list[Any] = []
    notes: list[str] = []
    for path in map(Path, paths):
        if read_snapshot is not None and path.is_file() and _starts_as_pickle(path):
            snapshots.append(read_snapshot(path))
            continue
        text = _text(path)
        table = read_table(str(path), text)
        if table is not None and is_curve(table):
            curves.append(read_curve(table))
        elif table is not None and is_request_log(table):
            requests.append(read_request_log(table))
        elif table is not None and is_timeline(table):
            stats += read_timeline(table)
        elif table is not None and len(table.rows) > 1 and _is_numeric(table.rows[0]):
            raise DiagnoseError(
                f"{path}: a table with the columns {', '.join(table.header[:8])}; known are memory curves (time_s, allocated_bytes, …) "
                "and request logs (request_id, arrival_s, input_tokens, output_tokens, …)"
            )
        else:
            part = excerpt(text)
            if part is not text:
                notes.append(f"{path} is long: its beginning and the lines around the failure were read")
            texts.append(part)
    return Evidence(
        texts=tuple(texts),
        curves=tuple(curves),
        requests=tuple(requests),
        stats=tuple(stats),
        snapshots=tuple(snapshots),
        notes=tuple(notes),
    )


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
    """The file as text; bytes that are not UTF-8 are replaced, because logs are cut off in the middle of characters."""
    expected = "expected a text file: a message, a log or a CSV"
    try:
        if path.is_dir():
            raise DiagnoseError(f"{path}: found a folder; {expected}")
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
    """Put together what the texts, tables and the user say. What the user gives wins over what a text says."""
    text = without_hints("\n".join(evidence.texts))
    messages = read_messages(text)
    facts = _facts_of(snapshot, evidence.snapshots)
    oom = _first_complete(messages) or (facts.oom_message if facts else None)
    known = given.over(read_known(text))
    known = replace(known, gpu=given.gpu or fits_message(known.gpu, oom.total.bytes if oom and oom.total else None))
    known = with_weights(known, text)
    failures = read_failures(text)
    line = oom.line if oom else failures[0].line if failures else None
    curve = evidence.curves[0] if evidence.curves else None
    return Case(
        known=known,
        text=text,
        oom=oom,
        num_messages=len(messages),
        failures=failures,
        mark=read_mark(text, line),
        log=_log(text, evidence.stats),
        curve=curve,
        curve_facts=measure(curve) if curve else None,
        requests=evidence.requests[0] if evidence.requests else None,
        snapshot=facts,
    )


def _facts_of(snapshot: Any, read: Sequence[Any]) -> SnapshotFacts | None:
    """Facts of the snapshot given, else of the first one read."""
    chosen = snapshot if snapshot is not None else read[0] if read else None
    return None if chosen is None else snapshot_facts(chosen)


def _log(text: str, stats: Sequence[Stats]) -> EngineLog | None:
    log = read_engine_log(text) if text else None
    if not stats:
        return log
    return replace(log or EngineLog(account={}), stats=tuple(stats))


def _first_complete(messages: Sequence[OomMessage]) -> OomMessage | None:
    """The first message with figures of the device; else the first."""
    return next((message for message in messages if message.has_numbers), messages[0] if messages else None)
