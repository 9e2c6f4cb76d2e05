"""Under what a run and its profile were timed: where the two differ, an error says more of that than of the twin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TIMED_BY = {"wall": "wall time", "thread": "the time that the thread had a core"}


def differing_conditions(run: Mapping[str, Any], profile: Mapping[str, Any], name: str) -> list[str]:
    """Sentences on what differs between `run` (`clock`, `threads`, `device_name`, as far as recorded) and the provenance of the profile
    called `name`. What one of them does not say is not compared.
    """

    def differ(ours: str, theirs: str) -> tuple[Any, Any] | None:
        pair = (run.get(ours), profile.get(theirs))
        return pair if None not in pair and pair[0] != pair[1] else None

    found = []
    if clocks := differ("clock", "clock"):
        mine, its = (_TIMED_BY.get(clock, clock) for clock in clocks)
        found.append(
            f"the run's steps were timed by {mine}, those of profile {name} by {its}: on a machine that others use too the two are not "
            f"alike; run with --clock {profile['clock']}, or measure with --clock {run['clock']}"
        )
    if threads := differ("threads", "threads"):
        found.append(f"the run worked with {threads[0]} threads, profile {name} was measured with {threads[1]}")
    if devices := differ("device_name", "measured_on"):
        found.append(f"the run was on {devices[0]}, profile {name} was measured on {devices[1]}")
    return found
