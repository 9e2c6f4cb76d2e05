"""The measurement of what policies cost: that it measures, not what comes out."""

from __future__ import annotations

import pytest

from experiments.policy_cost import BASELINE, CHANGES, base, main, measure
from sim.core.policies import PRESETS


def test_every_preset_is_measured():
    assert set(PRESETS) <= set(CHANGES)


def test_policies_are_measured_against_the_baseline_in_steps_and_in_leaps():
    """Everybody is served, a stepped run plans every step, and a leaping one fewer; a sequence of one prompt at a time leaps most."""
    costs = {cost.name: cost for cost in measure(base(12, None), [BASELINE, "orca", "async_scheduling"], 1)}
    assert costs[BASELINE].ratio == 1.0
    assert {cost.finished for cost in costs.values()} == {12}
    for cost in costs.values():
        assert cost.ratio > 0
        assert cost.steps > 0
        assert cost.steps_a_plan > 1
    assert costs["orca"].steps > costs[BASELINE].steps
    assert costs["orca"].steps_a_plan > costs[BASELINE].steps_a_plan


def test_an_unknown_policy_is_named(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--only", "vllm-v9"])
    assert ended.value.code == 2
    assert "--only names vllm-v9; known are vllm-v1" in capsys.readouterr().err
