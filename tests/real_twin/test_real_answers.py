"""Memory management never changes an answer.

A real model runs on a real pool under pressure, and every request must get, token for token, what it gets with unlimited
memory. Greedy sampling, float32, on the CPU. And whatever the device's steps took, the simulator, given the same durations,
must have decided the same in every one of them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.validation import SCENARIOS, check_cell, reference_answers, replay, run_for_real
from experiments.validation.scenarios import BLOCK_SIZE, MAX_MODEL_LEN, SmallScenario
from experiments.validation.worlds import changed_answers, first_difference, preset
from gpu.ops import Ops
from gpu.plan_moves import PlanMoves
from gpu.pool import PoisonedReadError
from sim.catalog.models import model_shape
from sim.core.config import EngineConfig
from sim.core.forking import Forking
from sim.core.policies import PRESETS
from sim.core.request import RequestSpec, samples
from tests.support.scenarios import with_engine
from tests.support.steady_timer import SteadyTimer

SHAPE = model_shape("tiny-llama-test")


def windowed(window: int | None):
    """The test model, with a sliding window if there is one."""
    if window is None:
        return SHAPE
    return replace(
        SHAPE, architecture="mistral", attention=tuple(replace(kind, window=window) for kind in SHAPE.attention)
    )


@st.composite
def requests(draw: st.DrawFn) -> tuple[RequestSpec, ...]:
    """Up to eight requests: any lengths, prompts that begin alike, clients that leave."""
    made, arrival_s = [], 0.0
    for index in range(draw(st.integers(1, 8))):
        arrival_s += draw(st.integers(0, 12)) / 1000
        input_tokens = draw(st.integers(1, 30))
        named = draw(st.integers(0, (input_tokens + 8) // 3))
        spec = RequestSpec(
            request_id=f"r{index}",
            arrival_s=arrival_s,
            input_tokens=input_tokens,
            output_tokens=draw(st.integers(1, MAX_MODEL_LEN - 30)),
            max_tokens=draw(st.none() | st.integers(1, 12)),
            priority=draw(st.integers(0, 1)),
            content_ids=tuple(draw(st.lists(st.sampled_from("xy"), min_size=named, max_size=named))),
            content_block_tokens=3 if named else 0,
            cancel_after_s=draw(st.none() | st.integers(1, 80).map(lambda ms: ms / 1000)),
        )
        width = draw(st.sampled_from((1, 1, 1, 2, 3)))
        forking = Forking(width=width, change=draw(st.sampled_from((0.0, 0.4)))) if draw(st.booleans()) else None
        made += samples(replace(spec, n=width, forking=forking if width > 1 else None))
    return tuple(made)


@st.composite
def scenarios(draw: st.DrawFn) -> SmallScenario:
    """Those requests, and an engine with too few blocks for them."""
    window = draw(st.sampled_from((None, None, None, 5, 8)))
    tokens = draw(st.integers(3, 40))
    drawn = draw(requests())
    forks = any(spec.forking is not None for spec in drawn)
    engine = EngineConfig(
        num_gpu_blocks=draw(st.integers(12, 20)),
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=draw(st.integers(1, min(tokens, 8))),
        max_num_batched_tokens=tokens,
        enable_prefix_caching=draw(st.booleans()),
        reserve_full_prompt=draw(st.booleans()),
        scheduling_policy=draw(st.sampled_from(("fcfs", "priority"))),
        sliding_window=window,
        num_cpu_blocks=draw(st.sampled_from((0, 0, 3, 8, 24))),
        watermark=draw(st.sampled_from((0.0, 0.1))),
        async_scheduling=not forks and draw(st.booleans()),  # what forks cannot be planned ahead
    )
    return SmallScenario(
        name="drawn", requests=drawn, engine=engine, shape=windowed(window), seed=draw(st.integers(0, 3))
    )


@given(scenario=scenarios(), name=st.sampled_from(sorted(PRESETS)))
@settings(max_examples=60)
def test_every_request_gets_the_tokens_it_gets_with_unlimited_memory(scenario, name):
    cell = check_cell(scenario, name, "cpu")
    assert cell.ok, cell.error


@given(scenario=scenarios(), chunk=st.integers(1, 17))
@settings(max_examples=15)
def test_a_prompt_may_be_computed_in_chunks_of_any_size(scenario, chunk):
    chunked = with_engine(scenario, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 4))
    run = run_for_real(chunked, preset("vllm-v1"))
    assert changed_answers(run, reference_answers(chunked)) == []


def paced(inner):
    """The device, whose steps are said to last as the timer says."""
    inner._timer = SteadyTimer()
    return inner


@cache
def reference(scenario_name: str) -> dict[str, list[int]]:
    """Answers with unlimited memory, which no preset and no duration changes."""
    return reference_answers(SCENARIOS[scenario_name])


@pytest.mark.parametrize("name", PRESETS)
def test_both_worlds_decide_alike_under_every_preset(name):
    """Forty-eight scenarios a preset, with the durations that this machine takes."""
    assert len(SCENARIOS) >= 20
    for scenario in SCENARIOS.values():
        cell = check_cell(scenario, name, "cpu", reference(scenario.name))
        assert cell.ok, f"{scenario.name}: {cell.error}"


@pytest.mark.parametrize("name", PRESETS)
def test_the_scenarios_really_preempt_swap_and_reuse(name):
    """The comparison above is not idle: with durations that are the same everywhere, each preset does what it is for."""
    facts = []
    for scenario in SCENARIOS.values():
        cell = check_cell(scenario, name, "cpu", reference(scenario.name), wrap=paced)
        assert cell.ok, f"{scenario.name}: {cell.error}"
        facts.append(cell.facts)
    totals = {
        key: sum(fact[key] for fact in facts)
        for key in ("preemptions", "prefix_hit_tokens", "swapped_out_blocks", "moved_to_cpu")
    }
    reserves = {"trtllm-no-evict", "static-batch", "orca", "sglang", "predicted-peak"}
    assert totals["preemptions"] > 5 or name in reserves
    assert totals["swapped_out_blocks"] > 5 or name in reserves
    assert totals["moved_to_cpu"] > 5 or name == "orca"
    assert totals["prefix_hit_tokens"] > 20 or name in {"vllm-v0", "orca"}


def test_a_sequence_that_forks_says_what_it_says_unforked():
    """Greedy, all sequences of one prompt must say the same, however often they went on as copies of others."""
    forks = copies = 0
    for scenario in (SCENARIOS[f"beams-{variant}"] for variant in range(3)):
        run = run_for_real(scenario, preset("vllm-v1"), wrap=paced)
        forks += sum(len(entry.get("forked", ())) for entry in run.decisions)
        copies += sum(len(entry["copied"]) for entry in run.decisions)
        unforked = reference_answers(
            replace(scenario, requests=tuple(replace(spec, forking=None) for spec in scenario.requests))
        )
        assert changed_answers(run, unforked) == []
        for request in run.requests:
            assert unforked[request.request_id] == unforked[f"{request.spec.sample_of}#0"]
    assert forks > 40
    assert copies > 20


def test_a_device_that_leaves_out_the_copies_is_found_out(monkeypatch):
    """The test above is not blind."""
    monkeypatch.setattr(PlanMoves, "_copy", lambda self, copies: None)
    with pytest.raises(PoisonedReadError):
        run_for_real(SCENARIOS["beams-1"], preset("vllm-v1"), wrap=paced)


def test_a_beam_that_goes_on_as_a_copy_twice_in_one_step_shares_each_table_in_turn():
    """In this pool two beams of "r3" decode in one step, and both are r3#1's source: the plan tells both tables."""
    scenario = with_engine(SCENARIOS["beams-1"], num_gpu_blocks=12)
    run = run_for_real(scenario, preset("vllm-v1"), wrap=paced)
    forked = [[child for child, _ in entry.get("forked", ())] for entry in run.decisions]
    assert any(children.count("r3#1") == 2 for children in forked)
    assert run.leaked_blocks == 0
    assert changed_answers(run, reference_answers(scenario)) == []


