"""A simulated failure, diagnosed from what its own run left behind, and made into a regression scenario that fails and is mended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.cli import main
from experiments.investigator import Cause
from experiments.investigator.regression import fails
from experiments.scenario_text import scenario_text
from sim import Scenario, simulate
from sim.costs.constant import FixedCost
from sim.scenario import ScenarioError
from sim.world.executors import ModelExecutor
from tests.support.refusals import Refusals

LOAD = {
    "workload": "uniform",
    "input_tokens": [500, 1500],
    "output_tokens": [50, 200],
    "num_requests": 40,
    "rate": 20.0,
}
LONG = LOAD | {"input_tokens": 8000}
SLOW = LOAD | {"rate": 0.5, "num_requests": 20}
WIDE = {"max_num_batched_tokens": 8192, "max_num_seqs": 256, "max_model_len": 16384}


def faulty(kind: str, **fields: float) -> dict[str, Any]:
    return {"run": {"faults": [{"kind": kind, **fields}]}}


FAILURES: dict[str, tuple[dict[str, Any], str, str, str]] = {
    # What is simulated, and the category, a word of the cause and the phase that must be found. The account leaves 7.8 GiB for steps.
    "KV capacity": (
        {"workload": LOAD, "engine": {"num_gpu_blocks_override": 500, "max_num_seqs": 64}}, "KV capacity", "preemption", "decode",
    ),
    "another process": (
        {"workload": LOAD, **faulty("other_process", at_s=1.0, gib=7.8)}, "another process", "", "prefill sampling",
    ),
    "non-torch growth": (
        {"workload": LOAD, **faulty("non_torch", at_s=0.5, gib=2.6, every_s=0.5)}, "non-torch growth", "", "prefill sampling",
    ),
    "non-torch memory from the start": (
        {"workload": LOAD, **faulty("non_torch", gib=8.0)}, "non-torch growth", "", "prefill sampling",
    ),
    "a leak from the start": (
        {"workload": LOAD, **faulty("leak", gib=8.0)}, "leak", "", "prefill sampling after release",
    ),
    "fragmentation": (
        {"workload": LOAD, **faulty("fragmentation", at_s=1.0, gib=7.8)}, "fragmentation", "", "prefill sampling",
    ),
    "pending frees": (
        {"workload": LOAD, **faulty("pending_frees", at_s=1.0, gib=7.8)}, "pending frees", "", "prefill sampling",
    ),
    "CUDA graphs": (
        {"workload": LOAD, **faulty("cuda_graphs", at_s=1.0, gib=7.8)}, "CUDA graphs", "", "prefill sampling",
    ),
    "leak": (
        {"workload": SLOW, **faulty("leak", at_s=1.0, gib=0.15, every_s=1.0)}, "leak", "", "after release",
    ),
    "cached by the allocator": (
        {"workload": LOAD, **faulty("cached", at_s=0.5, gib=2.6, every_s=1.0)}, "reserved by the allocator only", "", "after release",
    ),
    "prompt log-probabilities": (
        {
            "workload": LONG,
            "engine": WIDE | {"max_num_batched_tokens": 16384},
            **faulty("prompt_logprobs", at_s=0.5),
        },
        "transient peak", "prompt log-probabilities", "sampling",
    ),
    "kernel fallback": (
        {"workload": LONG, "engine": WIDE, **faulty("kernel_fallback")}, "kernel fallback", "attention scores", "prefill",
    ),
    "verification of drafts": (
        {
            "workload": LOAD | {"input_tokens": 20, "output_tokens": 300, "num_requests": 500, "rate": 5000.0},
            "engine": {"num_speculative_tokens": 7, "max_num_seqs": 512, "gpu_memory_utilization": 0.97},
        },
        "transient peak", "sampler", "sampling",
    ),
    "pool beyond the budget": (
        {
            "workload": LOAD | {"input_tokens": 1000, "num_requests": 200, "rate": 1e6},
            "engine": {"num_gpu_blocks_override": 31_900, "max_num_batched_tokens": 8192, "max_num_seqs": 256},
        },
        "budget too high", "pool ordered beyond it", "prefill sampling",
    ),
}  # fmt: skip


def failure(name: str) -> Scenario:
    return Scenario(model="llama-3.1-8b", gpu="h100-sxm-80gb", **FAILURES[name][0])


@pytest.fixture(scope="module")
def left_behind(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """For each failure, the files of its run that a diagnosis reads."""
    found = {}
    for name in FAILURES:
        folder = tmp_path_factory.mktemp("run")
        simulate(failure(name)).save(folder)
        files = (folder / file for file in ("oom.log", "oom_snapshot.pickle", "memory.csv", "requests.csv"))
        found[name] = [str(file) for file in files if file.exists()]
    return found


def diagnosed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code = main(["diagnose", *arguments, "--model", "llama-3.1-8b", "--gpu", "h100-sxm-80gb", "--json"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    document: dict[str, Any] = json.loads(captured.out)
    return document


@pytest.mark.parametrize("name", FAILURES)
def test_a_simulated_failure_is_diagnosed_right(
    name: str, left_behind: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    _, cause, word, phases = FAILURES[name]
    document = diagnosed(capsys, *left_behind[name])
    assert document["category"] == cause, document["evidence"]
    assert word in document["cause"]
    assert document["phase"] in phases
    assert document["confidence"] >= 0.5


ALONE = {
    # What one file says by itself. A log cannot tell memory in pieces from memory that waits for a stream, and says so.
    "oom.log": {
        name for name in FAILURES
        if name not in ("KV capacity", "leak", "a leak from the start", "cached by the allocator", "pending frees")
    },
    "memory.csv": {name for name in FAILURES if name not in ("pool beyond the budget", "pending frees")},
}  # fmt: skip


@pytest.mark.parametrize("file", ALONE)
@pytest.mark.parametrize("name", FAILURES)
def test_one_file_alone_says_it_too(
    file: str, name: str, left_behind: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    files = [path for path in left_behind[name] if path.endswith(file)]
    if name in ALONE[file]:
        assert diagnosed(capsys, *files)["category"] == FAILURES[name][1]
    elif name == "pending frees":
        document = diagnosed(capsys, *files)
        assert document["category"] == "fragmentation"
        if file == "oom.log":
            assert any(sentence.startswith("pending frees: less likely") for sentence in document["ruled_out"])
            assert any("snapshot" in sentence for sentence in document["next_to_record"])


@pytest.mark.parametrize("name", ["another process", "a leak from the start"])
def test_requests_that_failed_for_step_memory_are_not_put_down_to_the_kv_pool(
    name: str, left_behind: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    (requests,) = (path for path in left_behind[name] if path.endswith("requests.csv"))
    document = diagnosed(capsys, requests)
    assert document["category"] == "transient peak"
    assert any("memory curve" in sentence for sentence in document["next_to_record"])


def test_a_folder_of_results_and_all_of_its_files_say_the_same(
    left_behind: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(left_behind["fragmentation"][0]).parent
    whole = diagnosed(capsys, str(folder))
    every = diagnosed(capsys, *(str(path) for path in sorted(folder.iterdir())))
    assert whole["category"] == every["category"] == "fragmentation"
    assert {sentence.split(" ")[0].rpartition("/")[2] for sentence in every["notes"]} == {
        "bill.csv", "marks.csv", "report.html", "summary.json",
    }  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
def test_its_regression_scenario_fails_and_does_not_with_the_fix(
    name: str, left_behind: dict[str, list[str]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = tmp_path / "regression.toml"
    diagnosed(capsys, *left_behind[name], "--scenario-out", str(target))
    assert fails(Scenario.load(target))
    assert not fails(Scenario.load(tmp_path / "regression.fixed.toml"))
    assert "# It fails. The fix: " in target.read_text()


def test_what_no_run_can_show_is_refused_and_nothing_is_written(refused: Refusals, tmp_path: Path) -> None:
    log, target = tmp_path / "kernel.log", tmp_path / "regression.toml"
    log.write_text(
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 180224, Hardware limit: 101376"
    )
    arguments = [str(log), "--scenario-out", str(target), "--model", "llama-3.1-8b", "--gpu", "h100-sxm-80gb"]
    refused(["diagnose", *arguments], "nothing that a run of the simulator can show")
    assert not target.exists()


# -- while the engine starts ---------------------------------------------------------------------------------------------

STARTS: dict[str, tuple[list[dict[str, Any]], str, str, str]] = {
    # The faults, and the category, a word of the cause and the phase that must be found.
    "copies while loading": ([{"kind": "loading", "gib": 66.0}], "weights", "", "loading"),
    "an encoder's profile": ([{"kind": "encoder", "gib": 70.0}], "transient peak", "encoder", "profiling"),
    "graphs beyond the estimate": ([{"kind": "graph_capture", "gib": 8.5}], "CUDA graphs", "", "graph capture"),
    "the sampler's warm-up": (
        [{"kind": "sampler_warm_up"}, {"kind": "non_torch", "gib": 6.5}], "transient peak", "float32", "sampler warm-up",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STARTS)
def test_a_start_that_fails_leaves_a_log_that_is_diagnosed_right_and_made_into_a_regression_scenario(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    faults, cause, word, phase = STARTS[name]
    scenario = Scenario(
        model="llama-3.1-8b", gpu="h100-sxm-80gb", workload=LOAD | {"num_requests": 3}, run={"faults": faults}
    )
    file = tmp_path / "start.toml"
    tables = scenario.resolved()
    file.write_text(scenario_text({name: tables[name] for name in tables if name != "slo"}))
    assert main(["run", str(file), "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr()
    assert (
        said.out == ""
        and said.err.startswith("kvtwin run: the engine does not start: in ")
        and said.err.count("\n") == 1
    )
    target = tmp_path / "regression.toml"
    document = diagnosed(capsys, str(tmp_path / "out" / "oom.log"), "--scenario-out", str(target))
    assert (document["category"], document["phase"]) == (cause, phase), document["evidence"]
    assert word in document["cause"]
    assert fails(Scenario.load(target))
    assert not fails(Scenario.load(tmp_path / "regression.fixed.toml"))


def test_every_cause_that_a_verdict_can_name_of_memory_is_provoked_here() -> None:
    """KV that is copied or given back late, a scheduler that blocks, kernels and the host are no failures of a simulated GPU."""
    provoked = {cause for _, cause, _, _ in (*FAILURES.values(), *STARTS.values())} | {"double release"}
    elsewhere = {
        Cause.KV_DUPLICATION, Cause.LATE_RELEASE, Cause.BLOCK_USE, Cause.RESERVATION, Cause.BLOCKED, Cause.KERNEL_LIMIT,
        Cause.HOST_MEMORY, Cause.UNKNOWN,
    }  # fmt: skip
    assert provoked == {str(cause) for cause in Cause if cause not in elsewhere}


def test_a_start_with_less_than_there_is_room_for_starts() -> None:
    fine = [
        {"kind": "loading", "gib": 60.0},
        {"kind": "encoder", "gib": 60.0},
        {"kind": "graph_capture", "gib": 1.0},
        {"kind": "sampler_warm_up"},
    ]
    scenario = Scenario(
        model="llama-3.1-8b", gpu="h100-sxm-80gb", workload=LOAD | {"num_requests": 3}, run={"faults": fine}
    )
    assert simulate(scenario).summary["finished"] == 3


def test_weights_that_fit_nowhere_on_one_gpu_are_named_and_fixed_by_more_of_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["run", "--model", "llama-3.1-70b", "--gpu", "h100-sxm-80gb", "--workload", "azure-conv"]) == 2
    (tmp_path / "stderr.txt").write_text(capsys.readouterr().err)
    target = tmp_path / "regression.toml"
    arguments = ["diagnose", str(tmp_path / "stderr.txt"), "--model", "llama-3.1-70b", "--gpu", "h100-sxm-80gb"]
    assert main([*arguments, "--scenario-out", str(target), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["category"] == "weights"
    assert fails(Scenario.load(target))
    fixed = Scenario.load(tmp_path / "regression.fixed.toml")
    assert not fails(fixed)
    assert fixed.resolved()["engine"]["tensor_parallel_size"] == 4


def test_a_regression_scenario_needs_the_model(
    left_behind: dict[str, list[str]], refused: Refusals, tmp_path: Path
) -> None:
    message = tmp_path / "oom.txt"
    message.write_text(
        "CUDA out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total capacity of 79.19 GiB of which 1.00 GiB is free. "
        "Process 77 has 30.00 GiB memory in use. Including non-PyTorch memory, this process has 48.19 GiB memory in use. Of the "
        "allocated memory 47.50 GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated."
    )
    refused(["diagnose", message, "--scenario-out", tmp_path / "regression.toml"], "give --model and --gpu")


def test_a_healthy_run_has_no_cause(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    result = simulate(Scenario(model="llama-3.1-8b", gpu="h100-sxm-80gb", workload=LOAD))
    result.save(tmp_path)
    assert result.oom_log == ""
    assert not (tmp_path / "oom.log").exists()
    document = diagnosed(capsys, str(tmp_path / "memory.csv"), str(tmp_path / "requests.csv"))
    assert document["category"] == "cannot tell from this"
    assert any("KV duplication" in sentence and "ratio 1.0" in sentence for sentence in document["ruled_out"])


def test_a_double_release_is_caught_by_the_pool_and_named_by_the_diagnosis(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    scenario = tmp_path / "twice.toml"
    scenario.write_text(
        '[model]\nmodel = "llama-3.1-8b"\n[gpu]\ngpu = "h100-sxm-80gb"\n[workload]\nworkload = "uniform"\nnum_requests = 5\n'
        'input_tokens = 100\noutput_tokens = 10\nrate = 10.0\n[run]\nfaults = [{ kind = "double_release", at_s = 0.2 }]\n'
    )
    assert main(["run", str(scenario)]) == 1
    said = capsys.readouterr().err
    assert "is released twice: first by an injected fault" in said
    (tmp_path / "stderr.txt").write_text(said)
    target = tmp_path / "regression.toml"
    document = diagnosed(capsys, str(tmp_path / "stderr.txt"), "--scenario-out", str(target))
    assert (document["category"], document["phase"]) == ("double release", "after release")
    assert fails(Scenario.load(target))
    assert not fails(Scenario.load(tmp_path / "regression.fixed.toml"))


def test_weights_that_do_not_fit_are_refused_before_anything_runs(refused: Refusals) -> None:
    flags = ("--model", "llama-3.1-70b", "--gpu", "h100-sxm-80gb", "--workload", "azure-conv")
    refused(["run", *flags], "no memory is left for KV blocks")


# -- what a run says of its memory ---------------------------------------------------------------------------------------


def test_the_summary_has_the_tightest_moments_and_failures_by_line() -> None:
    summary = simulate(failure("prompt log-probabilities")).summary
    assert summary["min_headroom_bytes"] < 0
    assert sum(summary["oom_by_line"].values()) == summary["oom_events"] > 0
    assert set(summary["oom_by_line"]) == {"prompt_logprobs: fp32 log-softmax"}
    # 16,384 prompt tokens in a step: bf16 logits and their fp32 log-softmax, 6 B x 128,256 words each.
    assert summary["peak_workspace_bytes"] == pytest.approx(16384 * 128_256 * 6, rel=0.001)


def test_the_curve_adds_up_line_by_line() -> None:
    memory = simulate(failure("another process")).memory
    device_bytes = memory["total_bytes"][0]
    left = memory["headroom_bytes"] + memory["workspace_bytes"]
    held = memory["tensors_bytes"] + memory["kv_used_bytes"] + memory["kv_free_bytes"]
    whole = held + memory["non_torch_bytes"] + memory["other_processes_bytes"] + left
    # A row's least headroom and largest need may be those of two steps; where nothing runs there is one moment.
    assert (whole[memory["phase"] == "idle"] == device_bytes).all()
    assert (memory["allocated_bytes"] == memory["tensors_bytes"] + memory["kv_used_bytes"]).all()


def test_a_pool_of_more_blocks_than_the_gpu_has_stays_a_what_if_unless_a_limit_is_asked_for() -> None:
    endless = Scenario(
        model="llama-3.1-8b", gpu="h100-sxm-80gb", engine={"num_gpu_blocks_override": 10**6}, workload=LOAD
    )
    assert simulate(endless).summary["oom_events"] == 0
    assert simulate(endless.with_(memory_limit=True)).summary["oom_events"] > 0


def test_faults_are_for_simulated_devices_only() -> None:
    scenario = failure("another process").with_(num_requests=1)
    with pytest.raises(ScenarioError, match="injected into a simulated device"):
        simulate(scenario, executor=lambda core: ModelExecutor(FixedCost(0.01)))
