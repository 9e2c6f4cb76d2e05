"""Memory lines that were measured feed the account: measured on the CPU device, fitted, and found again under limits that were not."""

import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from calibration.measuring.design import DesignPoint, Share
from calibration.measuring.measure import make_rig
from calibration.measuring.settings import MeasureSettings
from experiments.cli import main
from sim.catalog.gpus import GIB
from sim.catalog.models import model_shape
from sim.core.batch_shape import BatchShape
from sim.core.config import ConfigError
from sim.costs.fitted import FOLDER
from sim.memory import build_ledger
from sim.memory.measured import MeasuredLine, MeasuredMemory, step_features, widest_step
from sim.memory.measured_file import read_measured
from sim.resolve import resolve
from sim.scenario import Scenario
from tests.support.refusals import Refusals

MODEL = "tiny-llama-test"
MEASURED = MeasureSettings(
    model=MODEL, max_num_batched_tokens=256, max_num_seqs=32, max_model_len=512, clock="thread"
)  # fmt: skip
OTHER = {"max_num_batched_tokens": 160, "max_num_seqs": 12, "max_model_len": 400}
"""Limits that were not measured, within those that were."""
LOAD = """[workload]
workload = "uniform"
num_requests = 30
rate = 1000.0
input_tokens = [16, 300]
output_tokens = [8, 90]
"""


