"""A trace in memory: requests in order of arrival, and what had to be done to read them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from sim.core.request import RequestSpec
from sim.workload.errors import TraceError
from sim.workload.ticks import Ticks

ABSURD_SPAN_S = 366 * 86_400.0
"""Longest trace that is believed: longer than a year is a corrupt time or the wrong unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One request as a file states it, lengths and times already checked."""

    line: int
    """Line number in the file, from 1."""
    arrival_s: float
    """Seconds on the file's own clock."""
    input_tokens: int
    """Prompt length."""
    output_tokens: int
    """Tokens generated."""
    request_id: str | None = None
    """Identity in the file, where it gives one."""
    priority: int = 0
    """Smaller is more important."""
    content_ids: tuple[Hashable, ...] = ()
    """See `RequestSpec.content_ids`."""
    content_block_tokens: int = 0
    """See `RequestSpec.content_block_tokens`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A recorded workload. `arrival_s` of the first request is 0 and recorded distances are kept."""

    name: str
    """File name without its folder."""
    format: str
    """Name of the format that was recognised."""
    requests: tuple[RequestSpec, ...]
    """In order of arrival."""
    file_notes: tuple[str, ...] = ()
    """Sentences on what was dropped, sorted or inferred while reading."""
    ticks: Ticks | None = None
    """The recorded times, when they are quantised on ticks; None when they are not."""
    ticks_spread: bool = False
    """Whether `requests` has the arrivals spread inside their ticks."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Everything a result should say about this trace, one sentence each."""
        return self.file_notes if self.ticks is None else (*self.file_notes, self.ticks.note(spread=self.ticks_spread))

    @property
    def rate_per_s(self) -> float:
        """Gaps divided by the time from first to last arrival; infinite when all arrive at once."""
        return mean_rate_per_s(self.requests)

    def with_ticks(self, *, spread: bool, seed: int, replication: int = 0) -> Trace:
        """The same trace with arrivals spread inside their ticks (drawn anew), or as recorded. Unquantised traces stay as they are."""
        if self.ticks is None:
            return self
        times_s = self.ticks.spread_s(seed=seed, replication=replication) if spread else self.ticks.recorded_s
        start_s = times_s[0]
        moved = tuple(
            replace(spec, arrival_s=time_s - start_s) for spec, time_s in zip(self.requests, times_s, strict=True)
        )
        return replace(self, requests=moved, ticks_spread=spread)


def mean_rate_per_s(requests: Sequence[RequestSpec]) -> float:
    """Gaps divided by the time from the first arrival to the last; infinite when that time is 0."""
    span_s = requests[-1].arrival_s - requests[0].arrival_s if requests else 0.0
    return (len(requests) - 1) / span_s if span_s > 0 else float("inf")


def assemble(
    path: str, *, name: str, format_name: str, records: list[Record], notes: list[str], may_have_ticks: bool
) -> Trace:
    """A Trace from the records of a file: sorted, starting at 0, ids checked; ticks found but not yet spread.

    Raises: TraceError when nothing is left, an id appears twice, or the times span more than a year.
    """
    if not records:
        dropped = f" ({notes[-1]})" if notes else ""
        raise TraceError(f"{path}: found no request{dropped}; expected at least one data row of {format_name}")
    by_line = records
    backwards = [after for before, after in pairwise(by_line) if after.arrival_s < before.arrival_s]
    records = sorted(by_line, key=lambda record: record.arrival_s) if backwards else by_line
    span_s = records[-1].arrival_s - records[0].arrival_s
    if span_s > ABSURD_SPAN_S:
        suspect = max(
            records[0], records[-1], key=lambda record: abs(record.arrival_s - records[len(records) // 2].arrival_s)
        )
        raise TraceError(
            f"{path}:{suspect.line}: found an arrival time {span_s / 86_400:.0f} days away from the other end of the trace; "
            f"expected a trace of at most {ABSURD_SPAN_S / 86_400:.0f} days (a corrupt time, or another unit?)"
        )
    if backwards:
        notes.append(
            f"{len(backwards):,} of {len(records):,} rows were earlier than the row before (first: line {backwards[0].line}); "
            "all rows were sorted by time, equal times in file order"
        )
    seen: dict[str, int] = {}
    start_s = records[0].arrival_s
    requests = []
    for number, record in enumerate(records):
        request_id = str(number) if record.request_id is None else record.request_id
        if request_id in seen:
            raise TraceError(
                f"{path}:{record.line}: found request_id {request_id!r} again (first on line {seen[request_id]}); expected each id once"
            )
        seen[request_id] = record.line
        requests.append(
            RequestSpec(
                request_id=request_id,
                arrival_s=record.arrival_s - start_s,
                input_tokens=record.input_tokens,
                output_tokens=record.output_tokens,
                # A replayed request has its output length pinned (EOS ignored), so admission may judge what can never fit.
                max_tokens=record.output_tokens,
                priority=record.priority,
                content_ids=record.content_ids,
                content_block_tokens=record.content_block_tokens,
            )
        )
    ticks = Ticks.detect([record.arrival_s - start_s for record in records]) if may_have_ticks else None
    return Trace(name=name, format=format_name, requests=tuple(requests), file_notes=tuple(notes), ticks=ticks)
