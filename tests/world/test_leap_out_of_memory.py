"""Steps that run out of memory fail at the same moment, for the same requests, inside a stretch and alone (I13)."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.catalog.gpus import GIB, gpu
from sim.catalog.models import model_shape
from sim.core.batch_shape import BatchShape
from sim.core.durations import Durations
from sim.core.plan import OomReport, StepPlan, StepResult
from sim.core.request import Outcome
from sim.costs.protocol import CostModel
from sim.memory import build_ledger
from sim.memory.device import Device
from sim.memory.faults import Fault, Faults
from sim.memory.step_memory import StepMemory
from sim.world.executors import ModelExecutor
from tests.support.leap_worlds import configs, is_possible, policies, request_lists, smooth_costs
from tests.support.leaping import Scenario, assert_leap_equals_step, at, by_hand, everything
from tests.support.roomy import TICK_S

# -- steps that run out of memory --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunsOutOfMemory:
    """An executor on which the steps with these numbers fail for lack of memory, after the time they would have taken."""

    cost: CostModel
    failing: frozenset[int]

    def execute(self, plan: StepPlan) -> StepResult:
        result = ModelExecutor(self.cost).execute(plan)
        failed = next((ahead for ahead in range(plan.repeat) if plan.step + ahead in self.failing), None)
        if failed is None:
            return result
        report = OomReport(op="activations", requested_bytes=2, free_bytes=1)
        return StepResult(durations=result.durations.prefix(failed + 1), oom=report)


def everything_with_failures(scenario: Scenario, failing: frozenset[int], *, stepping: bool) -> dict[str, object]:
    return everything(scenario, stepping=stepping, executor=lambda core: RunsOutOfMemory(scenario.cost, failing))


@settings(max_examples=100)
@given(
    st.builds(Scenario, configs(), smooth_costs, request_lists()).filter(lambda s: s.config.enable_chunked_prefill),
    st.frozensets(st.integers(0, 40), min_size=1, max_size=4),
)
def test_a_step_that_runs_out_of_memory_leaves_the_same_inside_a_stretch_and_alone(
    scenario: Scenario, failing: frozenset[int]
) -> None:
    leaping = everything_with_failures(scenario, failing, stepping=False)
    stepping = everything_with_failures(scenario, failing, stepping=True)
    for part in stepping:
        assert leaping[part] == stepping[part], part


# -- what happens inside a stretch, by hand ----------------------------------------------------------------------------


def test_a_failed_step_that_needed_a_block_gives_it_back_the_same_way_in_a_stretch_and_alone() -> None:
    """The third step needs the second block, and fails; its retry needs it again."""
    scenario = by_hand(at(0, "a", 3, 9))
    leaping = everything_with_failures(scenario, frozenset({2}), stepping=False)
    stepping = everything_with_failures(scenario, frozenset({2}), stepping=True)
    assert leaping["decision log"] == stepping["decision log"]


def test_a_failed_step_writes_no_tokens_into_its_blocks() -> None:
    """Blocks of four with prompt 5, nothing else, and the third step fails: slots filled are 5, 6, 6, 7 of 8 in steps of equal length."""
    for stepping in (False, True):
        found = everything_with_failures(by_hand(at(0, "a", 5, 3)), frozenset({2}), stepping=stepping)
        fragmentation = json.loads(str(found["summary"]))["internal_fragmentation"]
        assert fragmentation == {"mean": pytest.approx((3 + 2 + 2 + 1) / 32), "max": pytest.approx(3 / 8)}, stepping


# -- running out of memory ---------------------------------------------------------------------------------------------


LLAMA, H100 = model_shape("llama-3.1-8b"), gpu("h100-sxm-80gb")
LEDGER = build_ledger(LLAMA, H100, max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=8192)
STEPS = StepMemory(LLAMA, H100, LEDGER.settings)


def left(bytes_left: int, *faults: Fault) -> Device:
    """A device that has `bytes_left` for steps, before `faults`."""
    whole = Device(LLAMA, H100, LEDGER, Faults())
    taken = Fault(kind="non_torch", gib=(whole.workspace_bytes - bytes_left) / GIB)
    return Device(LLAMA, H100, LEDGER, Faults((taken, *faults)))


def need_of(decodes: int, prefill: int = 0) -> int:
    """What a step of so many decodes and one prompt chunk needs; every sequence is sampled."""
    chunk = ((prefill, 0),) if prefill else ()
    sampled = decodes + bool(prefill)
    return STEPS.need(BatchShape(prefill=chunk, decode_seqs=decodes, sampled_seqs=sampled)).bytes


def test_a_prompt_that_needs_too_much_is_halved_until_it_fits() -> None:
    """One prompt of 512 tokens; the device has room for a step of 200: 512 and 256 fail, two of them end the request."""
    record = by_hand(at(0, "long", 512, 4), num_gpu_blocks=400).run(stepping=False, device=left(need_of(0, 200)))
    (request,) = record.requests
    assert request.outcome is Outcome.FAILED
    assert "out of memory in" in request.reason
    memory = record.recorders[0].memory
    assert memory is not None
    assert [event.shape.prefill_tokens for event in memory.ooms] == [512, 256]
    assert memory.min_headroom_bytes == need_of(0, 200) - need_of(0, 512)
    assert memory.peak_workspace_bytes == need_of(0, 512)


def test_one_halving_that_is_enough_costs_a_step_and_nobody() -> None:
    record = by_hand(at(0, "long", 512, 4), num_gpu_blocks=400).run(stepping=False, device=left(need_of(0, 256)))
    (request,) = record.requests
    assert request.outcome is Outcome.FINISHED
    assert record.recorders[0].core.oom_events == 1
    assert record.recorders[0].core.steps == 1 + 2 + 3


def test_a_fault_in_the_middle_of_a_stretch_fails_the_step_that_starts_then() -> None:
    """Steps of eight ticks; everything is taken at tick 100, so the step that starts at tick 104 is the first that fails."""
    scenario = by_hand(at(0, "a", 4, 60), at(0, "b", 4, 60))
    device = left(need_of(2, 8), Fault(kind="other_process", gib=1.0, at_s=100 * TICK_S, until_s=110 * TICK_S))
    record = scenario.run(stepping=False, device=device)
    memory = record.recorders[0].memory
    assert memory is not None
    assert [event.step for event in memory.ooms] == [13]
    assert record.recorders[0].core.oom_events == 1
    assert all(request.outcome is Outcome.FINISHED for request in record.requests)
    assert_leap_equals_step(scenario, device=device)


def test_without_a_limit_the_shortage_is_recorded_and_nothing_fails() -> None:
    scenario = by_hand(at(0, "long", 512, 4), num_gpu_blocks=400)
    record = scenario.run(stepping=False, device=left(need_of(0, 200)), memory_limit=False)
    memory = record.recorders[0].memory
    assert memory is not None
    assert memory.min_headroom_bytes < 0
    assert not memory.ooms
    assert record.requests[0].outcome is Outcome.FINISHED


@st.composite
def devices(draw: st.DrawFn) -> Device:
    """Devices with room for about what the steps of random worlds need, and faults that come and go during their stretches."""
    ticks = st.sampled_from([1, 8, 20, 64, 100, 200])
    faults = []
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["other_process", "leak", "fragmentation", "prompt_logprobs", "kernel_fallback"]))
        start = draw(ticks)
        holds = kind not in ("prompt_logprobs", "kernel_fallback")
        faults.append(
            Fault(
                kind=kind,
                at_s=start * TICK_S,
                until_s=(start + draw(ticks)) * TICK_S if draw(st.booleans()) else float("inf"),
                gib=draw(st.sampled_from([1, 4, 16])) / 1024 if holds else 0.0,
                every_s=draw(st.sampled_from([0, 8, 20])) * TICK_S if holds else 0.0,
            )
        )
    return left(need_of(draw(st.integers(1, 4)), draw(st.sampled_from([0, 1, 20]))), *faults)


@settings(max_examples=150, deadline=None)
@given(
    st.builds(
        Scenario, configs(cpu_blocks=(0, 100, 20)), smooth_costs, request_lists(), policy=st.none() | policies
    ).filter(is_possible),
    devices(),
)
def test_running_out_of_memory_is_the_same_whether_the_engine_leaps_or_steps(
    scenario: Scenario, device: Device
) -> None:
    assert_leap_equals_step(scenario, device=device)


@settings(max_examples=100, deadline=None)
@given(devices(), st.integers(1, 60), st.integers(0, 200), st.integers(1, 4))
def test_within_a_run_of_steps_each_leaves_at_most_as_much_as_the_one_before(
    device: Device, steps: int, start_ticks: int, seqs: int
) -> None:
    durations = Durations.affine(steps, round(8 * TICK_S * 1e15), 0)
    shape = BatchShape(decode_seqs=seqs, decode_context_tokens=50, sampled_seqs=seqs)
    start_fs = round(start_ticks * TICK_S * 1e15)
    runs = list(device.tightening(start_fs, durations))
    assert [step for run in runs for step in run] == list(range(steps))
    for run in runs:
        headrooms = [device.headroom_bytes(shape, start_fs, durations, step) for step in run]
        assert headrooms == sorted(headrooms, reverse=True)


def test_a_request_of_a_failed_step_computes_what_another_was_to_leave_in_the_cache() -> None:
    """Both prompts are alike, and the second is to find the first's blocks in the very step that fails: it may not keep them."""
    alike = [
        replace(at(0, name, 64, 2), content_ids=tuple(range(16)), content_block_tokens=4)
        for name in ("first", "second")
    ]
    scenario = by_hand(*alike, max_num_batched_tokens=2048)
    shape = BatchShape(prefill=((64, 0), (4, 60)), sampled_seqs=2)
    device = left(STEPS.need(shape).bytes - 512)
    assert_leap_equals_step(scenario, device=device)
    record = scenario.run(stepping=False, device=device)
    assert record.recorders[0].core.oom_events == 1
    assert sum(row.prefill_tokens for row in record.recorders[0].rows) == 64 + 64