def test_a_beam_that_forks_and_is_preempted_in_one_step_leaves_nothing_behind():
    """Steps of half a millisecond to sixty: "r3" forks, needs a copy to write into, and is the victim before it has it."""

    class Uneven(SteadyTimer):
        def stop_fs(self) -> int:
            return int(self.draw.choice([0.5, 1, 2, 4, 8, 20, 60]) * self.draw.uniform(0.5, 1.5) * 10**12)

    def timed(inner):
        inner._timer = Uneven(0)
        return inner

    scenario = SCENARIOS["beams-1"]
    run = run_for_real(scenario, preset("ladder"), wrap=timed)
    assert sum(request.num_preemptions for request in run.requests) > 0
    assert run.leaked_blocks == 0
    assert changed_answers(run, reference_answers(scenario)) == []


def test_a_sample_that_ends_by_the_fork_that_starts_it_has_its_token():
    """The fork comes with the last step of all, so that no plan tells of it."""
    first, second = samples(
        RequestSpec(request_id="r", arrival_s=0.0, input_tokens=1, output_tokens=1, n=2, forking=Forking(width=2))
    )
    scenario = replace(SCENARIOS["samples-0"], name="two", requests=(first, second))
    run = run_for_real(scenario, preset("orca"))
    assert "forked" in run.decisions[-1]
    assert [len(answer) for answer in run.answers.values()] == [1, 1]
    assert changed_answers(run, reference_answers(scenario)) == []


