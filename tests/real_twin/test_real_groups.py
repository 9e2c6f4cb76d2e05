"""Models with several attention groups on the real pool: windows beside full attention, in one arena, with a block table a group.

Whatever happens to a request's blocks, its answer is that of a run in which one table keeps every token of every layer.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.validation import SCENARIOS, check_cell, reference_answers, replay, run_for_real
from experiments.validation.scenario_kinds import ANY_GPU, BLOCK_SIZE, HYBRID, MAX_MODEL_LEN, windowed
from experiments.validation.scenarios import SmallScenario
from experiments.validation.worlds import changed_answers, first_difference, preset
from sim.assembly import core_groups
from sim.catalog.models import model_shape
from sim.core.config import AttentionGroup, EngineConfig
from sim.core.forking import Forking
from sim.core.policies import PRESETS
from sim.core.request import RequestSpec, samples
from sim.memory import build_ledger
from tests.support.scenarios import with_engine


def groups_of(shape) -> tuple[AttentionGroup, ...]:
    """Those of the ledger."""
    return core_groups(build_ledger(shape, ANY_GPU, block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN))


@st.composite
def hybrid_scenarios(draw: st.DrawFn) -> SmallScenario:
    """Layers of up to three kinds in any order, requests that share prefixes, fork and leave, and an engine with too few blocks."""
    kinds = draw(st.sampled_from(((5, None), (9, None), (6, 13), (3, 8, None), (17, None))))
    order = (*range(len(kinds)), *draw(st.lists(st.sampled_from(range(len(kinds))), max_size=3)))
    base = model_shape(HYBRID)
    attention = tuple(replace(base.attention[1], window=window) for window in kinds)
    shape = replace(base, num_layers=len(order), attention=attention, attention_of_layer=order)
    made: list[RequestSpec] = []
    for index in range(draw(st.integers(1, 7))):
        input_tokens = draw(st.integers(1, 30))
        named = draw(st.integers(0, (input_tokens + 8) // 3))
        spec = RequestSpec(
            request_id=f"r{index}",
            arrival_s=index * draw(st.integers(0, 12)) / 1000,
            input_tokens=input_tokens,
            output_tokens=draw(st.integers(1, MAX_MODEL_LEN - 30)),
            priority=draw(st.integers(0, 1)),
            content_ids=tuple(draw(st.lists(st.sampled_from("xy"), min_size=named, max_size=named))),
            content_block_tokens=3 if named else 0,
            cancel_after_s=draw(st.none() | st.integers(1, 80).map(lambda ms: ms / 1000)),
        )
        width = draw(st.sampled_from((1, 1, 1, 2, 3)))
        forking = Forking(width=width, change=draw(st.sampled_from((0.0, 0.4)))) if draw(st.booleans()) else None
        made += samples(replace(spec, n=width, forking=forking if width > 1 else None))
    groups = groups_of(shape)
    engine = EngineConfig(
        num_gpu_blocks=len(groups) * MAX_MODEL_LEN // BLOCK_SIZE + draw(st.integers(0, 6)),
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=draw(st.integers(2, 8)),
        max_num_batched_tokens=draw(st.integers(8, 40)),
        enable_prefix_caching=draw(st.booleans()),
        reserve_full_prompt=draw(st.booleans()),
        scheduling_policy=draw(st.sampled_from(("fcfs", "priority"))),
        kv_groups=groups,
        num_cpu_blocks=draw(st.sampled_from((0, 0, 8, 60))),
        async_scheduling=all(spec.forking is None for spec in made) and draw(st.booleans()),
    )
    made.sort(key=lambda spec: spec.arrival_s)
    return SmallScenario(name="drawn", requests=tuple(made), engine=engine, shape=shape, seed=draw(st.integers(0, 3)))


@given(scenario=hybrid_scenarios(), name=st.sampled_from(sorted(PRESETS)))
@settings(max_examples=100)
def test_every_request_gets_the_tokens_it_gets_with_unlimited_memory_and_one_table(scenario, name):
    cell = check_cell(scenario, name, "cpu")
    assert cell.ok, cell.error


def test_a_roomy_engine_keeps_every_token_in_one_table():
    """What the answers are compared with does not slide, has no groups, and is not idle: without the windows they are others."""
    scenario = SCENARIOS["hybrid-0"]
    assert scenario.roomy.engine.groups == (AttentionGroup(block_size=BLOCK_SIZE),)
    wide = replace(scenario, shape=windowed(scenario.shape, MAX_MODEL_LEN))
    answers, others = reference_answers(scenario), reference_answers(wide)
    assert sum(answers[name] != others[name] for name in answers) > len(answers) // 2


def test_forks_copy_in_every_group_and_prefixes_are_hit_in_every_group(steady_time):
    beams = run_for_real(SCENARIOS["hybrid-beams-0"], preset("vllm-v1"))
    assert sum(len(entry["copied"]) for entry in beams.decisions) > 3 * 3
    assert beams.report["copied_blocks"] >= sum(len(entry["copied"]) for entry in beams.decisions)
    found = run_for_real(SCENARIOS["hybrid-2"], preset("trtllm-no-evict"))
    assert sum(request.prefix_hit_tokens for request in found.requests) > 0


@pytest.mark.parametrize("name", ["hybrid-1", "hybrid-swaps-0"])
@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "fp8", "fp8_per_token_head"])
def test_a_narrower_cache_makes_no_difference_between_groups_and_one_table(name, kv_cache_dtype, steady_time):
    scenario, more = SCENARIOS[name], {"kv_cache_dtype": kv_cache_dtype}
    run = run_for_real(scenario, preset("vllm-v1"), **more)
    assert changed_answers(run, reference_answers(scenario, **more)) == []


@pytest.mark.parametrize("planned_ahead", [False, True])
@pytest.mark.parametrize("mode", ["write_through", "write_back"])
def test_prefixes_of_several_groups_go_to_the_cpu_tier_and_come_back(mode, planned_ahead, steady_time):
    scenario = with_engine(
        SCENARIOS["hybrid-2"], num_cpu_prefix_blocks=40, cpu_prefix_mode=mode, async_scheduling=planned_ahead
    )
    run = run_for_real(scenario, preset("vllm-v1"), copy_s=0.001)
    assert min(run.report["saved_prefix_blocks"], run.report["loaded_prefix_blocks"]) > 0
    assert changed_answers(run, reference_answers(scenario)) == []
    assert run.leaked_blocks == 0
    assert first_difference(run.decisions, replay(scenario, preset("vllm-v1"), run.recording, copy_s=0.001)) is None


def test_a_tier_and_steps_without_memory_change_no_answer(steady_time):
    """One call of attention over prompts in ten fails: what a step did not write is neither saved nor found."""
    scenario, failures = with_engine(SCENARIOS["hybrid-0"], num_cpu_prefix_blocks=40), 0
    reference = reference_answers(scenario)
    for seed in range(8):
        draw = random.Random(seed)

        def faulty(inner, draw=draw):
            works = inner.model.ops.prefill_attention

            def fails_sometimes(call):
                if draw.random() < 0.1:
                    raise torch.OutOfMemoryError("Tried to allocate 2.00 MiB")
                return works(call)

            inner.model.ops.prefill_attention = fails_sometimes
            return inner

        run = run_for_real(scenario, preset("vllm-v1"), wrap=faulty, copy_s=0.001)
        failures += run.report["oom_steps"]
        assert changed_answers(run, reference) == []
        assert run.leaked_blocks == 0
    assert failures > 8


@pytest.mark.parametrize(
    "action", ["pause", "swap_out", "cap_running", "shrink_step", "no_reuse", "drop_cache", "micro_batch", "truncate"]
)
def test_rungs_of_the_ladder_work_on_several_groups(action, steady_time):
    scenario = with_engine(SCENARIOS["hybrid-0"], num_cpu_blocks=40)
    scenario = replace(
        scenario, requests=tuple(replace(spec, priority=index % 2) for index, spec in enumerate(scenario.requests))
    )
    value = {"pause": 0.5, "swap_out": 0.5, "cap_running": 3.0, "shrink_step": 0.5, "truncate": 8.0, "micro_batch": 2.0}
    rungs = [
        {"action": action, "signal": "kv_usage", "on": 0.6, "off": 0.4, "hold_s": 0.0, "value": value.get(action, 0.0)}
    ]
    run = run_for_real(scenario, preset("ladder", rungs))
    assert any(entry["ladder"] for entry in run.decisions)
    assert any("truncate" in request.degraded for request in run.requests) == (action == "truncate")
    assert changed_answers(run, reference_answers(scenario)) == []
    assert run.leaked_blocks == 0
    assert first_difference(run.decisions, replay(scenario, preset("ladder", rungs), run.recording)) is None


def test_a_step_that_is_too_large_is_taken_back_in_every_group(steady_time):
    scenario = SCENARIOS["hybrid-2"]
    used = run_for_real(scenario, preset("vllm-v1")).report["bytes"]["workspace_high_water"]
    run = run_for_real(scenario, preset("vllm-v1"), workspace_bytes=used * 3 // 4)
    assert run.report["oom_steps"] > 0
    assert run.leaked_blocks == 0
    assert changed_answers(run, reference_answers(scenario)) == []
    assert first_difference(run.decisions, replay(scenario, preset("vllm-v1"), run.recording)) is None
