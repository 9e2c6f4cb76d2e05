"""Sequences that share blocks are swapped together on a device: what they share goes and comes once, and every answer is right."""

from __future__ import annotations

import pytest

from experiments.validation import SCENARIOS, reference_answers, replay, run_for_real
from experiments.validation.worlds import changed_answers, first_difference, preset
from tests.support.scenarios import with_engine
from tests.support.steady_timer import SteadyTimer


def timed(inner):
    inner._timer = SteadyTimer()
    return inner


@pytest.mark.parametrize("name", ["beams-0", "beams-1", "beams-2"])
@pytest.mark.parametrize("ahead", [False, True])
def test_forks_that_were_away_say_what_they_would_have_said(name, ahead):
    scenario = with_engine(SCENARIOS[name], num_gpu_blocks=13, num_cpu_blocks=40, async_scheduling=ahead)
    swapping = preset("vllm-v1")
    run = run_for_real(scenario, swapping, wrap=timed)
    moved = [entry["swapped_out"] for entry in run.decisions if len(entry["swapped_out"]) > 1]
    assert moved
    saved = sum(len(pairs) for entry in run.decisions for _, pairs in entry["swapped_out"])
    restored = sum(len(pairs) for entry in run.decisions for _, pairs in entry["swapped_in"])
    assert run.report["swapped_out_blocks"] == saved
    assert run.report["swapped_in_blocks"] == restored
    assert run.leaked_blocks == run.fallbacks == 0
    assert first_difference(run.decisions, replay(scenario, swapping, run.recording)) is None
    assert changed_answers(run, reference_answers(scenario)) == []
