"""`sim.simulate`: equal arguments, equal results; requests that do not depend on the engine; answers known by arithmetic."""

import subprocess
import sys
from pathlib import Path

import pytest

import sim
from sim.costs import FixedCost
from sim.scenario import ScenarioError
from tests.support.results import without_clock

SMALL = sim.Scenario(
    model="llama-3.1-8b",
    gpu="h100-sxm-80gb",
    workload={"workload": "sharegpt", "rate": 20.0, "num_requests": 40},
    engine={"num_gpu_blocks_override": 600, "max_model_len": 4096},
)


def test_one_request_takes_one_step_a_token():
    workload = {"workload": "uniform", "num_requests": 1, "input_tokens": 100, "output_tokens": 20}
    result = sim.simulate(SMALL.with_(workload=workload), cost=FixedCost(0.01))
    (row,) = result.requests.to_dict("records")
    assert row["ttft_s"] == pytest.approx(0.01)
    assert row["tpot_s"] == pytest.approx(0.01)
    assert row["e2el_s"] == pytest.approx(0.20)
    assert row["peak_blocks"] == 8  # 119 tokens have KV: the last one is never read


def test_the_same_scenario_and_seed_give_the_same_result():
    assert without_clock(sim.simulate(SMALL, seed=3).summary) == without_clock(sim.simulate(SMALL, seed=3).summary)
    assert without_clock(sim.simulate(SMALL, seed=3).summary) != without_clock(sim.simulate(SMALL, seed=4).summary)


def test_an_unlimited_pool_preempts_nobody():
    assert sim.simulate(SMALL).summary["num_preemptions"] > 0
    assert sim.simulate(SMALL, num_gpu_blocks_override=None).summary["num_preemptions"] == 0


def test_requests_do_not_depend_on_the_engine():
    columns = ["request_id", "arrival_s", "input_tokens", "output_tokens_requested"]
    one = sim.simulate(SMALL, replication=2).requests[columns]
    other = sim.simulate(SMALL, replication=2, max_num_seqs=4, watermark=0.1, block_size=32, replicas=2).requests[
        columns
    ]
    assert one.equals(other)
    assert not one.equals(sim.simulate(SMALL, replication=3).requests[columns])


def test_keys_can_be_changed_for_one_run():
    result = sim.simulate(SMALL, seed=7, num_requests=5, slo="ttft_p99=1")
    assert result.summary["num_requests"] == 5
    assert result.summary["seed"] == 7
    assert result.summary["slo_attainment"] is not None
    assert SMALL.workload.num_requests == 40


def test_the_summary_repeats_the_run():
    first = sim.simulate(SMALL, seed=5)
    again = sim.simulate(sim.Scenario(**first.summary["scenario"]))
    assert without_clock(again.summary) == without_clock(first.summary)


def test_a_queue_that_grows_is_said_to_have_no_steady_state():
    crowded = SMALL.with_(workload={"workload": "uniform", "rate": 50.0, "num_requests": 300}, max_num_seqs=1)
    warnings = sim.simulate(crowded, cost=FixedCost(0.01)).summary["warnings"]
    assert any(warning.startswith("no steady state") for warning in warnings)
    calm = sim.simulate(crowded, cost=FixedCost(0.01), rate=0.1).summary["warnings"]
    assert not any(warning.startswith("no steady state") for warning in calm)


def test_a_run_knows_the_command_that_repeats_it():
    scenario = sim.Scenario(
        model="llama-3.1-8b", gpu="h100", workload={"workload": "uniform", "num_requests": 2}, slo="ttft=1"
    )
    command = sim.simulate(scenario).provenance["command"]
    assert command.startswith("kvtwin run --model llama-3.1-8b --gpu h100 ")
    assert "--workload uniform" in command
    assert "--slo ttft_p99=1" in command
    assert "command" not in sim.simulate(scenario, watermark=0.1).provenance  # only a file can say that


def test_without_a_workload_there_is_nothing_to_simulate():
    with pytest.raises(ScenarioError, match="no workload"):
        sim.simulate(sim.Scenario(model="llama-3.1-8b", gpu="h100"))


def test_an_unknown_profile_names_what_exists():
    with pytest.raises(ScenarioError, match=r"profile is 'mine'.*roofline"):
        sim.simulate(SMALL, profile="mine")


def test_the_function_is_not_hidden_by_a_module_of_its_name():
    code = (
        "import sim.simulation, sim.scenario, sim; assert callable(sim.simulate); assert sim.Scenario().run.seed == 0"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


UNIFORM = {"workload": "uniform", "num_requests": 30, "rate": 20.0, "input_tokens": 200, "output_tokens": [2, 60]}


def test_samples_and_beams_of_a_scenario():
    """Three sequences a request. Forks compute each prompt once, and beams that go on as copies share more of their output."""

    def block_seconds(**changes):
        result = sim.simulate(SMALL.with_(workload={**UNIFORM, **changes.pop("workload")}, **changes), stepping=False)
        assert result.summary["finished"] == result.summary["num_requests"] == 90
        return sum(result.bill_columns["kv_block_seconds"])

    separate = block_seconds(workload={"n": 3})
    forked = block_seconds(workload={"n": 3}, fork_samples=True)
    beams = [block_seconds(workload={"beam_width": 3, "beam_change": change}) for change in (0.0, 0.05, 0.5)]
    assert separate > forked == beams[0] > beams[1] > beams[2]


def test_beams_are_the_same_whatever_the_engine_and_other_in_another_replication():
    beams = SMALL.with_(workload={**UNIFORM, "beam_width": 3, "beam_change": 0.3})

    def forks(**changes):
        log = []
        sim.simulate(beams, decision_log=log.append, **changes)
        return {tuple(pair) for entry in log for pair in entry.get("forked", ())}

    assert forks() == forks(stepping=True) == forks(num_gpu_blocks_override=4000)
    assert forks() != forks(replication=1)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"policy": "orca", "beam_width": 2},
            "beams share blocks, but .* orca keeps every sequence in one contiguous piece",
        ),
        ({"policy": "orca", "n": 2, "fork_samples": True}, "forked samples share blocks, but .* orca"),
        (
            {"beam_width": 9, "max_num_seqs": 8},
            "9 beams of a request run together, but .* max_num_seqs is 8; .* at least 9",
        ),
    ],
)
def test_what_no_engine_could_fork_is_refused(changes, says):
    with pytest.raises(ScenarioError, match=says):
        sim.simulate(SMALL.with_(workload=UNIFORM), **changes)
