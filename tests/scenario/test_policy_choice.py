"""From `[policy]` to a policy: what no engine could run with is refused with its reason, and what was asked for is not dropped silently."""

import pytest

import sim
from sim.assembly import policy_of
from sim.core import ConfigError
from sim.resolve import resolve
from sim.scenario_errors import ScenarioError

ENGINE = {"num_gpu_blocks_override": 200, "block_size": 16, "max_model_len": 512, "max_num_seqs": 8}
RUNG = {"action": "drop_cache", "on": 0.9, "off": 0.5}


def choose(**given):
    """The settings and the policy of a scenario with this [policy]."""
    return policy_of(resolve(sim.Scenario(model="llama-3.1-8b", gpu="h100-sxm-80gb", engine=ENGINE, policy=given)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"on": "high"}, "rung 0 of the ladder: on is 'high'; it must be a number"),
        ({"off": float("nan")}, "rung 0 of the ladder: off is nan; it must be a number"),
        ({"on": float("inf")}, "rung 0 of the ladder: on is inf; it must be a number"),
        ({"hold_s": float("inf")}, "hold_s is inf; it must be a number"),
        ({"action": 3.0}, "rung 0 of the ladder: action is 3.0; it must be text"),
        ({"hold_s": -3.0}, "hold_s -3; it must be at least 0"),
        ({"on": 2.0}, "goes on at 2, but kv_usage is a share of the pool: it never would"),
        ({"action": "shrink_step", "value": 5.0}, "share of the token budget.*not 5"),
        ({"action": "cap_new", "value": 2.5}, "whole number of tokens, not 2.5"),
        ({"action": "truncate", "value": 0.5}, "whole number of tokens, not 0.5"),
        ({"action": "pause", "value": 3.0}, "share of the pool.*not 3"),
    ],
)
def test_a_rung_with_a_wrong_value_is_refused_when_the_scenario_is_read(change, words):
    with pytest.raises(ConfigError, match=words):
        choose(ladder=[{**RUNG, **change}])


@pytest.mark.parametrize(
    ("span", "words"),
    [
        ({"priority": True}, "priority is True; it must be a whole number"),
        ({"priority": 50, "end": 2.5}, "end is 2.5; it must be a whole number"),
        ({"priority": 50, "duration_s": float("nan")}, "duration_s is nan"),
        ({"priority": 50, "duration_s": float("inf")}, "duration_s is inf.*absent for ever"),
        ({"priority": 50, "output": 2}, "output is 2; it must be true or false"),
    ],
)
def test_a_retention_range_with_a_wrong_value_is_refused(span, words):
    with pytest.raises(ConfigError, match=words):
        choose(eviction="retention", retention=[span])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (".mine:Class", "cannot be loaded"),
        ("os:getcwd", "os:getcwd' makes a str, which has no"),
        ("json:JSONDecoder", "json:JSONDecoder' makes a JSONDecoder, which has no steady"),
        ("json:JSONDecodeError", "cannot be made without arguments"),
        ("math:pi", "cannot be called: it is a float"),
    ],
)
def test_a_plug_in_that_is_no_admission_policy_is_refused_when_the_scenario_is_read(name, words):
    with pytest.raises(ScenarioError, match=words):
        choose(admission=name)


def warned(rungs):
    load = {"workload": "uniform", "num_requests": 5, "input_tokens": 20, "output_tokens": 5}
    engine = {"num_gpu_blocks_override": 100, "max_model_len": 512}
    scenario = sim.Scenario(
        model="llama-3.1-8b", gpu="h100-sxm-80gb", engine=engine, workload=load, policy={"ladder": rungs}
    )
    return [text for text in sim.simulate(scenario).summary["warnings"] if "can touch nobody" in text]


def test_rungs_that_the_guard_makes_idle_are_named_and_those_that_touch_the_whole_engine_are_not():
    passes = {"action": "micro_batch", "signal": "oom", "on": 1.0, "off": 1.0, "value": 2.0}
    cap = {"action": "cap_new", "on": 0.9, "off": 0.5, "value": 4.0}
    assert warned([passes]) == []
    (text,) = warned([passes, cap])
    assert text.startswith("the ladder's cap_new can touch nobody")
