"""A typed setting that a preset takes is seen in what its engine does: small loads, counted by hand, under every preset that takes it."""

from __future__ import annotations

import pytest

import sim
from sim.assembly import policy_of
from sim.core.config import ConfigError
from sim.core.policies import PRESETS
from sim.core.request import RequestSpec
from sim.costs import FixedCost
from sim.resolve import resolve
from sim.scenario_errors import ScenarioError
from sim.scenario_tables import TABLE_OF_KEY
from sim.world import run_world


def scenario(preset, **typed):
    """Blocks of 16, a context of 1024 tokens, and these keys typed."""
    tables = {"engine": {"max_model_len": 1024, "num_gpu_blocks_override": 4000}, "policy": {"policy": preset}}
    for key, value in typed.items():
        tables[TABLE_OF_KEY[key]][key] = value
    return sim.Scenario(model="llama-3.1-8b", gpu="h100-sxm-80gb", **tables)


def taken(key, *values, **others):
    """The presets, with each of these values, that take the key: at least one for each value."""
    cases = []
    for value in values:
        for preset in PRESETS:
            try:
                policy_of(resolve(scenario(preset, **{key: value, **others})))
            except (ScenarioError, ConfigError):
                continue
            cases.append((preset, value))
    assert {value for _, value in cases} == set(values)
    return pytest.mark.parametrize(("preset", "value"), cases)


def request(name, input_tokens, output_tokens=2, arrival_s=0.0, **fields):
    return RequestSpec(
        request_id=name,
        arrival_s=arrival_s,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        max_tokens=output_tokens,
        **fields,
    )


def steps(requests, preset, **typed):
    """The tokens of each step by request, 10 ms a step."""
    config, policy = policy_of(resolve(scenario(preset, **typed)))
    log = []
    run_world(config, FixedCost(0.01), requests, policy=policy, check=True, decision_log=log.append)
    return [{name: tokens for name, tokens, _ in entry["scheduled"]} for entry in log]


@taken("enable_prefix_caching", True, False)
def test_a_prefix_is_found_where_caching_is_on(preset, value):
    """64 tokens, all of them cached: what is behind the last whole block before the end is computed again, 16 tokens."""
    same = {"content_ids": tuple("abcd"), "content_block_tokens": 16}
    load = [request("first", 64, 2, **same), request("again", 64, 2, arrival_s=0.055, **same)]
    (again,) = [step["again"] for step in steps(load, preset, enable_prefix_caching=value) if "again" in step][:1]
    assert again == (16 if value else 64)


@taken("enable_chunked_prefill", True, False)
def test_a_prompt_is_cut_where_chunks_are_on(preset, value):
    """Two prompts of 700 and a budget of 1024: the second gets the 324 tokens that are left, or waits, as in nano-vllm always: it cuts
    only the first of a step, here one of 1000 tokens after 700.
    """
    if preset == "nano-vllm":
        load = [request("a", 1000), request("b", 700)]
        found = steps(load, preset, enable_chunked_prefill=value, max_num_batched_tokens=768, max_num_seqs=8)
        assert found[:2] == [{"a": 768}, {"a": 232}]
        return
    load = [request("a", 700), request("b", 700)]
    first = steps(load, preset, enable_chunked_prefill=value, max_num_batched_tokens=1024, max_num_seqs=8)[0]
    assert first == ({"a": 700, "b": 324} if value else {"a": 700})


@taken("max_num_batched_tokens", 1024, 2048)
def test_a_step_takes_as_many_tokens_as_were_typed(preset, value):
    """40 prompts of 64 tokens are 2560."""
    load = [request(f"r{index}", 64) for index in range(40)]
    taken = steps(load, preset, max_num_batched_tokens=value)
    assert max(sum(step.values()) for step in taken) == value


@taken("max_num_seqs", 5, 16)
def test_a_step_takes_as_many_sequences_as_were_typed(preset, value):
    load = [request(f"r{index}", 16, 6) for index in range(40)]
    assert max(len(step) for step in steps(load, preset, max_num_seqs=value)) == value


@taken("watermark", 0.0, 0.01, 0.1)
def test_admission_leaves_the_share_that_was_typed(preset, value):
    """200 blocks. Two prompts of 60 blocks leave 80, and a third wants 61: with 20 of them kept it waits, with 2 or none it does not."""
    load = [request("a", 960), request("b", 960), request("c", 976)]
    first = steps(load, preset, watermark=value, num_gpu_blocks_override=200, max_num_batched_tokens=4096)[0]
    assert list(first) == ["a", "b", "c"][: 3 if 61 + int(200 * value) <= 80 else 2]


@taken("scheduler_reserve_full_isl", True, False, enable_chunked_prefill=True)
def test_a_prompt_that_does_not_fit_starts_only_where_its_next_chunk_is_enough(preset, value):
    """100 blocks, of which the first prompt holds 40. The second, of 63, would fit in chunks of 32."""
    load = [request("a", 640, 5), request("b", 1000)]
    typed = {"num_gpu_blocks_override": 100, "max_num_batched_tokens": 512, "max_num_seqs": 8}
    found = steps(load, preset, scheduler_reserve_full_isl=value, enable_chunked_prefill=True, **typed)
    assert any({"a", "b"} <= set(step) for step in found) is not value


@taken("scheduling_policy", "fcfs", "priority")
def test_who_goes_first_is_what_was_typed(preset, value):
    load = [
        request("running", 16, 4, priority=1),
        request("early", 16, 1, arrival_s=0.005, priority=1),
        request("important", 16, 1, arrival_s=0.015, priority=0),
    ]
    order = list(
        dict.fromkeys(name for step in steps(load, preset, scheduling_policy=value, max_num_seqs=1) for name in step)
    )
    assert order == ["running", *(["important", "early"] if value == "priority" else ["early", "important"])]


@pytest.mark.parametrize(
    ("preset", "typed"),
    [
        ("vllm-v0", {"enable_prefix_caching": True, "num_cpu_prefix_blocks": 300}),
        ("vllm-v0", {"enable_chunked_prefill": True, "num_cpu_blocks": 200}),
        ("sglang", {"enable_chunked_prefill": False, "max_num_batched_tokens": 1024}),
        ("trtllm-max-util", {"enable_chunked_prefill": False, "max_num_batched_tokens": 1024}),
        ("nano-vllm", {"max_num_batched_tokens": 300}),
    ],
)
def test_settings_that_differ_from_the_preset_s_own_leap_as_they_step(preset, typed):
    """Under pressure, every invariant checked; and everybody is served."""
    load = {
        "workload": "uniform",
        "num_requests": 80,
        "rate": 60.0,
        "input_tokens": [50, 700],
        "output_tokens": [5, 90],
    }
    runs = []
    for stepping in (False, True):
        log = []
        one = scenario(preset, num_gpu_blocks_override=160, max_num_seqs=16, **typed).with_(
            workload=load, stepping=stepping
        )
        result = sim.simulate(one, check=True, decision_log=log.append)
        runs.append((log, [result.summary[key] for key in ("finished", "num_preemptions", "ttft_s", "e2el_s")]))
    assert runs[0] == runs[1]
    assert runs[0][1][0] == 80
