"""Numbers in words."""

import pytest

from sim.results.report_format import count, figure, gib, seconds, share
from tests.support.results import GIB


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0 s"), (0.00045, "450 us"), (0.01234, "12.3 ms"), (0.99961, "1.00 s"), (12.5, "12.5 s"), (299.4, "299 s"),
     (725.0, "12 min 5 s"), (3599.9, "60 min 0 s"), (12000.0, "3 h 20 min"), (float("nan"), "-")],
)  # fmt: skip
def test_durations_take_the_unit_that_suits_them(value, text):
    assert seconds(value) == text


def test_shares_say_zero_and_all_only_when_it_is_so():
    assert [share(value) for value in (0.0, 1e-5, 0.366, 0.99999, 1.0)] == [
        "0 %",
        "< 0.1 %",
        "36.6 %",
        "> 99.9 %",
        "100 %",
    ]


def test_counts_and_figures_separate_thousands():
    assert (count(19366), figure(19366), figure(4.567), figure(0.01234), gib(GIB * 1234)) == (
        "19,366", "19,366", "4.57", "0.0123", "1,234.00 GiB",
    )  # fmt: skip
