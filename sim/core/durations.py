"""How long the steps of a stretch take, in closed form: exact sums of whole femtoseconds, however many steps there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Segment:
    """`steps` consecutive step durations in arithmetic progression: `first_fs + i * growth_fs` for i in [0, steps)."""

    steps: int
    first_fs: int
    growth_fs: int = 0

    def total_fs(self, steps: int) -> int:
        """Sum of the first `steps` durations."""
        return steps * self.first_fs + self.growth_fs * (steps * (steps - 1) // 2)

    def moment_fs(self, steps: int) -> int:
        """Sum of `i * duration_i` over the first `steps` durations."""
        pairs = steps * (steps - 1) // 2
        squares = (steps - 1) * steps * (2 * steps - 1) // 6
        return self.first_fs * pairs + self.growth_fs * squares


@dataclass(slots=True)
class Durations:
    """The durations of the consecutive steps of a stretch, kept in closed form. Steps are numbered from 0.

    Never changed; not frozen, like all that is made anew for every stretch, because making a frozen one takes three times as long.
    """

    segments: tuple[Segment, ...]
    steps: int = field(init=False, repr=False, compare=False)
    """How many steps there are."""
    total_fs: int = field(init=False, repr=False, compare=False)
    """Duration of the whole stretch."""

    def __post_init__(self) -> None:
        self.steps = self.total_fs = 0
        for segment in self.segments:
            self.steps += segment.steps
            self.total_fs += segment.total_fs(segment.steps)

    @classmethod
    def one(cls, duration_fs: int) -> Durations:
        """A single step."""
        return cls((Segment(1, duration_fs),))

    @classmethod
    def affine(cls, steps: int, first_fs: int, growth_fs: int) -> Durations:
        """`steps` steps, each `growth_fs` longer than the one before."""
        return cls((Segment(steps, first_fs, growth_fs),))

    @classmethod
    def measured(cls, durations_fs: Sequence[int]) -> Durations:
        """Steps with durations that were measured one by one."""
        return cls(tuple(Segment(1, duration_fs) for duration_fs in durations_fs))

    def before_fs(self, step: int) -> int:
        """Time from the start of the stretch to the start of `step` (equally: to the end of `step - 1`)."""
        if len(self.segments) == 1:
            return self.segments[0].total_fs(step)
        total = 0
        for segment in self.segments:
            if step <= segment.steps:
                return total + segment.total_fs(step)
            total += segment.total_fs(segment.steps)
            step -= segment.steps
        return total

    def moment_fs(self, step: int) -> int:
        """Sum of `i * duration_i` over steps i in [0, step)."""
        if len(self.segments) == 1:
            return self.segments[0].moment_fs(step)
        total = done = 0
        for segment in self.segments:
            taken = min(step - done, segment.steps)
            total += segment.moment_fs(taken) + done * segment.total_fs(taken)
            done += taken
            if done == step:
                break
        return total

    def started_by(self, elapsed_fs: int) -> int:
        """Number of steps begun before `elapsed_fs`: the step in progress then is the last that counts (at least 1).

        A step occupies the half-open interval `(start, end]`: what happens at the very end of a step belongs to it.
        """
        low, high = 1, self.steps
        while low < high:
            middle = (low + high) // 2
            if self.before_fs(middle) >= elapsed_fs:
                high = middle
            else:
                low = middle + 1
        return low

    def without_first(self) -> Durations:
        """All steps but the first."""
        head, *rest = self.segments
        if head.steps == 1:
            return Durations(tuple(rest))
        return Durations((Segment(head.steps - 1, head.first_fs + head.growth_fs, head.growth_fs), *rest))

    def prefix(self, steps: int) -> Durations:
        """The first `steps` steps."""
        if steps == self.steps:
            return self
        kept: list[Segment] = []
        for segment in self.segments:
            if steps <= 0:
                break
            taken = min(steps, segment.steps)
            kept.append(Segment(taken, segment.first_fs, segment.growth_fs))
            steps -= taken
        return Durations(tuple(kept))
