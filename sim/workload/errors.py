"""What goes wrong with a workload, in one message that says what is wrong, where, and what would be right."""

from __future__ import annotations

from collections.abc import Iterable


class WorkloadError(ValueError):
    """A setting of a workload, or two settings together, that make no workload."""


class UnknownWorkload(WorkloadError):
    """A name that is not in `WORKLOADS`. The message names the nearest known one."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        super().__init__(f"unknown workload {name!r}{did_you_mean(name, names)}; known are {', '.join(names)}")


class TraceError(ValueError):
    """A trace file that cannot be read: file, line, column, what was found, what was expected."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`", did you mean 'x'?"` for the nearest of `known`, or nothing when none is near."""
    import difflib

    by_folded = {candidate.casefold(): candidate for candidate in known}
    near = difflib.get_close_matches(name.casefold(), list(by_folded), n=1, cutoff=0.5)
    return f", did you mean {by_folded[near[0]]!r}?" if near else ""


def whole_number(name: str, value: object, *, least: int) -> int:
    """The value, if it is a whole number of at least `least` (True and False are not).

    Raises: WorkloadError otherwise, naming it.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise WorkloadError(f"{name} is {value!r}; it must be a whole number, at least {least}")
    return value