# ── by hand ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def lines_of_a_gpu(**changes: object) -> MeasuredMemory:
    """Made-up lines of Llama-3.1-8B on an H100: a step takes 1 MiB and 1 KiB a token, buffers 2 KiB a sequence."""
    shape = model_shape("llama-3.1-8b")
    memory = {
        "schema_version": 1,
        "engine": "kvtwin executor 9, torch 9, triton 9",
        "limits": {"max_num_batched_tokens": 8192, "max_num_seqs": 256, "max_model_len": 8192},
        "lines": {
            "weights": {"bytes": 16 * GIB, "low_bytes": 16 * GIB, "high_bytes": 16 * GIB, "how": "by hand"},
            "non_torch": {"bytes": GIB, "low_bytes": None, "high_bytes": None, "how": "by hand"},
            "cuda_graphs": {"bytes": GIB // 2, "low_bytes": None, "high_bytes": None, "how": "by hand"},
        },
        "workspace_phases": [phase("workspace", constant_bytes=2**20, per_token_bytes=1024)],
        "workspace_interval": [-0.1, 0.2],
        "buffers_phases": [phase("limits", per_seq_bytes=2048)],
        "buffers_error": 0.0,
        "reserved_phases": [phase("limits", constant_bytes=2**20, per_token_bytes=2048)],
        "reserved_error": 0.0,
    }
    document = {
        "name": "by.hand", "gpu": "h100-sxm-80gb", "model": "llama-3.1-8b", "dtype": "bfloat16", "kv_cache_dtype": "bfloat16",
        "model_sizes": {
            "num_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256,
            "attention": [{key: getattr(kind, key) for key in type(kind).__dataclass_fields__} for kind in shape.attention],
        },
        "memory": {**memory, **changes},
    }  # fmt: skip
    measured, unusable = read_measured(document, "by hand")
    assert unusable is None
    assert measured is not None
    return measured


def phase(kind: str, **terms: float) -> dict[str, float]:
    names = {
        "workspace": ("constant", "per_token", "per_row", "per_decode", "per_position", "per_score"),
        "limits": ("constant", "per_token", "per_seq", "per_table_entry", "per_position"),
    }[kind]
    return {f"{name}_bytes": terms.get(f"{name}_bytes", 0.0) for name in names}


ON_H100 = {
    "model": "llama-3.1-8b", "gpu": "h100-sxm-80gb", "gpu_memory_utilization": 0.9, "max_model_len": 8192, "max_num_seqs": 128,
    "max_num_batched_tokens": 4096,
}  # fmt: skip


def test_the_pool_is_what_measured_lines_leave_of_the_budget() -> None:
    ledger = build_ledger(**ON_H100, measured=lines_of_a_gpu())
    lines = {line.name: line.bytes for line in ledger.lines}
    assert lines["weights"] == 16 * GIB
    assert lines["non_torch"] == GIB
    assert lines["peak_activation"] == 2**20 + 4096 * 1024
    assert lines["kernel_workspaces"] == 4096 * 1024, "reserved: 2 KiB a token, half of it used by the widest step"
    assert lines["input_buffers"] == 128 * 2048
    # 1, 2, 4 and every 8th up to 256 are 35 graphs; up to 128 sequences they are 19.
    assert lines["cuda_graphs"] == round(GIB // 2 * 19 / 35)
    budget = ledger.budget_bytes
    inside = sum(lines[name] for name in ("weights", "non_torch", "peak_activation", "cuda_graphs"))
    assert ledger.num_gpu_blocks == (budget - inside) // (16 * 131072)
    assert sum(lines.values()) == ledger.total_bytes


def test_each_line_says_where_it_comes_from_and_how_far_it_may_be_off() -> None:
    ledger = build_ledger(**ON_H100, measured=lines_of_a_gpu())
    peak, rest = ledger.line("peak_activation"), ledger.line("non_torch")
    assert (peak.low_bytes, peak.high_bytes) == (round(0.9 * peak.bytes), round(1.2 * peak.bytes))
    assert "profile by.hand" in peak.origin
    assert (rest.low_bytes, rest.high_bytes) == (None, None)
    assert "one reading" in rest.origin
    assert ledger.line("kv_pool").origin == ""
    assert any("lines were measured" in text for text in ledger.warnings)


def test_a_limit_beyond_the_measured_range_is_said_with_both_numbers() -> None:
    beyond = build_ledger(**{**ON_H100, "max_num_seqs": 512}, measured=lines_of_a_gpu())
    assert any("max_num_seqs 512 (measured up to 256)" in text for text in beyond.warnings)
    inside = build_ledger(**ON_H100, measured=lines_of_a_gpu())
    assert not any("beyond their range" in text for text in inside.warnings)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "qwen3-8b"}, "model llama-3.1-8b, not qwen3-8b"),
        ({"gpu": "h200-sxm-141gb"}, "device h100-sxm-80gb, not h200-sxm-141gb"),
        ({"tensor_parallel_size": 2}, "ranks 1, not 2"),
        ({"kv_cache_dtype": "fp8"}, "KV cache bfloat16, not fp8"),
        ({"quantization": "fp8"}, "weights plain, not fp8"),
        ({"engine_version": "sglang 0.4.1"}, "a budget that is not sglang's"),
        ({"max_loras": 2}, "nothing with LoRA adapters"),
    ],
)
def test_lines_of_something_else_are_left_out_and_it_is_said(changes: dict[str, object], words: str) -> None:
    counted = build_ledger(**{**ON_H100, **changes})
    ledger = build_ledger(**{**ON_H100, **changes}, measured=lines_of_a_gpu())
    assert ledger.lines == counted.lines
    assert ledger.measured is None
    assert any("left out of the account" in text and words in text for text in ledger.warnings), ledger.warnings


def test_the_widest_step_uses_all_that_the_limits_allow() -> None:
    settings = build_ledger(**ON_H100).settings
    step = widest_step(settings)
    assert (step.num_tokens, step.sampled_seqs, step.decode_seqs) == (4096, 128, 127)
    assert step.prefill == ((3969, 8192 - 3969),)
    assert step.decode_max_context_tokens == 8192
    many = widest_step(replace(settings, max_model_len=1024))
    assert many.num_tokens == 4096
    assert len(many.prefill) + many.decode_seqs == 128
    assert all(tokens + context == 1024 for tokens, context in many.prefill)
    alone = widest_step(replace(settings, max_num_seqs=1, max_model_len=4096))
    assert alone == BatchShape(prefill=((4096, 0),), sampled_seqs=1)


