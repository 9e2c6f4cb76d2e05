"""How long what a request left is worth keeping: priorities of token ranges, with durations.

Each block that is released gets a course: which priority it has until when, and after that. The head of a sequence is at all times
kept at least as long as what follows it, so leaves are evicted before their parents. Source: TensorRT-LLM `KvCacheRetentionConfig`
(engine-policies §1.4): priorities from 0 to 100, 35 without a range and after a range's duration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from .clock import to_fs
from .config import ConfigError

DEFAULT_PRIORITY = 35
"""Priority of what no range covers, and of a range whose duration is over."""

Course = tuple[tuple[int | None, int], ...]
"""`(until, priority)` steps in order of time, in femtoseconds; the last has no end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How much a range of a request's tokens is worth keeping once the request is gone."""

    priority: int
    """0 (given up first) to 100 (kept longest)."""
    start: int = 0
    """First token of the range."""
    end: int | None = None
    """First token after it; None for all that follow."""
    duration_s: float | None = None
    """Seconds after the release for which this holds; None for ever."""
    output: bool = False
    """Whether the range is of produced tokens, counted from the first of them, and not of the prompt."""

    def __post_init__(self) -> None:
        if not 0 <= self.priority <= 100:
            raise ConfigError(f"a retention priority is {self.priority}; it must be from 0 (given up first) to 100")
        if self.start < 0 or (self.end is not None and self.end <= self.start):
            raise ConfigError(f"a retention range is [{self.start}, {self.end}); it must have at least one token")
        if self.duration_s is not None and not 0 < self.duration_s < float("inf"):
            raise ConfigError(
                f"a retention duration_s is {self.duration_s:g}; it must be above 0 and finite, or absent for ever"
            )

    def covers(self, token: int, input_tokens: int) -> bool:
        """Whether a token of a request is in the range."""
        place = token - input_tokens if self.output else token
        is_output = token >= input_tokens
        return is_output == self.output and place >= self.start and (self.end is None or place < self.end)


def courses(
    ranges: Sequence[Retention], input_tokens: int, num_blocks: int, block_size: int, now_fs: int
) -> list[Course]:
    """The courses of a request's blocks that are released now, by place in its table. The first range that covers a block's first token
    counts; what follows a block raises it to its own worth.
    """
    plain: Course = ((None, DEFAULT_PRIORITY),)
    own = [
        ((None, each.priority),)
        if each.duration_s is None
        else ((now_fs + to_fs(each.duration_s), each.priority), (None, DEFAULT_PRIORITY))
        for each in ranges
    ]
    edges = {0, input_tokens}
    for each in ranges:
        first = input_tokens if each.output else 0
        edges |= {first + each.start} if each.end is None else {first + each.start, first + each.end}
    stops = sorted({min(-(-token // block_size), num_blocks) for token in edges} | {num_blocks})
    made: list[list[Course]] = []
    course: Course = ((None, 0),)
    for start, stop in reversed(
        list(pairwise(stops))
    ):  # the same ranges cover the first tokens of blocks [start, stop)
        token = start * block_size
        wanted = next((own[i] for i, each in enumerate(ranges) if each.covers(token, input_tokens)), plain)
        course = higher(course, wanted)
        made.append([course] * (stop - start))
    return list(chain.from_iterable(reversed(made)))


def higher(one: Course, other: Course) -> Course:
    """The higher of two courses at every time; `one` itself if that is it.

    >>> higher(((5, 80), (None, 35)), ((9, 50), (None, 35)))
    ((5, 80), (9, 50), (None, 35))
    """
    ends = sorted({until for until, _ in (*one, *other) if until is not None})
    steps: list[tuple[int | None, int]] = []
    for until in (*ends, None):
        priority = max(at(one, until), at(other, until))
        if steps and steps[-1][1] == priority:
            steps.pop()
        steps.append((until, priority))
    made = tuple(steps)
    return one if made == one else made


def at(course: Course, until: int | None) -> int:
    """The priority of a course just before `until`; None for its last."""
    if until is None:
        return course[-1][1]
    return next(priority for end, priority in course if end is None or until <= end)
