"""A policy that is not steady is asked again when its no could be over, and not before (`Admission.steps_of_no`)."""

from __future__ import annotations

import pytest

from sim.core.admission import FOREVER, Admission, AdmissionBase, Every, FreeBlocks
from sim.core.policies import NewTokenRatio, PredictedPeak, RatioSettings
from sim.core.policy import Policy
from tests.support.engine_driver import EngineDriver


def repeats(admission: Admission, plans: int, cap: int = 20) -> list[int]:
    """How many steps the first plans stand for, while "long" decodes and "next" waits.

    A pool of 40 blocks of 4. "long" has 20 tokens of prompt and at most 100 of output, of which it has one when "next" comes, which
    has 21 and `cap`.
    """
    engine = EngineDriver(40, 4, policy=Policy(admission=lambda config: admission), max_num_seqs=4)
    engine.add("long", 20, 100, max_tokens=100)
    engine.step()
    engine.add("next", 21, cap, max_tokens=cap)
    found = []
    for _ in range(plans):
        plan = engine.plan()
        assert [share.request_id for share in plan.scheduled(0)] == ["long"]
        found.append(plan.repeat)
        engine.commit(plan)
    return found


def test_the_new_token_ratio_is_asked_when_it_could_have_fallen_far_enough():
    """ "next" asks for 24 + 20 + 4 of the 136 tokens that are free once "long" has its block, so 88 may be reserved. "long" may add 99 and
    one less a step, of which the ratio reserves all and half a percent less a step: from 99 in the first step to 90.2 in the seventh, more
    than 88 by a whole token; 88.8 in the eighth is not. By then a block is gone, and of 84 it is 88.8, 87.4, 86.0, and then 84.6."""
    ratio = NewTokenRatio(RatioSettings(start=1.0, floor_share=0.5, decay_steps=100))
    assert repeats(ratio, 2) == [7, 3]


def test_a_predicted_peak_is_asked_when_the_prediction_is_renewed():
    """Every four decode steps."""
    assert repeats(PredictedPeak(quantiles=[(0.0, 99), (1.0, 100)]), 3, cap=100) == [4, 4, 4]


class No(AdmissionBase):
    """Lets the first in, and nobody else; steady or not."""

    def __init__(self, steady: bool) -> None:
        self.steady = steady

    def may_start(self, request, need_blocks, view):
        return not view.num_running


@pytest.mark.parametrize(
    ("policies", "first"),
    [
        ([No(False)], 1),
        ([No(True)], 99),
        ([FreeBlocks(), No(False)], 1),
        ([No(True), No(False)], 99),  # the second is never asked
        ([PredictedPeak(quantiles=[(1.0, 10)]), No(True)], 4),  # it says yes, and learns by being asked
    ],
)
def test_of_several_those_count_who_were_asked(policies, first):
    assert repeats(Every(policies), 1) == [first]


def test_who_is_not_steady_is_asked_at_every_step_unless_it_says_more():
    assert (No(False).steps_of_no(None), No(True).steps_of_no(None)) == (1, FOREVER)
    assert Every([No(True), No(False)]).steps_of_no(None) == 1