def test_features_of_a_step_by_hand() -> None:
    step = BatchShape(
        prefill=((100, 28), (10, 500)),
        decode_seqs=3,
        decode_context_tokens=90,
        decode_max_context_tokens=40,
        sampled_seqs=4,
    )
    # 113 tokens; positions 510; scores: 64 queries of 128 keys are 8,192, ten of 510 are 5,100.
    assert step_features(step) == (1, 113, 4, 3, 510, 8192)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schema_version": 7}, "memory lines have schema version 7, this version of kvtwin reads 1"),
        ({"workspace_phases": []}, "phases are one or more tables"),
        ({"workspace_phases": [phase("workspace", per_token_bytes=-1)]}, "finite numbers, at least 0"),
        ({"workspace_interval": [0.1, 0.2]}, "it must hold 0"),
        ({"limits": {"max_num_seqs": 1}}, "KeyError 'max_num_batched_tokens'"),
        ({"lines": {"weights": {"bytes": 1.5}}}, "1.5 is no number of bytes"),
    ],
)
def test_malformed_memory_lines_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        lines_of_a_gpu(**changes)


def test_a_measured_line_is_what_it_says() -> None:
    assert lines_of_a_gpu().lines["weights"] == MeasuredLine(
        bytes=16 * GIB, low_bytes=16 * GIB, high_bytes=16 * GIB, how="by hand"
    )


# ── profiles without them ────────────────────────────────────────────────────────────────────────────────────────────
def test_a_profile_without_memory_lines_leaves_the_account_as_it_is() -> None:
    flags = {"model": "llama-3.1-8b", "gpu": "rtx-4090-24gb", "max_model_len": 8192}
    counted = resolve(Scenario.from_flags(flags)).ledger
    assert resolve(Scenario.from_flags({**flags, "profile": "rtx-4090-24gb.llama-3.1-8b.tp1"})).ledger == counted
    assert resolve(Scenario.from_flags({**flags, "profile": "auto"})).ledger == counted


def test_memory_lines_of_an_earlier_fit_are_left_out_and_it_is_said() -> None:
    document = json.loads((FOLDER / f"cpu.{MODEL}.tp1.json").read_text())
    document["memory"].pop("schema_version", None)
    measured, why = read_measured(document, "p.json")
    assert measured is None
    assert why is not None and "no range and no uncertainty" in why


def test_a_profile_that_is_not_there_is_refused_by_the_ledger_too(refused: Refusals) -> None:
    refused(
        ["ledger", "--model", "llama-3.1-8b", "--gpu", "h100-sxm-80gb", "--profile", "h100-sxm"],
        "nearest is h100-sxm-80gb",
    )


# ── there and back on the CPU device ─────────────────────────────────────────────────────────────────────────────────
@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch", reason="measuring needs torch")
    folder = tmp_path_factory.mktemp("measured")
    limits = ["--max-num-batched-tokens", "256", "--max-num-seqs", "32", "--max-model-len", "512"]
    measure = ("calibrate", "measure", *limits, "--clock", "thread", "--out", str(folder / "run"))
    if process(
        *measure, "--budget", "5s"
    ).returncode:  # a busy machine needs more than that for a first pass, and goes on
        alone(*measure, "--budget", "60s")
    assert main(["calibrate", "fit", str(folder / "run"), "--out", str(folder / "p.json")]) == 0
    return folder / "p.json"


def alone(*arguments: str) -> dict[str, Any]:
    """What a command prints in a process of its own, whose memory is nobody else's."""
    done = process(*arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def process(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "experiments.cli", *arguments, "--json"]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])


