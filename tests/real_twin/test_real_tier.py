"""The CPU prefix tier with real blocks: what goes to the CPU and comes back is what was computed, whatever was planned meanwhile.

A real model on a real pool, whose copies really move bytes; how long the world waits for them is drawn. Greedy, float32, on the CPU.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.validation import SCENARIOS, reference_answers, replay, run_for_real
from experiments.validation.scenarios import BLOCK_SIZE, MAX_MODEL_LEN, SmallScenario
from experiments.validation.worlds import changed_answers, first_difference, preset
from gpu.cpu_moves import ChangedBlockError, CpuMoves
from gpu.pool import PoisonedReadError
from sim.catalog.models import model_shape
from sim.core.config import EngineConfig
from sim.core.request import RequestSpec
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


def paced(inner):
    """The device, whose steps are said to last as `SteadyTimer` says."""
    inner._timer = SteadyTimer()
    return inner


@pytest.mark.parametrize("mode", ["write_through", "write_back"])
@pytest.mark.parametrize("name", ["prefixes-0", "prefixes-1", "conversations-1", "conversations-2"])
def test_planning_ahead_with_a_tier_changes_no_answer(name, mode):
    scenario = with_engine(SCENARIOS[name], num_cpu_prefix_blocks=20, cpu_prefix_mode=mode, async_scheduling=True)
    run = run_for_real(scenario, preset("vllm-v1"), wrap=paced, copy_s=0.001)
    assert run.report["saved_prefix_blocks"] > 0
    assert run.leaked_blocks == 0
    assert changed_answers(run, reference_answers(scenario)) == []
    assert first_difference(run.decisions, replay(scenario, preset("vllm-v1"), run.recording, copy_s=0.001)) is None


@st.composite
def scenarios(draw: st.DrawFn) -> SmallScenario:
    """Prompts that begin alike, a pool in which they do not stay, clients that leave, and a tier."""
    made, arrival_s = [], 0.0
    for index in range(draw(st.integers(3, 10))):
        arrival_s += draw(st.sampled_from([0, 3, 30, 60])) / 1000
        turns = draw(st.integers(1, 3))
        patience = draw(st.sampled_from([None, None, None, None, 4, 20, 60]))
        made.append(
            RequestSpec(
                request_id=f"r{index}",
                arrival_s=arrival_s,
                input_tokens=8 * turns + draw(st.integers(1, 5)),
                output_tokens=draw(st.integers(1, 12)),
                max_tokens=draw(st.none() | st.integers(1, 12)),
                content_ids=(draw(st.sampled_from("ab")), "c", "d")[:turns],
                content_block_tokens=8,
                cancel_after_s=None if patience is None else patience / 1000,
            )
        )
    window = draw(st.sampled_from((None, None, 5, 9)))
    engine = EngineConfig(
        num_gpu_blocks=draw(st.integers(11, 14)),
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=draw(st.integers(2, 4)),
        max_num_batched_tokens=draw(st.integers(8, 40)),
        num_cpu_prefix_blocks=draw(st.sampled_from((3, 12, 40))),
        cpu_prefix_mode=draw(st.sampled_from(("write_through", "write_back"))),
        sliding_window=window,
        async_scheduling=draw(st.booleans()),
    )
    return SmallScenario(
        name="drawn", requests=tuple(made), engine=engine, shape=windowed(window), seed=draw(st.integers(0, 3))
    )


@given(scenario=scenarios(), copy_s=st.sampled_from((0.0, 0.001, 0.02)))
@settings(max_examples=40)
def test_every_request_gets_the_tokens_that_it_gets_without_a_tier(scenario, copy_s):
    run = run_for_real(scenario, preset("vllm-v1"), wrap=paced, copy_s=copy_s)
    assert run.leaked_blocks == 0
    assert changed_answers(run, reference_answers(scenario)) == []
    assert first_difference(run.decisions, replay(scenario, preset("vllm-v1"), run.recording, copy_s=copy_s)) is None


def test_what_a_window_loads_is_what_it_would_have_computed():
    """Prompts of 25 tokens, a window of 9: of the six blocks that are saved the last two come back, for 24 tokens."""
    named = {"content_ids": ("x", "y", "z"), "content_block_tokens": 8}
    requests = (
        RequestSpec(request_id="W", arrival_s=0.0, input_tokens=25, output_tokens=1, **named),
        RequestSpec(request_id="filler", arrival_s=0.2, input_tokens=44, output_tokens=3),
        RequestSpec(request_id="again", arrival_s=0.4, input_tokens=25, output_tokens=12, **named),
    )
    scenario = with_engine(SCENARIOS["conversations-1"], num_gpu_blocks=12, num_cpu_prefix_blocks=40, sliding_window=9)
    scenario = replace(scenario, requests=requests, shape=windowed(9))
    run = run_for_real(scenario, preset("vllm-v1"), wrap=paced, copy_s=0.001)
    assert [len(pairs) for entry in run.decisions for _, pairs in entry.get("loaded", ())] == [2]
    assert run.report["computed_tokens"] == 25 + 46 + 12
    assert run.leaked_blocks == 0
    assert changed_answers(run, reference_answers(scenario)) == []


def test_the_drawn_scenarios_load():
    """The property above is not idle: a device that loads nothing is found out by it."""
    scenario = with_engine(SCENARIOS["conversations-1"], num_cpu_prefix_blocks=40, async_scheduling=True)
    run = run_for_real(scenario, preset("vllm-v1"), wrap=paced, copy_s=0.001)
    assert run.report["loaded_prefix_blocks"] > 0


def test_a_device_that_leaves_out_a_load_is_found_out(monkeypatch):
    scenario = with_engine(SCENARIOS["conversations-1"], num_cpu_prefix_blocks=40, async_scheduling=True)
    monkeypatch.setattr(CpuMoves, "load", lambda self, name, pairs: None)
    with pytest.raises(PoisonedReadError):
        run_for_real(scenario, preset("vllm-v1"), wrap=paced, copy_s=0.001)


def test_a_prefix_that_was_never_saved_is_found_out_when_it_is_loaded(monkeypatch):
    """What lies in the CPU's memory then are numbers like any others."""
    scenario = with_engine(SCENARIOS["conversations-1"], num_cpu_prefix_blocks=40)
    monkeypatch.setattr(CpuMoves, "save", lambda self, pairs: None)
    with pytest.raises(
        ChangedBlockError,
        match=r"^block \d+ of r0-again, restored at step \d+, comes from CPU block \d+, to which nothing",
    ):
        run_for_real(scenario, preset("vllm-v1"), wrap=paced, copy_s=0.001)


