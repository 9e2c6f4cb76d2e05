"""A step that runs out of memory is taken back, tried again smaller, and costs at most the request that asks for most."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core import Batching, EngineConfig, Outcome, Policy, RequestSpec, StepResult
from sim.core.plan import OomReport
from sim.costs.constant import FixedCost
from sim.results.summary import request_columns, summarize, timeline_columns
from sim.world import run_world
from sim.world.executors import ModelExecutor

COST = FixedCost(0.01)


class Tight:
    """An executor whose device has room for the activations of so many tokens a step, or fails in chosen steps."""

    def __init__(self, max_tokens: int = 10**9, failing: tuple[int, ...] = ()) -> None:
        self.model, self.max_tokens, self.failing = ModelExecutor(COST), max_tokens, failing

    def execute(self, plan):
        tokens = plan.shape.num_tokens
        result = self.model.execute(plan)
        bad = [step for step in range(plan.step, plan.step + plan.repeat) if step in self.failing]
        if tokens > self.max_tokens:
            bad = [plan.step]
        if not bad:
            return result
        done = bad[0] - plan.step + 1
        report = OomReport(op="mlp", requested_bytes=1000 * tokens, free_bytes=1000 * self.max_tokens)
        return StepResult(durations=result.durations.prefix(done), oom=report)


def run(requests, *, executor, stepping=False, policy=None, **config):
    settings = {"num_gpu_blocks": 40, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32, **config}
    log = []
    record = run_world(
        EngineConfig(**settings),
        COST,
        requests,
        executor=lambda core: executor,
        policy=policy,
        stepping=stepping,
        check=True,
        decision_log=lambda entry: log.append(json.dumps(entry)),
    )
    if log and not json.loads(log[-1])["scheduled"]:
        closing = log.pop()  # what the last step released
        assert json.loads(closing)["released"]
    summary = summarize(record, scenario={}, seed=0, version="0")
    summary.pop("core_time_s")
    return record, summary, log


def spec(request_id, input_tokens, output_tokens, **fields):
    return RequestSpec(
        request_id=request_id, arrival_s=0.0, input_tokens=input_tokens, output_tokens=output_tokens, **fields
    )


def test_a_step_that_is_too_large_is_halved_and_nobody_fails():
    """32 tokens do not fit, 16 do: one step of 10 ms is lost, the prompt takes two steps of 16 instead of one of 32."""
    record, summary, log = run([spec("a", 32, 2)], executor=Tight(20))
    (request,) = record.requests
    assert request.outcome is Outcome.FINISHED
    assert summary["oom_events"] == 1
    assert [json.loads(entry)["scheduled"][0][1] for entry in log] == [32, 16, 16, 1]
    assert request_columns(record)["ttft_s"] == [pytest.approx(0.03)]


def test_what_a_failed_step_took_is_given_back_and_taken_again():
    _record, _summary, log = run([spec("a", 32, 1)], executor=Tight(20))
    first, second, third = (json.loads(entry)["scheduled"][0] for entry in log)
    assert first == ["a", 32, [1, 2, 3, 4, 5, 6, 7, 8]]
    assert len(second[2]) == len(third[2]) == 4
    assert not set(second[2]) & set(third[2])


def test_a_failure_in_the_middle_of_a_stretch_loses_one_step_only():
    """20 decode steps follow the prompt; step 7 fails and is done again: 0.01 s later, and not a token less."""
    record, summary, _log = run([spec("a", 4, 21)], executor=Tight(failing=(7,)))
    assert summary["oom_events"] == 1
    assert record.requests[0].num_output_tokens == 21
    assert request_columns(record)["e2el_s"] == [pytest.approx(0.22)]


def test_when_nothing_fits_the_request_that_asks_for_most_fails_with_the_numbers_and_the_rest_goes_on():
    """Room for 3 tokens a step: the three small requests decode together; 16 prompt tokens fail, 8 fail again, and "large", which
    asks for most, is ended. Steps keep shrinking until the small ones pass."""
    small = [spec(name, 1, 3) for name in "xyz"]
    record, summary, _log = run([*small, spec("large", 16, 3)], executor=Tight(3))
    outcomes = {request.request_id: request.outcome for request in record.requests}
    assert outcomes == {
        "x": Outcome.FINISHED,
        "y": Outcome.FINISHED,
        "z": Outcome.FINISHED,
        "large": Outcome.FAILED,
    }
    reason = record.requests[3].reason
    assert "out of memory in mlp" in reason and "3000 free" in reason
    assert summary["kv_blocks_at_end"]["owned"] == 0


def test_the_cap_is_lifted_after_good_steps():
    """Only step 0 fails. 16 good steps at 16 tokens double the cap to 32, which is the whole budget: it is gone."""
    _record, _summary, log = run([spec("a", 400, 1)], executor=Tight(failing=(0,)), num_gpu_blocks=200)
    sizes = [json.loads(entry)["scheduled"][0][1] for entry in log]
    assert sizes[:18] == [32] + [16] * 16 + [32]


@settings(max_examples=120)
@given(
    data=st.data(),
    max_tokens=st.sampled_from([1, 2, 5, 9, 10**9]),
    failing=st.lists(st.integers(0, 40), max_size=6),
    batching=st.sampled_from(list(Batching)),
    caching=st.booleans(),
)
def test_faults_anywhere_end_every_request_in_an_outcome_with_all_blocks_back(
    data, max_tokens, failing, batching, caching
):
    requests, time_s = [], 0.0
    for index in range(data.draw(st.integers(1, 8))):
        time_s += data.draw(st.sampled_from([0.0, 0.005, 0.03, 0.2]))
        requests.append(
            RequestSpec(
                request_id=str(index),
                arrival_s=time_s,
                input_tokens=data.draw(st.integers(1, 20)),
                output_tokens=data.draw(st.integers(1, 12)),
                content_ids=tuple(data.draw(st.lists(st.integers(0, 1), max_size=2))),
                content_block_tokens=4,
                cancel_after_s=data.draw(st.sampled_from([None, None, 0.02])),
            )
        )
    worlds = []
    for stepping in (False, True):
        record, summary, log = run(
            requests,
            executor=Tight(max_tokens, tuple(failing)),
            stepping=stepping,
            policy=Policy(batching=batching),
            num_gpu_blocks=14,
            max_num_batched_tokens=16,
            enable_prefix_caching=caching,
        )
        assert summary["kv_blocks_at_end"]["owned"] == 0
        assert all(request.outcome is not None for request in record.requests)
        assert all(request.reason for request in record.requests if request.outcome is Outcome.FAILED)
        worlds.append((log, summary, request_columns(record), timeline_columns(record)))
    assert worlds[0] == worlds[1]
