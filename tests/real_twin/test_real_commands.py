"""`kvtwin run --executor torch` and `kvtwin validate`, as a user types them."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

import sim
from experiments import validate as command
from experiments.cli import main
from experiments.real_run import run_scenario
from experiments.validation import SCENARIOS, Cell
from experiments.validation.cell import account_errors
from sim.resolve import resolve
from sim.scenario_errors import ScenarioError

REAL = ["run", "--executor", "torch", "--model", "tiny-llama-test", "--workload", "uniform", "--rate", "60"]


UNDER_PRESSURE = """
[model]
model = "tiny-llama-test"

[engine]
num_gpu_blocks_override = 160
max_model_len = 512

[workload]
workload = "uniform"
num_requests = 200
rate = 60.0
cancel_rate = 0.05
cancel_age_mean_s = 2.0
input_tokens = [16, 200]
output_tokens = [8, 80]

[run]
executor = "torch"
device = "cpu"
"""


@pytest.mark.slow
def test_two_hundred_requests_run_for_real_under_pressure(tmp_path, capsys):
    """The answer to every request, and every block back, in well under two minutes."""
    scenario, out = tmp_path / "real.toml", tmp_path / "out"
    scenario.write_text(UNDER_PRESSURE, encoding="utf-8")
    code = main(["run", str(scenario), "--out", str(out), "--json"])
    summary = json.loads(capsys.readouterr().out)
    assert code == 0
    assert summary["finished"] + summary["aborted"] == 200
    assert summary["finished"] > 150
    assert summary["num_preemptions"] > 0
    assert summary["oom_events"] == 0
    assert summary["kv_blocks_at_end"]["owned"] == 0
    assert summary["wall_time_s"] < 120
    (executor,) = summary["executors"]
    assert executor["blocks"] == {"allocated": 0, "quarantined": 0, "free": 160}
    assert executor["fallbacks"] == []
    assert executor["sampled_tokens"] >= summary["output_tokens"]
    written = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert written["scenario"]["run"]["device"] == "cpu"


def test_the_same_seed_gives_the_same_answers_in_other_times(capsys):
    """What is measured differs from run to run; what is computed does not."""
    flags = [*REAL, "--num-requests", "6", "--num-gpu-blocks-override", "200", "--check", "--json"]
    first, second = ({}, {})
    for summary in (first, second):
        assert main(flags) == 0
        summary.update(json.loads(capsys.readouterr().out))
    assert first["output_tokens"] == second["output_tokens"]
    assert first["e2el_s"] != second["e2el_s"]


def test_a_scenario_in_python_runs_for_real():
    scenario = sim.Scenario(
        model="tiny-llama-test",
        workload={"workload": "uniform", "num_requests": 4, "rate": 60.0},
        engine={"num_gpu_blocks_override": 200, "max_model_len": 2048},
        run={"executor": "torch"},
    )
    result = run_scenario(scenario)
    assert result.summary["finished"] == 4
    assert result.provenance["profile"] == "measured"
    assert result.provenance["gpu"] == "cpu"


def test_the_simulator_does_not_pretend_to_run_for_real():
    scenario = sim.Scenario(
        model="tiny-llama-test", workload={"workload": "uniform", "num_requests": 4}, run={"executor": "torch"}
    )
    with pytest.raises(ScenarioError, match=r"sim\.simulate only simulates.*experiments\.real_run\.run_scenario"):
        sim.simulate(scenario)


def test_the_kv_cache_of_a_run_on_the_cpu_is_bounded():
    scenario = sim.Scenario(
        model="llama-3.2-1b",
        gpu="h100-sxm-80gb",
        engine={"max_model_len": 4096},
        workload={"workload": "uniform", "num_requests": 4},
        run={"executor": "torch"},
    )
    resolved = scenario.resolved()
    assert resolved["engine"]["kv_cache_memory_bytes"] == 256 << 20
    told = " ".join(resolve(scenario).warnings)
    assert "memory is accounted for as on h100-sxm-80gb, but the steps are run and timed on the CPU" in told
    assert resolved["run"]["device"] == "cpu"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "granite-3.1-8b", "--max-model-len", "512"], ["granite-3.1-8b cannot be run for real", "llama"]),
        (["--model", "deepseek-v3"], ["deepseek-v3 cannot be run for real", "its architecture is deepseek_v3"]),
        (["--model", "tiny-llama-test", "--quantization", "fp8"], ["quantization is 'fp8'", "plain weights"]),
        (["--model", "tiny-llama-test", "--kv-cache-dtype", "nvfp4"], ["nvfp4", "no real pool"]),
    ],
)
def test_what_cannot_be_run_for_real_is_bad_input(flags, words, capsys):
    code = main(["run", "--executor", "torch", "--workload", "uniform", "--num-requests", "2", *flags])
    message = capsys.readouterr().err
    assert code == 2
    assert all(word in message for word in words), message
    assert "Traceback" not in message


@pytest.mark.parametrize("line", [REAL, ["calibrate", "measure", "--device", "cpu"]])
def test_weights_that_this_machine_cannot_hold_are_refused_before_they_are_made(line, tmp_path, monkeypatch, capsys):
    """tiny-llama-test has 106,816 parameters of four bytes, 427,264 B; one byte less is free."""
    monkeypatch.setattr("gpu.run_room.available_bytes", lambda: 427_263)
    monkeypatch.setattr("gpu.weights.DecoderWeights.random", lambda *given, **settings: pytest.fail("they were made"))
    assert main([*line, "--out", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert "tiny-llama-test needs 417.25 KiB (weights in float32 417.25 KiB)" in message
    assert "but this machine has 417.25 KiB free; take a smaller model" in message


def test_a_pool_that_this_machine_cannot_hold_is_refused_before_it_is_taken(monkeypatch, capsys):
    monkeypatch.setattr("gpu.run_room.available_bytes", lambda: 1 << 30)
    monkeypatch.setattr(
        "gpu.weights.DecoderWeights.random", lambda *given, **settings: pytest.fail("weights were made")
    )
    assert main([*REAL, "--num-requests", "2", "--num-gpu-blocks-override", "1000000", "--max-model-len", "2048"]) == 2
    # a block is 16 tokens of 2 layers, 2 heads, 16 numbers of 4 bytes, for K and for V
    pool = f"KV pool {1_000_001 * 16 * 2 * 2 * 16 * 4 * 2 / 2**30:.2f} GiB"
    message = capsys.readouterr().err
    assert pool in message
    assert "but this machine has 1.00 GiB free; lower num_gpu_blocks_override" in message


@pytest.mark.parametrize(
    "line",
    [
        ["validate", "--out"],
        ["calibrate", "measure", "--out"],
        [*REAL, "--out"],
    ],
)
def test_results_that_have_nowhere_to_go_are_found_out_before_the_run(line, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "check_cell", lambda *arguments: pytest.fail("it ran first"))
    taken = tmp_path / "taken"
    taken.write_text("notes", encoding="utf-8")
    assert main([*line, str(taken)]) == 2
    assert f"{taken}: is a file; a folder is needed" in capsys.readouterr().err
    assert taken.read_text(encoding="utf-8") == "notes"


def test_a_hard_limit_on_the_cpu_ends_the_run_s_requests_and_not_the_run(tmp_path, capsys):
    """Steps that do not fit are answered by the core; what does not fit before the first step is bad input."""
    scenario = tmp_path / "limited.toml"
    text = UNDER_PRESSURE.replace("num_requests = 200", "num_requests = 8")
    scenario.write_text(text, encoding="utf-8")
    assert main(["run", str(scenario), "--json"]) == 0
    taken = json.loads(capsys.readouterr().out)["executors"][0]["bytes"]
    text = text.replace('device = "cpu"', "device_limit_bytes = {}")
    constants = 512 * 16 * 4 + 4  # rotations of every position, and what the scales of the pool are counted as besides
    kept = taken["weights"] + taken["kv_cache"] + taken["buffers"] + constants
    scenario.write_text(text.format(kept + 80_000), encoding="utf-8")
    for flags in ([], ["--check"]):
        assert main(["run", str(scenario), "--json", *flags]) == 0
        summary = json.loads(capsys.readouterr().out)
        assert summary["finished"] + summary["aborted"] + summary["failed"] == 8
        assert summary["finished"] > 0
        assert summary["failed"] > 0
        device = summary["executors"][0]
        assert device["oom_steps"] > 0
        assert 80_000 - 512 < device["bytes"]["workspace"] <= 80_000 + 512
        assert (device["blocks"]["allocated"], device["blocks"]["quarantined"]) == (0, 0)
    scenario.write_text(text.format(kept - 1000), encoding="utf-8")
    assert main(["run", str(scenario)]) == 2
    assert "do not fit cpu" in capsys.readouterr().err
    least = taken["weights"] + taken["kv_cache"]  # nothing is left for the buffers
    scenario.write_text(text.format(least), encoding="utf-8")
    assert main(["run", str(scenario)]) == 2
    message = capsys.readouterr().err
    assert f"device_limit_bytes is {least:,}, but before its first step tiny-llama-test takes" in message
    pool = (
        161 * 16 * 2 * 2 * 16 * 4 * 2
    )  # 160 blocks and NO_BLOCK: 16 tokens, 2 layers, 2 heads, 16 numbers of 4 bytes, K and V
    assert f"weights {taken['weights']:,}, KV pool {pool:,}, buffers " in message


def test_a_step_may_be_computed_in_several_passes(tmp_path, capsys):
    scenario = tmp_path / "split.toml"
    text = UNDER_PRESSURE.replace("num_requests = 200", "num_requests = 12")
    answers = []
    for line in ("", "micro_batch_tokens = 48\n"):
        scenario.write_text(text + line, encoding="utf-8")
        assert main(["run", str(scenario), "--json"]) == 0
        summary = json.loads(capsys.readouterr().out)
        answers.append((summary["output_tokens"], summary["executors"][0]["split_steps"] > 0))
    assert answers == [(answers[0][0], False), (answers[0][0], True)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "executor = 'torch'\ndevice = 'cuda'\ndevice_limit_bytes = 5",
            ["device_limit_bytes limits the CPU", "'cuda'"],
        ),
        ("micro_batch_tokens = 5", ["micro_batch_tokens is for executor torch", "executor model"]),
        ("device_limit_bytes = 5", ["device_limit_bytes is for executor torch"]),
    ],
)
def test_keys_of_a_device_need_that_device(line, words, tmp_path, capsys):
    scenario = tmp_path / "wrong.toml"
    scenario.write_text(f"[run]\n{line}\n", encoding="utf-8")
    assert main(["run", str(scenario)]) == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words), message


# -- validate --------------------------------------------------------------------------------------------------------------


def test_validate_says_that_the_worlds_agree(tmp_path, capsys):
    flags = ["--scenario", "pressure-0", "--scenario", "swaps-0", "--preset", "vllm-v1", "--preset", "ladder"]
    code = main(["validate", "--device", "cpu", *flags, "--out", str(tmp_path), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert code == 0
    assert document["ok"]
    assert [(cell["scenario"], cell["preset"]) for cell in document["cells"]] == [
        ("pressure-0", "vllm-v1"),
        ("pressure-0", "ladder"),
        ("swaps-0", "vllm-v1"),
        ("swaps-0", "ladder"),
    ]
    for cell in document["cells"]:
        assert cell["device"] == "cpu"
        assert cell["decisions_equal"] and cell["tokens_equal"]
        assert (cell["leaked_blocks"], cell["fallbacks"], cell["error"]) == (0, 0, None)
    suite = ElementTree.parse(tmp_path / "validate.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("4", "0")
    assert "All 4 cells agree" in (tmp_path / "validate.html").read_text(encoding="utf-8")
    assert document == json.loads((tmp_path / "validate.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"decisions_equal": False},
        {"tokens_equal": False},
        {"leaked_blocks": 1},
        {"fallbacks": 2},
        {"error": "PoisonedReadError: r1 reads block 3 <at> step 5 \x00"},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_validate_fails_on_any_difference(wrong, tmp_path, monkeypatch, capsys):
    def cell(scenario, name, device, reference):
        well = {"decisions_equal": True, "tokens_equal": True, "leaked_blocks": 0, "fallbacks": 0, "error": None}
        return Cell(scenario=scenario.name, preset=name, device=device, **{**well, **wrong})

    monkeypatch.setattr(command, "check_cell", cell)
    monkeypatch.setattr(command, "reference_answers", lambda scenario, device: {})
    junit, page = tmp_path / "junit.xml", tmp_path / "page.html"
    flags = ["--scenario", "chunks-0", "--preset", "orca", "--junit", str(junit), "--html", str(page)]
    assert main(["validate", *flags]) == 1
    assert "0 of 1 cells agree" in capsys.readouterr().out
    suite = ElementTree.parse(junit).getroot()
    assert suite.get("failures") == "1"
    assert suite.find("testcase/failure") is not None
    assert "1 of 1 cells differ" in page.read_text(encoding="utf-8")


def test_what_validate_knows_is_written_down_while_it_goes_on(tmp_path, monkeypatch):
    """Broken off in its second scenario, as by a time limit: the first scenario's cells are there, and no verdict of all."""

    class BrokenOff(Exception):
        pass

    def cell(scenario, name, device, reference):
        if scenario.name == "swaps-0":
            raise BrokenOff
        well = {"decisions_equal": True, "tokens_equal": True, "leaked_blocks": 0, "fallbacks": 0, "error": None}
        return Cell(scenario=scenario.name, preset=name, device=device, **well)

    monkeypatch.setattr(command, "check_cell", cell)
    monkeypatch.setattr(command, "reference_answers", lambda scenario, device: {})
    with pytest.raises(BrokenOff):
        command.validate(scenarios=["chunks-0", "swaps-0"], presets=["orca", "vllm-v1"], out=tmp_path)
    found = json.loads((tmp_path / "validate.json").read_text(encoding="utf-8"))
    assert [(each["scenario"], each["preset"]) for each in found["cells"]] == [
        ("chunks-0", "orca"),
        ("chunks-0", "vllm-v1"),
    ]
    assert not found["ok"]


