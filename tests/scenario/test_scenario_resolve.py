"""What a scenario leaves open is filled in as vLLM would, and contradictions are refused with both numbers."""

import json

import pytest

from sim.core.config import ConfigError
from sim.resolve import resolve
from sim.scenario import Scenario, ScenarioError


def on(gpu="h100-sxm-80gb", **tables):
    return Scenario(model="llama-3.1-8b", gpu=gpu, **tables)


@pytest.mark.parametrize(
    ("gpu", "tokens", "seqs"), [("h100-sxm-80gb", 8192, 1024), ("a100-sxm-80gb", 2048, 256), ("l4-24gb", 2048, 256)]
)
def test_budgets_are_vllm_s_server_defaults_for_the_gpu(gpu, tokens, seqs):
    engine = on(gpu).resolved()["engine"]
    assert (engine["max_num_batched_tokens"], engine["max_num_seqs"]) == (tokens, seqs)


def test_the_longest_sequence_is_the_model_s():
    assert on().resolved()["engine"]["max_model_len"] == 131_072
    assert on(engine={"max_model_len": 8192}).resolved()["engine"]["max_model_len"] == 8192


def test_without_chunked_prefill_the_default_budget_holds_the_longest_prompt():
    assert on(engine={"enable_chunked_prefill": False}).resolved()["engine"]["max_num_batched_tokens"] == 131_072


def test_without_chunked_prefill_a_smaller_budget_is_refused():
    with pytest.raises(ScenarioError, match=r"max_num_batched_tokens \(2048\) is below max_model_len \(4096\)"):
        resolve(on(engine={"enable_chunked_prefill": False, "max_num_batched_tokens": 2048, "max_model_len": 4096}))


def test_the_default_sequence_budget_follows_a_small_token_budget():
    assert on(engine={"max_num_batched_tokens": 512}).resolved()["engine"]["max_num_seqs"] == 512


@pytest.mark.parametrize("engine", [{"max_num_batched_tokens": 512, "max_num_seqs": 1024}, {"max_num_seqs": 10_000}])
def test_a_token_budget_below_the_sequences_is_refused(engine):
    with pytest.raises(ScenarioError, match=r"max_num_batched_tokens \(.*\) is below max_num_seqs \(\d+\)"):
        resolve(on(engine=engine))


def test_pasted_flags_fill_in_what_no_key_gives():
    args = "--model llama-3.1-8b --max-num-seqs 64 -tp 2 --no-enable-prefix-caching --scheduling-policy priority --port 8000"
    resolved = resolve(Scenario(gpu="h100-sxm-80gb", engine={"vllm_args": args}))
    assert resolved["model"]["model"] == "llama-3.1-8b"
    assert resolved["engine"]["max_num_seqs"] == 64
    assert resolved["engine"]["tensor_parallel_size"] == 2
    assert resolved["engine"]["enable_prefix_caching"] is False
    assert resolved["policy"]["scheduling_policy"] == "priority"
    assert len(resolved.warnings) == 1
    assert "--port 8000" in resolved.warnings[0]


def test_a_pasted_flag_that_contradicts_a_key_is_refused():
    with pytest.raises(ScenarioError, match=r"\[engine\] block_size is 16, but vllm_args says 32"):
        resolve(on(engine={"vllm_args": "--block-size 32", "block_size": 16}))
    assert resolve(on(engine={"vllm_args": "--block-size 32", "block_size": 32}))["engine"]["block_size"] == 32


def test_a_built_in_workload_has_a_thousand_requests_unless_bounded():
    assert on(workload="azure-conv").resolved()["workload"]["num_requests"] == 1000
    assert on(workload={"workload": "azure-conv", "duration": 60}).resolved()["workload"]["num_requests"] is None
    assert on(workload={"trace": "t.csv"}).resolved()["workload"]["num_requests"] is None


def test_a_closed_loop_sends_as_fast_as_its_clients_allow():
    assert on(workload={"workload": "uniform", "max_concurrency": 8}).resolved()["workload"]["rate"] == "inf"
    assert on(workload={"workload": "uniform", "max_concurrency": 8, "rate": 2}).resolved()["workload"]["rate"] == 2


def test_what_is_resolved_is_plain_json_and_resolves_to_itself():
    scenario = on(
        workload={"workload": "uniform", "max_concurrency": 8}, slo="ttft=2", engine={"vllm_args": "--block-size 32"}
    )
    once = scenario.resolved()
    assert json.loads(json.dumps(once, allow_nan=False)) == once
    assert Scenario(**once).resolved() == once


@pytest.mark.parametrize(
    ("tables", "says"), [({"gpu": "h100"}, "no model.*--model"), ({"model": "llama-3.1-8b"}, "no gpu.*--gpu")]
)
def test_model_and_gpu_are_needed(tables, says):
    with pytest.raises(ScenarioError, match=says):
        resolve(Scenario(**tables))


def test_unknown_names_come_with_the_nearest():
    with pytest.raises(ConfigError, match=r"lama-3.1-8b.*llama-3\.1-8b"):
        resolve(Scenario(model="lama-3.1-8b", gpu="h100"))
    with pytest.raises(ConfigError, match=r"h101.*h100"):
        resolve(Scenario(model="llama-3.1-8b", gpu="h101"))
