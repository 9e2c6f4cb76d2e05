"""Time is exact, and closed forms of step durations agree with adding up the steps one by one."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.core.clock import FS_PER_S, to_fs, to_s
from sim.core.durations import Durations, Segment
from sim.core.plan import StepResult

femtoseconds = st.integers(1, 10**13)
segments = st.builds(Segment, st.integers(1, 9), femtoseconds, st.integers(0, 10**10))
stretches = st.lists(segments, min_size=1, max_size=6).map(lambda made: Durations(tuple(made)))


def one_by_one(durations: Durations) -> list[int]:
    """Every step's duration."""
    return [part.first_fs + i * part.growth_fs for part in durations.segments for i in range(part.steps)]


def in_progress_at(steps: list[int], elapsed_fs: int) -> int:
    """Number of the step, counted from 1, whose interval (start, end] holds `elapsed_fs`; the first or last if outside."""
    end = 0
    for number, duration in enumerate(steps, start=1):
        end += duration
        if elapsed_fs <= end:
            return number
    return len(steps)


@given(segments)
def test_a_segment_sums_its_arithmetic_progression(segment: Segment) -> None:
    steps = one_by_one(Durations((segment,)))
    for taken in range(segment.steps + 1):
        assert segment.total_fs(taken) == sum(steps[:taken])
        assert segment.moment_fs(taken) == sum(i * duration for i, duration in enumerate(steps[:taken]))


@given(stretches)
def test_a_stretch_sums_all_its_segments(durations: Durations) -> None:
    steps = one_by_one(durations)
    assert durations.steps == len(steps)
    assert durations.total_fs == sum(steps)
    for step in range(len(steps) + 1):
        assert durations.before_fs(step) == sum(steps[:step])
        assert durations.moment_fs(step) == sum(i * duration for i, duration in enumerate(steps[:step]))


@given(stretches)
def test_a_prefix_is_the_first_steps_unchanged(durations: Durations) -> None:
    steps = one_by_one(durations)
    for taken in range(1, len(steps) + 1):
        kept = durations.prefix(taken)
        assert one_by_one(kept) == steps[:taken]
        assert kept.total_fs == durations.before_fs(taken)


@given(stretches, st.data())
def test_the_step_in_progress_is_the_one_whose_half_open_interval_holds_the_moment(
    durations: Durations, data: st.DataObject
) -> None:
    steps = one_by_one(durations)
    elapsed_fs = data.draw(st.integers(0, durations.total_fs), label="elapsed_fs")
    assert durations.started_by(elapsed_fs) == in_progress_at(steps, elapsed_fs)


@given(stretches)
def test_the_last_femtosecond_of_a_step_belongs_to_it_and_the_next_one_to_its_successor(durations: Durations) -> None:
    last = durations.steps
    for step in range(1, last + 1):
        end_fs = durations.before_fs(step)
        assert durations.started_by(end_fs) == step
        assert durations.started_by(end_fs - 1) == max(1, step if one_by_one(durations)[step - 1] > 1 else step - 1)
        assert durations.started_by(end_fs + 1) == min(step + 1, last)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(0, 40))
def test_steps_that_take_no_time_still_have_one_step_in_progress(steps: list[int], elapsed_fs: int) -> None:
    assert Durations.measured(steps).started_by(elapsed_fs) == in_progress_at(steps, elapsed_fs)


def test_at_the_very_start_the_first_step_is_in_progress() -> None:
    assert Durations.affine(5, 100, 7).started_by(0) == 1


def test_beyond_the_end_all_steps_have_been_started() -> None:
    assert Durations.affine(5, 100, 7).started_by(10**9) == 5


@given(st.lists(femtoseconds, min_size=1, max_size=12))
def test_measured_durations_are_kept_one_by_one(steps: list[int]) -> None:
    assert one_by_one(Durations.measured(steps)) == steps


@given(st.integers(1, 50), femtoseconds, st.integers(0, 10**10))
def test_an_affine_stretch_grows_by_the_same_amount_every_step(steps: int, first_fs: int, growth_fs: int) -> None:
    made = one_by_one(Durations.affine(steps, first_fs, growth_fs))
    assert made[0] == first_fs
    assert {later - earlier for earlier, later in pairwise(made)} <= {growth_fs}
    assert one_by_one(Durations.one(first_fs)) == [first_fs]


@given(stretches, st.data())
def test_a_cut_result_keeps_what_the_model_said(durations: Durations, data: st.DataObject) -> None:
    taken = data.draw(st.integers(1, durations.steps), label="taken")
    whole = StepResult(durations=durations, stopped=frozenset({"a"}), tokens={"a": [1, 2]})
    cut = whole.cut(taken)
    assert cut.steps == taken
    assert (cut.stopped, cut.tokens) == (whole.stopped, whole.tokens)
    assert cut.duration_s == pytest.approx(float(Fraction(durations.before_fs(taken), FS_PER_S)), rel=1e-15)


@given(st.floats(0, 1e7))
def test_seconds_become_the_nearest_femtosecond(seconds: float) -> None:
    assert to_fs(seconds) == round(Fraction(seconds) * FS_PER_S)


@given(st.integers(0, 10**22))
def test_femtoseconds_become_the_nearest_float_of_seconds(time_fs: int) -> None:
    assert to_s(time_fs) == float(Fraction(time_fs, FS_PER_S))