def test_a_save_without_its_fence_is_found_out_when_the_prefix_is_loaded(monkeypatch):
    """The copy is a step late, and sees what the block's next owner has written."""

    def late(inner):
        paced(inner)._moves.cpu._tier.latency_steps = 1
        execute = inner.execute

        def after_late_copies(plan):
            inner._moves.cpu._tier.poll()
            return execute(plan)

        inner.execute = after_late_copies
        return inner

    scenario = with_engine(
        SCENARIOS["prefixes-1"], num_gpu_blocks=12, num_cpu_prefix_blocks=40, cpu_prefix_mode="write_back"
    )
    monkeypatch.setattr(CpuMoves, "_await", lambda self, fence: None)
    with pytest.raises(ChangedBlockError, match=r"is not what was saved at step \d+: checksum"):
        run_for_real(scenario, preset("vllm-v1"), wrap=late)


@pytest.mark.parametrize("ahead", [False, True])
def test_clients_that_leave_while_their_prefix_is_loaded_leave_nothing_on_the_device(ahead):
    """W's four blocks go to the tier and, by the filler, from the device. "gone" loads them and leaves; "later" loads them again."""
    named = {"content_ids": ("x", "y"), "content_block_tokens": 8}
    requests = (
        RequestSpec(request_id="W", arrival_s=0.0, input_tokens=17, output_tokens=1, **named),
        RequestSpec(request_id="filler", arrival_s=0.2, input_tokens=44, output_tokens=3),
        RequestSpec(request_id="gone", arrival_s=0.4, input_tokens=17, output_tokens=9, cancel_after_s=0.02, **named),
        RequestSpec(request_id="beside", arrival_s=0.4, input_tokens=9, output_tokens=20),
        RequestSpec(request_id="later", arrival_s=0.8, input_tokens=17, output_tokens=9, **named),
    )
    base = with_engine(
        SCENARIOS["conversations-1"], num_gpu_blocks=12, num_cpu_prefix_blocks=40, async_scheduling=ahead
    )
    scenario = replace(base, requests=requests)
    run = run_for_real(scenario, preset("vllm-v1"), wrap=paced, copy_s=0.02)
    loaded = [name for entry in run.decisions for name, _ in entry.get("loaded", ())]
    assert loaded == ["gone", "later"]
    assert run.outcomes == {"finished": 4, "aborted": 1}
    assert run.leaked_blocks == 0
    assert changed_answers(run, reference_answers(scenario)) == []