def flags(profile: Path) -> list[str]:
    limits = [part for key, value in OTHER.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    return ["--model", MODEL, "--gpu", "cpu", "--profile", str(profile), *limits]


def test_the_ledger_predicts_the_lines_of_an_executor_with_limits_that_were_not_measured(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights to the byte; the reservation within 2 %, buffers 4 %, the workspace of the widest step 5 %. All within their intervals."""
    assert main(["ledger", *flags(profile), "--json"]) == 0
    lines = {line["name"]: line for line in json.loads(capsys.readouterr().out)["lines"]}
    rig = make_rig(replace(MEASURED, **OTHER))
    assert lines["weights"]["bytes"] == rig.memory["weights_bytes"]
    buffers = lines["input_buffers"]
    assert buffers["low_bytes"] <= rig.memory["buffers_bytes"] <= buffers["high_bytes"]
    assert buffers["bytes"] == pytest.approx(rig.memory["buffers_bytes"], rel=0.04), "their parts are rounded to 256 B"
    reserved = lines["peak_activation"]["bytes"] + lines["kernel_workspaces"]["bytes"]
    assert reserved == pytest.approx(rig.memory["workspace_bytes"], rel=0.02)
    decodes = tuple(Share(1, 399, True, True) for _ in range(11))
    widest = DesignPoint(point=1, group="corner", shares=(*decodes, Share(149, 251, True)))
    assert widest.shape.num_tokens == 160
    used = rig.run(widest).workspace_bytes
    peak = lines["peak_activation"]
    assert peak["bytes"] == pytest.approx(used, rel=0.05)
    assert peak["low_bytes"] <= used <= peak["high_bytes"]


def test_a_simulated_run_predicts_the_memory_of_the_real_one(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = tmp_path / "load.toml"
    scenario.write_text(LOAD)
    load = [str(scenario), "--num-gpu-blocks-override", "200"]
    assert main(["run", *flags(profile), *load, "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    real = ["--executor", "torch", "--device", "cpu", "--out", str(tmp_path / "real")]
    summary = alone("run", *flags(profile), *load, *real)
    assert summary["finished"] == simulated["finished"] == 30
    assert simulated["peak_workspace_bytes"] == pytest.approx(summary["peak_workspace_bytes"], rel=0.05)
    with (tmp_path / "real" / "memory.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert main(["ledger", *flags(profile), *load[-2:], "--json"]) == 0
    lines = {line["name"]: line for line in json.loads(capsys.readouterr().out)["lines"]}
    (tensors,) = {int(row["tensors_bytes"]) for row in rows}
    scales = 2 * 2 * 4  # of two layers
    assert tensors == pytest.approx(lines["weights"]["bytes"] + lines["input_buffers"]["bytes"] + scales, rel=0.005)
    assert {int(row["weights_bytes"]) for row in rows} == {lines["weights"]["bytes"]}
    resident = max(int(row["process_bytes"]) for row in rows)
    pool = 201 * 16 * 512
    account = lines["non_torch"]["bytes"] + tensors + pool + summary["executors"][0]["bytes"]["workspace"]
    assert resident == pytest.approx(account, rel=0.05)


def test_explain_says_it_in_words_and_another_engine_is_not_mixed_up(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ledger", *flags(profile), "--explain"]) == 0
    said = capsys.readouterr().out
    assert "kvtwin executor" in said.splitlines()[0]
    assert "from measured, profile cpu.tiny-llama-test.tp1" in said
    assert "95 % interval" in said
    assert main(["ledger", *flags(profile), "--engine-version", "0.19"]) == 0
    said = capsys.readouterr().out
    assert "leave engine_version out to use them" in said
    assert "vLLM 0.19" in said.splitlines()[0]
    assert main(["ledger", *flags(profile), "--max-num-seqs", "64", "--max-num-batched-tokens", "160"]) == 0
    assert "max_num_seqs 64 (measured up to 32)" in capsys.readouterr().out


def test_formats_are_kept_by_their_canonical_names(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="measuring needs torch")
    from calibration.measuring.measure import measure

    settings = MeasureSettings(
        model=MODEL, dtype="float", kv_cache_dtype="fp32", max_num_batched_tokens=64, max_num_seqs=4, max_model_len=64
    )
    run = measure(settings, 2.0, tmp_path / "run", command="test")
    assert (run.document["settings"]["dtype"], run.document["settings"]["kv_cache_dtype"]) == ("float32", "float32")
