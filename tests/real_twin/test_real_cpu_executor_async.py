"""Requests that go on on the CPU while steps are planned ahead: the same tokens, on a real model, and the same decisions in both worlds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.validation import SCENARIOS, reference_answers, replay, run_for_real
from experiments.validation.worlds import changed_answers, first_difference, preset
from tests.support.scenarios import with_engine
from tests.support.steady_timer import SteadyTimer

RUNG = {"action": "run_on_cpu", "signal": "kv_usage", "on": 0.6, "off": 0.4, "hold_s": 0.0, "value": 0.4}


def paced(inner):
    """The device, whose steps are said to last as `SteadyTimer` says."""
    inner._timer = SteadyTimer()
    return inner


@pytest.mark.parametrize("token_s", [0.002, 0.02])
@pytest.mark.parametrize("name", ["pressure-0", "pressure-1", "leavers-0", "leavers-1", "conversations-1"])
def test_they_get_the_tokens_that_they_get_on_the_device(name, token_s):
    scenario = with_engine(SCENARIOS[name], num_cpu_blocks=120, async_scheduling=True)
    requests = tuple(replace(spec, priority=1, max_tokens=spec.output_tokens + 2) for spec in scenario.requests)
    scenario = replace(scenario, requests=requests)  # all may be moved; the model ends them before they expect it
    ladder = preset("ladder", [RUNG], cpu_token_s=token_s)
    run = run_for_real(scenario, ladder, wrap=paced)
    assert any("run_on_cpu" in request.degraded for request in run.requests)
    assert run.report["moved_to_cpu"] > 0
    assert run.leaked_blocks == 0
    assert changed_answers(run, reference_answers(scenario)) == []
    ladder = preset("ladder", [RUNG], cpu_token_s=token_s)
    assert first_difference(run.decisions, replay(scenario, ladder, run.recording)) is None
