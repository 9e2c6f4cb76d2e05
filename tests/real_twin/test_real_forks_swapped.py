"""Sequences that share blocks are swapped together on a device: what they share goes and comes once, and every answer is right."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.validation import SCENARIOS, reference_answers, replay, run_for_real
from experiments.validation.worlds import changed_answers, first_difference, preset
from sim.core.forking import Forking
from sim.core.request import RequestSpec, samples
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


def test_forks_that_are_swapped_in_the_step_after_they_forked_say_what_they_would_have_said():
    """7 blocks: 3 of `old`, 3 that the three samples of `s` share, and one for the first copy, in the step in which they give way."""
    old = RequestSpec(request_id="old", arrival_s=0.0, input_tokens=10, output_tokens=14)
    forked = RequestSpec(
        request_id="s", arrival_s=0.0, input_tokens=10, output_tokens=14, n=3, forking=Forking(width=3)
    )
    base = with_engine(SCENARIOS["beams-0"], num_gpu_blocks=7, num_cpu_blocks=20, max_model_len=28, max_num_seqs=6)
    scenario = replace(base, requests=(old, *samples(forked)))
    run = run_for_real(scenario, preset("vllm-v1"), wrap=timed)
    assert run.decisions[1]["preempted"] == ["s#2", "s#1", "s#0"]
    assert run.outcomes == {"finished": 4}
    assert changed_answers(run, reference_answers(scenario)) == []
