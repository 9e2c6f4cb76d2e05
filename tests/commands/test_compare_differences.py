"""Comparisons: the same requests for all, differences that are right, and a refusal where there is nothing to compare."""

import pytest

from experiments.compare import comparison, value_at
from sim.scenario import Scenario, ScenarioError

BASE = Scenario(
    model="llama-3.1-8b",
    gpu="h100-sxm-80gb",
    workload={"workload": "sharegpt", "rate": 20.0, "num_requests": 60},
    engine={"num_gpu_blocks_override": 600, "max_model_len": 4096},
)
TRACE = """request_id,arrival_s,input_tokens,output_tokens_requested
a,0.0,400,50
b,0.1,500,60
c,0.2,600,70
"""


def row(document, name, scenario="candidate"):
    return next(row for row in document["metrics"] if row["name"] == name and row["scenario"] == scenario)


def compared(candidate, **arguments):
    return comparison({"baseline": BASE, "candidate": candidate}, **{"replications": 3, "workers": 1, **arguments})


def test_a_scenario_does_not_differ_from_itself():
    document = compared(BASE)
    assert document["metrics"]
    for metric in document["metrics"]:
        assert (metric["difference"], metric["low"], metric["high"]) == (0.0, 0.0, 0.0), metric["name"]
        assert metric["verdict"] == "no difference shown"
    assert document["correlation"] == pytest.approx(1.0)
    assert document["replications"] == 3


def test_more_blocks_mean_fewer_preemptions_and_the_verdict_knows_which_is_better():
    document = compared(BASE.with_(num_gpu_blocks_override=20_000))
    preemptions, throughput = row(document, "num_preemptions"), row(document, "output_throughput_tokens_per_s")
    assert preemptions["candidate"] == 0 < preemptions["baseline"]
    assert preemptions["high"] < 0
    assert preemptions["verdict"] == "better"
    assert throughput["difference"] > 0
    assert throughput["verdict"] in ("better", "no difference shown")


def test_the_difference_is_candidate_minus_baseline():
    for metric in compared(BASE.with_(num_gpu_blocks_override=4000))["metrics"]:
        assert metric["difference"] == pytest.approx(metric["candidate"] - metric["baseline"], abs=1e-9)


def test_who_is_turned_away_is_in_no_latency_and_that_is_said():
    fewer = compared(BASE.with_(policy={"max_num_queued_reqs": 10}))
    assert row(fewer, "finished")["verdict"] == "worse"
    assert any("who is turned away is in no latency" in note for note in fewer["notes"])
    same = compared(BASE.with_(num_gpu_blocks_override=4000))
    assert not any("turned away" in note for note in same["notes"])


def test_the_answer_does_not_depend_on_the_number_of_processes():
    candidate = BASE.with_(num_gpu_blocks_override=4000)
    assert compared(candidate, workers=1, replications=2) == compared(candidate, workers=2, replications=2)


def test_several_candidates_are_each_compared_with_the_first():
    scenarios = {"small": BASE, "same": BASE, "large": BASE.with_(num_gpu_blocks_override=20_000)}
    document = comparison(scenarios, replications=2, workers=1)
    assert document["candidates"] == ["same", "large"]
    assert row(document, "num_preemptions", "same")["difference"] == 0
    assert row(document, "num_preemptions", "large")["difference"] < 0
    assert any("Bonferroni" in note for note in document["notes"])


def test_different_workloads_are_refused_with_the_keys():
    with pytest.raises(ScenarioError, match=r"same workload.*rate \(20\.0 and 5\.0\)"):
        compared(BASE.with_(rate=5.0))


def test_one_replication_has_no_interval_and_is_refused():
    with pytest.raises(ScenarioError, match="at least 2"):
        compared(BASE, replications=1)


def test_a_fixed_trace_gives_one_exact_difference_without_an_interval(tmp_path):
    path = tmp_path / "requests.csv"
    path.write_text(TRACE)
    base = BASE.with_(workload={"trace": str(path), "rate": None, "num_requests": None})
    document = comparison({"a": base, "b": base.with_(max_num_seqs=1)}, workers=1)
    assert document["replications"] == 1
    assert document["correlation"] is None
    assert any("fixed trace" in note for note in document["notes"])
    ttft = row(document, "ttft_s.mean", "b")
    assert (ttft["low"], ttft["high"], ttft["verdict"]) == (None, None, "worse")


def test_one_seed_serves_all_scenarios_and_is_named():
    document = compared(BASE.with_(seed=5), replications=2)
    assert all(metric["difference"] == 0 for metric in document["metrics"])
    assert any("different seeds" in note for note in document["notes"])


def test_a_metric_is_found_by_its_path_in_the_summary():
    summary = {"ttft_s": {"p99": 0.5}, "finished": 3, "itl_s": {}}
    assert value_at(summary, "ttft_s.p99") == 0.5
    assert value_at(summary, "finished") == 3.0
    assert value_at(summary, "itl_s.p99") is None
    assert value_at(summary, "goodput_per_s") is None