def test_other_durations_are_another_run():
    """The comparison is not blind: played back three times as slow, a run decides differently."""
    scenario = SCENARIOS["leavers-0"]
    real = run_for_real(scenario, preset("vllm-v1"), wrap=paced)
    assert first_difference(real.decisions, replay(scenario, preset("vllm-v1"), real.recording)) is None
    slower = {step: record._replace(duration_fs=3 * record.duration_fs) for step, record in real.recording.items()}
    slower |= dict.fromkeys(range(len(slower), len(slower) + 500), (10**13, None))
    assert "differs in" in (first_difference(real.decisions, replay(scenario, preset("vllm-v1"), slower)) or "")


def test_a_wrong_answer_is_seen():
    """Nor is the other one: answers depend on every token of the prompt."""
    scenario = SCENARIOS["pressure-0"]
    run = run_for_real(scenario, preset("vllm-v1"), wrap=paced)
    other = reference_answers(replace(scenario, seed=scenario.seed + 1))
    assert set(changed_answers(run, other)) == {request.request_id for request in run.requests}
    longest = max(run.answers.values(), key=len)
    assert len(set(longest)) > len(longest) // 2, "a model that repeats itself would hide a lost context"


def test_an_answer_that_ends_too_soon_is_seen():
    scenario = SCENARIOS["pressure-0"]
    run = run_for_real(scenario, preset("vllm-v1"), wrap=paced)
    reference = reference_answers(scenario)
    assert changed_answers(run, reference) == []
    first = run.requests[0].request_id
    shorter = replace(run, answers={**run.answers, first: run.answers[first][:-1]})
    assert changed_answers(shorter, reference) == [first]
    run.requests[0].degraded.append("run_on_cpu")  # which takes nothing from an answer
    assert changed_answers(run, reference) == []
    assert changed_answers(shorter, reference) == [first]


def test_a_lossy_rung_changes_answers_and_says_so():
    scenario = with_engine(SCENARIOS["pressure-1"], num_gpu_blocks=16)
    scenario = replace(scenario, requests=tuple(replace(spec, priority=1) for spec in scenario.requests))
    rungs = [{"action": "truncate", "signal": "kv_usage", "on": 0.8, "off": 0.5, "hold_s": 0.0, "value": 8.0}]
    run = run_for_real(scenario, preset("ladder", rungs), wrap=paced)
    reference = reference_answers(scenario)
    truncated = [r.request_id for r in run.requests if "truncate" in r.degraded]
    differing = [name for name, answer in run.answers.items() if answer != reference[name][: len(answer)]]
    assert truncated
    assert differing
    assert set(differing) <= set(truncated)
    assert changed_answers(run, reference) == []
    assert run.leaked_blocks == 0
    assert first_difference(run.decisions, replay(scenario, preset("ladder", rungs), run.recording)) is None


@pytest.mark.parametrize(
    "action", ["pause", "swap_out", "cap_running", "shrink_step", "no_reuse", "drop_cache", "pause_admission"]
)
def test_rungs_that_are_not_lossy_leave_answers_alone(action):
    scenario = with_engine(SCENARIOS["prefixes-1"], num_cpu_blocks=16)
    scenario = replace(
        scenario, requests=tuple(replace(spec, priority=index % 2) for index, spec in enumerate(scenario.requests))
    )
    value = {"pause": 0.5, "swap_out": 0.5, "cap_running": 3.0, "shrink_step": 0.5}.get(action, 0.0)
    rungs = [{"action": action, "signal": "kv_usage", "on": 0.6, "off": 0.4, "hold_s": 0.0, "value": value}]
    run = run_for_real(scenario, preset("ladder", rungs), wrap=paced)
    assert any(entry["ladder"] for entry in run.decisions)
    assert changed_answers(run, reference_answers(scenario)) == []
    assert run.leaked_blocks == 0
    assert first_difference(run.decisions, replay(scenario, preset("ladder", rungs), run.recording)) is None


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", ["vllm-v1", "vllm-v0", "sglang", "ladder"])
def test_both_worlds_decide_alike_on_a_gpu(name, cuda_device):
    for scenario in SCENARIOS.values():
        cell = check_cell(scenario, name, cuda_device)
        assert cell.ok, f"{scenario.name}: {cell.error}"


ROUNDING = 1e-4
"""Much more than sums of float32 differ by that are made in another order: at logits of 5, about 1e-5."""


def test_no_answer_hangs_by_a_rounding(monkeypatch):
    """Else equal memory management gives unequal answers on a device that sums in another order for another batch."""
    margins: list[float] = []
    sample = Ops.sample

    def watched(ops, call):
        if call.logits.shape[0]:
            first, second = call.logits.topk(2, dim=-1).values.unbind(-1)
            margins.append(float((first - second).min()))
        return sample(ops, call)

    monkeypatch.setattr(Ops, "sample", watched)
    least: dict[str, float] = {}
    for name, scenario in SCENARIOS.items():
        margins.clear()
        reference_answers(scenario)
        least[name] = min(margins)
    assert {name: margin for name, margin in least.items() if margin < ROUNDING} == {}
