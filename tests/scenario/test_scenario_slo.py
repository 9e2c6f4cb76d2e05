"""Objectives as text."""

import pytest

from sim.slo import Slo, SloError


def test_the_documented_line_means_what_it_says():
    slo = Slo.parse("ttft_p99=2.0,tpot_p99=0.05")
    assert [(target.metric, target.statistic, target.limit_s) for target in slo.targets] == [
        ("ttft", "p99", 2.0),
        ("tpot", "p99", 0.05),
    ]
    assert str(slo) == "ttft_p99=2,tpot_p99=0.05"


def test_a_metric_alone_means_its_p99():
    assert Slo.parse("ttft=2").as_dict() == {"ttft_p99": 2.0}


def test_a_single_request_is_held_to_the_smallest_limit_of_a_metric():
    assert Slo.parse("ttft_mean=0.5, ttft_p99=2, e2el_max=60").limits_s == {"ttft": 0.5, "e2el": 60.0}


def test_an_objective_reads_its_statistic_from_a_summary():
    (target,) = Slo.parse("ttft_p90=1").targets
    assert target.value_s({"ttft_s": {"p90": 0.25}}) == 0.25
    assert target.value_s({"ttft_s": {"p90": None}}) is None
    assert target.value_s({}) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no objective"),
        ("ttft_p99", "no limit"),
        ("ttft_p99=fast", "number of seconds"),
        ("ttft_p99=0", "above 0"),
        ("ttft_p99=nan", "above 0"),
        ("ttft_p99=inf", "above 0"),
        ("tftt_p99=1", "nearest is ttft_p99"),
        ("ttft_p98=1", "nearest is ttft_p9"),
        ("ttft_p99=1,ttft_p99=2", "twice"),
        ("ttft=1,ttft_p99=2", "twice"),
    ],
)
def test_what_cannot_be_read_is_one_clear_error(text, says):
    with pytest.raises(SloError, match=says):
        Slo.parse(text)
