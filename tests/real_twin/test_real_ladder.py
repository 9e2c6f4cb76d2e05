"""Every rung of the ladder has its effect on the device: blocks, bytes, passes and tokens, not only entries of a log."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from experiments.validation import SCENARIOS, reference_answers, replay, run_for_real
from experiments.validation.worlds import Recorded, changed_answers, first_difference, preset
from gpu.readings import StepReading
from sim.core.request import Outcome, RequestSpec
from tests.support.scenarios import with_engine

BASE = with_engine(SCENARIOS["pressure-1"], num_cpu_blocks=16)
BASE = replace(BASE, requests=tuple(replace(spec, priority=1) for spec in BASE.requests))
"""Everybody may be degraded."""


class Clock:
    """Three milliseconds a step, so that what a test sees does not depend on the machine."""

    def start(self) -> None: ...

    def stop_fs(self) -> int:
        return 3 * 10**12


def timed(inner):
    inner._timer = Clock()
    return inner


def climbed(
    action: str,
    value: float = 0.0,
    *,
    on: float = 0.6,
    off: float = 0.4,
    signal: str = "kv_usage",
    scenario=BASE,
    **keys,
) -> tuple[Recorded, list[StepReading]]:
    """A real run with one rung, checked against the simulated world, and its readings."""
    rungs = [{"action": action, "signal": signal, "on": on, "off": off, "hold_s": 0.0, "value": value}]
    readings: list[StepReading] = []
    run = run_for_real(scenario, preset("ladder", rungs, **keys), on_step=readings.append, wrap=timed)
    assert any((action, "on") in map(tuple, entry["ladder"]) for entry in run.decisions), f"{action} never went on"
    assert run.leaked_blocks == 0
    assert first_difference(run.decisions, replay(scenario, preset("ladder", rungs, **keys), run.recording)) is None
    assert changed_answers(run, reference_answers(scenario)) == []
    return run, readings


def on_steps(run: Recorded, action: str) -> set[int]:
    """Steps that were planned with the rung on."""
    steps, active = set(), False
    for entry in run.decisions:
        for moved, way in entry["ladder"]:
            active = way == "on" if moved == action else active
        if active:
            steps.add(entry["step"])
    return steps


def test_dropping_the_cache_makes_prompts_be_computed_again():
    """The prompt of "first" is cached when "other" raises the usage: it is dropped, and "again" computes it anew."""
    named = {"content_ids": ("p",), "content_block_tokens": 12}
    requests = (
        RequestSpec(request_id="first", arrival_s=0.0, input_tokens=12, output_tokens=2, priority=1, **named),
        RequestSpec(request_id="other", arrival_s=0.05, input_tokens=24, output_tokens=5, priority=1),
        RequestSpec(request_id="again", arrival_s=0.2, input_tokens=12, output_tokens=2, priority=1, **named),
    )
    scenario = replace(with_engine(BASE, num_gpu_blocks=20, enable_prefix_caching=True), requests=requests)
    dropped, _ = climbed("drop_cache", on=0.3, off=0.2, scenario=scenario)
    plain = run_for_real(scenario, preset("vllm-v1"), wrap=timed)
    assert [run.requests[2].prefix_hit_tokens for run in (dropped, plain)] == [0, 8]
    assert dropped.report["computed_tokens"] == plain.report["computed_tokens"] + 8
    assert dropped.answers == plain.answers


def test_a_smaller_step_computes_fewer_tokens_at_once():
    run, readings = climbed("shrink_step", 0.25, on=0.3, off=0.1)
    budget = BASE.engine.max_num_batched_tokens
    steps = on_steps(run, "shrink_step")
    prompts = [reading.num_tokens for reading in readings if reading.step in steps and reading.phase != "decode"]
    assert prompts
    assert max(prompts) <= budget // 4 + BASE.engine.max_num_seqs  # decodes beside the prompts' share
    assert max(reading.num_tokens for reading in readings) > max(prompts)


def test_micro_batches_are_passes_of_the_device_with_a_smaller_workspace():
    run, readings = climbed("micro_batch", 3, on=0.3, off=0.1)
    steps = on_steps(run, "micro_batch")
    by = {reading.served_by for reading in readings if reading.step in steps and reading.num_tokens >= 3}
    assert by == {"3 micro-batches"}
    assert {reading.served_by for reading in readings if reading.step not in steps} == {"eager"}
    assert run.report["split_steps"] == sum(reading.served_by != "eager" for reading in readings)
    plain: list[StepReading] = []
    run_for_real(BASE, preset("vllm-v1"), on_step=plain.append, wrap=timed)
    most = {r.num_tokens: r.workspace_bytes for r in plain if r.phase == "decode"}
    assert any(
        r.workspace_bytes < most.get(r.num_tokens, 0) for r in readings if r.step in steps and r.phase == "decode"
    )


def test_a_device_that_is_out_of_memory_goes_on_in_smaller_passes():
    """The workspace holds no step of more than a few tokens; the rung comes with the first failure."""
    scenario = with_engine(BASE, max_num_batched_tokens=32)
    rungs = [{"action": "micro_batch", "signal": "oom", "on": 1, "off": 1, "hold_s": 60.0, "value": 8}]
    split = run_for_real(scenario, preset("ladder", rungs), wrap=timed, workspace_bytes=70_000)
    halved = run_for_real(scenario, preset("vllm-v1"), wrap=timed, workspace_bytes=70_000)
    assert 0 < split.report["oom_steps"] < halved.report["oom_steps"]
    assert split.report["split_steps"] > 0
    assert split.leaked_blocks == 0
    assert changed_answers(split, reference_answers(scenario)) == []
    assert first_difference(split.decisions, replay(scenario, preset("ladder", rungs), split.recording)) is None


@pytest.mark.parametrize("action", ["cap_new", "cap_running"])
def test_a_cap_on_the_output_saves_the_steps_that_would_have_computed_it(action):
    run, _ = climbed(action, 3.0)
    plain = run_for_real(BASE, preset("vllm-v1"), wrap=timed)
    capped = [request for request in run.requests if action in request.degraded]
    assert capped
    assert all(request.num_output_tokens < request.spec.output_tokens for request in capped)
    assert run.report["sampled_tokens"] < plain.report["sampled_tokens"]


def test_swapping_out_moves_bytes_to_the_cpu_pool_and_back():
    run, readings = climbed("swap_out", 0.5)
    assert run.report["swapped_out_blocks"] > 0
    assert run.report["swapped_in_blocks"] > 0
    before = {entry["step"]: entry["swapped_out"] for entry in run.decisions if entry["swapped_out"]}
    held = {reading.step: reading.allocated_blocks for reading in readings}
    assert all(held[step] < held[step - 1] + BASE.engine.max_num_seqs for step in before if step - 1 in held)


def test_the_cache_is_offloaded_to_the_cpu_tier_and_comes_back():
    """ "first" ends; its prompt is saved while the rung is on, evicted by "other", and loaded for "again" instead of being computed."""
    named = {"content_ids": ("p",), "content_block_tokens": 16}
    requests = (
        RequestSpec(request_id="first", arrival_s=0.0, input_tokens=17, output_tokens=2, priority=1, **named),
        RequestSpec(request_id="other", arrival_s=0.05, input_tokens=40, output_tokens=6, priority=1),
        RequestSpec(request_id="again", arrival_s=0.3, input_tokens=17, output_tokens=3, priority=1, **named),
    )
    scenario = replace(
        with_engine(BASE, num_gpu_blocks=13, num_cpu_blocks=0, num_cpu_prefix_blocks=8, cpu_prefix_mode="write_back"),
        requests=requests,
    )
    run, _ = climbed("offload_cache", on=0.3, off=0.1, scenario=scenario)
    assert run.report["saved_prefix_blocks"] > 0
    assert run.report["loaded_prefix_blocks"] > 0
    plain = run_for_real(with_engine(scenario, num_cpu_prefix_blocks=0), preset("vllm-v1"), wrap=timed)
    assert run.report["computed_tokens"] < plain.report["computed_tokens"]


@pytest.mark.parametrize("name", ["prefixes-0", "prefixes-1", "conversations-1", "conversations-2"])
def test_prefixes_that_go_to_the_cpu_tier_and_back_change_no_answer(name):
    scenario = with_engine(SCENARIOS[name], num_cpu_prefix_blocks=20)
    run = run_for_real(scenario, preset("vllm-v1"), wrap=timed)
    assert run.report["saved_prefix_blocks"] > 0
    assert run.leaked_blocks == 0
    assert changed_answers(run, reference_answers(scenario)) == []
    assert first_difference(run.decisions, replay(scenario, preset("vllm-v1"), run.recording)) is None


def test_requests_go_on_on_the_cpu_and_get_the_same_tokens():
    run, _ = climbed("run_on_cpu", 0.4, cpu_token_s=0.004, scenario=with_engine(BASE, num_cpu_blocks=60))
    moved = [request for request in run.requests if "run_on_cpu" in request.degraded]
    assert moved
    assert run.report["moved_to_cpu"] >= len(moved)
    assert any(request.num_output_tokens == request.spec.output_tokens for request in moved)


def test_a_ladder_may_watch_the_workspace_of_a_real_device():
    """The share that a step used is measured; a replay has it from the recording."""
    run, _ = climbed("shrink_step", 0.25, signal="workspace", on=0.5, off=0.2)
    assert any(record.workspace_share for record in run.recording.values())


def test_pausing_gives_the_blocks_back_to_the_device_s_pool():
    scenario = with_engine(BASE, num_cpu_blocks=0)
    run, readings = climbed("pause", 0.5, scenario=scenario)
    assert any(request.num_preemptions for request in run.requests)
    assert run.report["swapped_out_blocks"] == 0
    assert any(after.allocated_blocks < before.allocated_blocks for before, after in pairwise(readings))


def test_truncation_keeps_the_first_block_and_a_window_and_counts_on():
    run, readings = climbed("truncate", 8.0, on=0.8, off=0.5)
    truncated = [request for request in run.requests if "truncate" in request.degraded]
    assert truncated
    assert all(request.outcome is Outcome.FINISHED for request in truncated)
    assert all(request.num_output_tokens == request.spec.output_tokens for request in truncated)
    assert max(reading.allocated_blocks for reading in readings) <= BASE.engine.num_gpu_blocks


def test_nobody_is_admitted_while_admission_is_paused():
    run, readings = climbed("pause_admission")
    steps = on_steps(run, "pause_admission")
    assert not any(
        entry["admitted"] for entry in run.decisions if entry["step"] in steps and len(entry["scheduled"]) > 1
    )
    assert readings


def test_who_is_shed_never_reaches_the_device():
    run, _ = climbed("shed", on=0.6, off=0.002)
    shed = [request for request in run.requests if request.outcome is Outcome.REJECTED]
    assert shed
    assert all("the server is busy" in request.reason for request in shed)
    scheduled = {name for entry in run.decisions for name, *_ in entry["scheduled"]}
    assert not scheduled & {request.request_id for request in shed}
    assert all(run.answers[request.request_id] == [] for request in shed)