def test_an_account_that_is_off_by_more_than_its_tolerance_fails_the_cell():
    """tiny-llama: 427,264 B of float32 weights; 15 blocks of 4 tokens of 512 B, and 16 B of scales."""
    scenario = SCENARIOS["pressure-0"]
    tokens = (scenario.engine.num_gpu_blocks + 1) * 4
    assert account_errors(scenario, {"weights": 427_264, "kv_cache": tokens * 512 + 16}) == []
    (weights,) = account_errors(scenario, {"weights": 427_268, "kv_cache": tokens * 512})
    assert weights.startswith("the account of weights is 427,264 B and the device took 427,268 B, +0.00%")
    (pool,) = account_errors(scenario, {"weights": 427_264, "kv_cache": tokens * 520})
    assert "kv_cache" in pool
    assert "+1.56% (allowed: 0.10%)" in pool


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--scenario", "presure-0"], ["--scenario is 'presure-0'", "nearest is pressure-0"]),
        (["--preset", "vllm-v7"], ["--preset is 'vllm-v7'", "vllm-v1"]),
        (["--device", "tpu"], ["device is 'tpu'", "cuda:N"]),
    ],
)
def test_validate_refuses_what_it_does_not_know(flags, words, capsys):
    assert main(["validate", *flags]) == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words), message


@pytest.mark.gpu
@pytest.mark.slow
def test_validate_is_green_on_a_gpu(cuda_device, tmp_path):
    assert main(["validate", "--device", cuda_device, "--out", str(tmp_path)]) == 0


@pytest.mark.gpu
def test_a_real_run_on_a_gpu_leaves_nothing_behind(cuda_device, capsys):
    flags = [
        "--device",
        cuda_device,
        "--gpu",
        "h100-sxm-80gb",
        "--num-requests",
        "200",
        "--num-gpu-blocks-override",
        "500",
    ]
    assert main([*REAL, *flags, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    (executor,) = summary["executors"]
    assert executor["blocks"] == {"allocated": 0, "quarantined": 0, "free": 500}
    assert executor["fallbacks"] == []
