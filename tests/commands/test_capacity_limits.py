"""What binds, in simulations where the answer is known because only one limit is tight."""

import json

import pytest

import sim
from experiments.capacity import capacity_of
from experiments.cli import main
from experiments.replicate import waited_by_limit
from sim.costs import FixedCost

WIDE = sim.Scenario(
    model="llama-3.1-8b",
    gpu="h100-sxm-80gb",
    workload={"workload": "uniform", "rate": 50.0, "num_requests": 100, "input_tokens": 512, "output_tokens": 64},
)
TIGHT = {
    "max_num_seqs": {"max_num_seqs": 2},
    "KV blocks": {"num_gpu_blocks_override": 80, "max_model_len": 1024},
    "max_num_batched_tokens": {"max_num_batched_tokens": 64},
}


def binding(scenario):
    waited_s = waited_by_limit(sim.simulate(scenario, seed=1, cost=FixedCost(0.01)))
    return max(waited_s, key=waited_s.get), sum(waited_s.values())


@pytest.mark.parametrize("name", TIGHT)
def test_the_one_tight_limit_is_what_requests_wait_for(name):
    found, waited_s = binding(WIDE.with_(**TIGHT[name]))
    assert found == name
    assert waited_s > 0.1


def test_nobody_is_left_in_the_queue_when_nothing_is_tight():
    assert binding(WIDE)[1] == 0.0


@pytest.mark.parametrize("name", ["max_num_seqs", "KV blocks"])
def test_the_search_names_the_one_tight_limit(name):
    scenario = WIDE.with_(**TIGHT[name], slo="ttft_p99=0.5", num_requests=80)
    document = capacity_of(scenario, replications=2, workers=1)
    assert document["binding_limit"] == name
    rate = document["max_rate_per_s"]
    assert rate["low"] <= rate["value"] <= rate["high"]


def test_two_replicas_sustain_at_least_twice_the_rate_of_one():
    scenario = WIDE.with_(max_num_seqs=2, slo="ttft_p99=0.5", num_requests=80)
    one, two = (capacity_of(scenario.with_(replicas=n), replications=2, workers=1) for n in (1, 2))
    # Round-robin makes arrivals at each replica more even than Poisson, so each sustains a little more than one alone.
    assert two["max_rate_per_s"]["value"] > 1.95 * one["max_rate_per_s"]["value"]
    assert (one["gpus_simulated"], two["gpus_simulated"]) == (1, 2)


def test_the_command_ends_with_1_when_even_the_lowest_rate_misses_the_objective(capsys):
    named = ["--model", "llama-3.1-8b", "--gpu", "h100-sxm-80gb", "--workload", "uniform", "--num-requests", "20"]
    assert main(["capacity", *named, "--slo", "ttft_p99=0.0001", "--replications", "2", "--workers", "1"]) == 1
    out = capsys.readouterr().out
    assert "No rate meets" in out
    assert "above 0.0001 s" in out


def test_json_has_the_documented_keys(capsys, tmp_path):
    path = tmp_path / "s.toml"
    path.write_text(
        'model = "llama-3.1-8b"\ngpu = "h100-sxm-80gb"\nslo = "ttft_p99=0.5"\n'
        '[workload]\nworkload = "uniform"\nnum_requests = 40\n[engine]\nmax_num_seqs = 2'
    )
    arguments = ["capacity", str(path), "--replications", "2", "--workers", "1", "--target-rate", "100", "--json"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert captured.err == ""
    assert json.loads((tmp_path / "capacity.json").read_text()) == document
    assert set(document["max_rate_per_s"]) == {"value", "low", "high"}
    keys = {"max_rate_per_s", "binding_limit", "slo", "gpus_for_target", "recommended_flags", "replications"}
    assert keys <= set(document)
    assert document["slo"] == {"ttft_p99": 0.5}
    assert document["replications"] == 2
    assert "--max-num-seqs=2" in document["recommended_flags"]
    assert document["gpus_for_target"] * document["max_rate_per_s"]["value"] >= 100
