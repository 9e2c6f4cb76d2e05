"""What-if for the allocator: a snapshot's own history under its recorded settings and under others, and what that says.

Under the recorded settings the replay must end where the snapshot does; how far it does is said first, because it is what the
other replays are worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sim.memory.allocators import (
    AllocatorConfError,
    CachingSettings,
    Snapshot,
    SnapshotError,
    SnapshotReplay,
    parse_alloc_conf,
    parse_snapshot,
    replay_snapshot,
    settings_of,
)

from .errors import DiagnoseError
from .sizes import MIB, show

TRIED = ("expandable_segments:True", "max_split_size_mb:512", "roundup_power2_divisions:8")
"""Settings that are tried when nobody names one."""
_WORTH_SAYING = 64 * MIB
"""Less reserved memory than this is no effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorRuns:
    """Replays of one device's history."""

    device: int
    num_entries: int
    """Of the history."""
    tried_bytes: int | None
    """What was tried in its last failure; None without one."""
    recorded: SnapshotReplay
    """Under its own settings."""
    others: tuple[tuple[str, SnapshotReplay], ...]
    """By conf string."""
    retry_fits: bool
    """The last failure would have had room, had the pool been searched again when frees that waited were done."""

    @property
    def check(self) -> str:
        """How the replay under the recorded settings compares with the recorded segments."""
        was, run = self.recorded.recorded, self.recorded
        ends = (
            f"{show(was.reserved_bytes)} reserved in {was.num_segments} segments, {show(was.allocated_bytes)} allocated, "
            f"largest free block {show(was.largest_free_bytes)}"
        )
        head = f"the snapshot's {self.num_entries:,} recorded steps, replayed by the caching allocator's rules, end as recorded: {ends}"
        if run.is_exact:
            return head
        off = ", ".join(
            f"{name.removesuffix('_bytes').replace('_', ' ')} {show(by) if name.endswith('bytes') else by}"
            for name, by in run.difference.items()
            if by
        )
        return head.replace(
            "end as recorded", f"do not end quite as recorded (off by: {off or 'sizes of segments'}); recorded are"
        )

    @property
    def sentences(self) -> tuple[str, ...]:
        """The check, and one sentence a setting."""
        return (self.check, *(self._told(conf, run) for conf, run in self.others))

    def _told(self, conf: str, run: SnapshotReplay) -> str:
        if run.replay.failures:
            first = run.replay.failures[0]
            return f"under {conf} it fails sooner: {show(first.event.size_bytes)} do not fit at {first.event.time_s:.6f} s of the history"
        served = ""
        if self.tried_bytes is not None:
            fits = run.replay.attempts_served > 0
            served = f"the {show(self.tried_bytes)} that failed would {'' if fits else 'not '}have had room; "
        return (
            f"under {conf} {served}at most {show(run.replay.peak_reserved_bytes)} reserved instead of "
            f"{show(self.recorded.replay.peak_reserved_bytes)}, at the end {show(run.replayed.reserved_bytes)}"
        )

    def helpful(self) -> tuple[tuple[str, SnapshotReplay, str], ...]:
        """Settings that would have helped, the best first, with why: the failed request fits, or less memory is reserved."""
        found = []
        for conf, run in self.others:
            if run.replay.failures:
                continue
            saved = self.recorded.replayed.reserved_bytes - run.replayed.reserved_bytes
            if self.tried_bytes is not None and run.replay.attempts_served:
                why = f"replayed: the {show(self.tried_bytes)} that failed have room"
                found.append((run.replayed.reserved_bytes, conf, run, why))
            elif self.tried_bytes is None and saved >= _WORTH_SAYING:
                was = show(self.recorded.replayed.reserved_bytes)
                why = f"replayed: {show(run.replayed.reserved_bytes)} reserved at the end instead of {was}"
                found.append((run.replayed.reserved_bytes, conf, run, why))
        return tuple((conf, run, why) for _, conf, run, why in sorted(found, key=lambda entry: entry[0]))


def checked_confs(confs: Sequence[str]) -> tuple[str, ...]:
    """`confs`, each a PYTORCH_ALLOC_CONF string that PyTorch would accept. Raises DiagnoseError for one that it would not."""
    for conf in confs:
        if not conf.strip():
            raise DiagnoseError("--what-if '' is empty; expected settings such as expandable_segments:True")
        try:
            parse_alloc_conf(conf)
        except AllocatorConfError as error:
            raise DiagnoseError(f"--what-if {conf!r}: {error}") from None
    return tuple(confs)


def allocator_runs(snapshot: Any, confs: Sequence[str] = ()) -> AllocatorRuns | None:
    """The history of `snapshot` under its own settings and under `confs` (default: `TRIED`); None when it has none to replay.

    Raises DiagnoseError when settings were asked for and there is no history, or its own settings cannot be followed.
    """
    try:
        read = snapshot if isinstance(snapshot, Snapshot) else parse_snapshot(snapshot)
        device = _device(read)
        if device is None:
            raise SnapshotError("the snapshot has no history: record one with torch.cuda.memory._record_memory_history")
        own = settings_of(read)
        recorded = replay_snapshot(read, device=device)
    except SnapshotError as error:
        if confs:
            raise DiagnoseError(f"--what-if: {error}") from None
        return None
    trace = read.trace_of(device)
    tried = next((entry.size_bytes for entry in reversed(trace) if entry.action == "oom"), None)
    retry = False
    if tried is not None:
        again = replace(own, search_again_after_events=True)
        retry = replay_snapshot(read, device=device, settings=again, start_with="recorded").replay.attempts_served > 0
    others = []
    for conf in confs or TRIED:
        settings = parse_alloc_conf(conf)
        if _same(settings, own) and not confs:
            continue
        others.append((conf, replay_snapshot(read, device=device, settings=settings)))
    return AllocatorRuns(
        device=device,
        num_entries=len(trace),
        tried_bytes=tried,
        recorded=recorded,
        others=tuple(others),
        retry_fits=retry,
    )


def _device(snapshot: Snapshot) -> int | None:
    """The device whose memory ran out, else the one with the longest history; None without a history."""
    failed = [device for device, trace in enumerate(snapshot.traces) if any(entry.action == "oom" for entry in trace)]
    longest = sorted(range(len(snapshot.traces)), key=lambda device: -len(snapshot.traces[device]))
    return next((device for device in (*failed, *longest) if snapshot.traces[device]), None)


def _same(one: CachingSettings, other: CachingSettings) -> bool:
    return all(
        getattr(one, name) == getattr(other, name)
        for name in ("expandable_segments", "max_split_size_bytes", "roundup_power2_divisions")
    )
