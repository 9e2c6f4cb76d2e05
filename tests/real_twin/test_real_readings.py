"""What a real run records of its memory: the curve that diagnose reads, and the peak operation by operation."""

from __future__ import annotations

import csv
import json

import pytest
import torch

from experiments.cli import main
from experiments.peak_by_op import COLUMNS, peak_document
from experiments.real_memory import real_memory_columns
from experiments.real_run import run_scenario
from gpu.op_timeline import OpTimeline
from gpu.ops import Ops
from gpu.readings import MemoryReading, StepReading, storage_bytes
from gpu.workspace import Workspace
from sim.catalog.gpus import gpu
from sim.catalog.models import model_shape
from sim.core.batch_shape import BatchShape
from sim.core.clock import FS_PER_S
from sim.memory import build_ledger
from sim.memory.device import Device
from sim.memory.faults import read_faults
from sim.results.memory_curve import MEMORY_COLUMNS
from sim.scenario import Scenario

RUN = """
[model]
model = "tiny-llama-test"

[engine]
num_gpu_blocks_override = 160
max_model_len = 512

[workload]
workload = "uniform"
num_requests = {requests}
rate = {rate}
input_tokens = [16, 200]
output_tokens = [8, 80]

[run]
executor = "torch"
device = "cpu"
"""


def reading(step: int, start_s: float, **changes) -> StepReading:
    memory = MemoryReading(
        tensors_bytes=1000,
        weights_bytes=900,
        graphs_bytes=40,
        buffers_bytes=30,
        staging_bytes=60,
        kv_pool_bytes=800,
        workspace_bytes=300,
        cached_bytes=20,
        non_torch_bytes=50,
        others_bytes=7,
        total_bytes=10_000,
        process_bytes=5,
    )
    values = {
        "step": step,
        "start_fs": int(start_s * FS_PER_S),
        "duration_fs": FS_PER_S,
        "phase": "decode",
        "num_tokens": 2,
        "num_seqs": 2,
        "decode_seqs": 2,
        "kv_tokens": 30,
        "allocated_blocks": 4,
        "workspace_bytes": 120,
        "served_by": "eager",
        "oom": False,
        "memory": memory,
    }
    return StepReading(**{**values, **changes})


# -- the curve -------------------------------------------------------------------------------------------------------------


def test_the_curve_has_a_row_a_step_and_idle_rows_between():
    columns = real_memory_columns([[reading(0, 1.0), reading(1, 2.0), reading(2, 5.0, phase="mixed")]], [8], [300], 100)
    assert list(columns)[: len(MEMORY_COLUMNS)] == list(MEMORY_COLUMNS)
    assert columns["time_s"] == [0.0, 1.0, 2.0, 3.0, 3.0, 5.0, 6.0, 6.0]
    assert columns["phase"] == ["idle", "idle", "decode", "decode", "idle", "idle", "prefill", "idle"]
    assert columns["allocated_bytes"] == [1000, 1000, 1400, 1400, 1000, 1000, 1400, 1000]
    assert columns["reserved_bytes"][2] == 1000 + 400 + 300 + 20
    assert columns["in_use_bytes"][2] == columns["reserved_bytes"][2] + 50
    assert columns["kv_free_bytes"] == [800, 800, 400, 400, 800, 800, 400, 800]
    assert columns["headroom_bytes"][2] == 180
    assert columns["step"] == [None, None, 0, 1, None, None, 2, None]
    assert (set(columns["buffers_bytes"]), set(columns["staging_bytes"])) == ({30}, {60})


def test_every_executor_has_rows_of_its_own():
    columns = real_memory_columns(
        [[reading(0, 0.0)], [reading(0, 0.5, allocated_blocks=7)], []], [8, 8, 8], [300] * 3, 100
    )
    assert list(zip(columns["time_s"], columns["replica"], columns["used_blocks"], strict=True)) == [
        (0.0, 0, 0), (0.0, 1, 0), (0.5, 1, 0), (1.0, 0, 4), (1.0, 0, 0), (1.5, 1, 7), (1.5, 1, 0),
    ]  # fmt: skip
    assert real_memory_columns([[], []], [8, 8], [300, 300], 100) == {}


def test_shared_storages_are_counted_once():
    base = torch.zeros(100, dtype=torch.float32)
    assert storage_bytes([base, base[10:], base.view(10, 10), torch.zeros(3, dtype=torch.int64)]) == 424


def test_a_real_run_leaves_a_curve_that_diagnose_reads_and_that_is_flat_in_the_end(tmp_path, capsys):
    scenario, out = tmp_path / "real.toml", tmp_path / "out"
    scenario.write_text(RUN.format(requests=40, rate=20.0), encoding="utf-8")
    assert main(["run", str(scenario), "--out", str(out), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    with (out / "memory.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    steps = [row for row in rows if row["phase"] != "idle"]
    assert len(steps) == summary["engine_steps"]
    assert summary["executors"][0]["steps"] >= len(steps)  # steps of a stretch that was cut were run, and do not count
    assert [int(row["step"]) for row in steps] == list(range(len(steps)))
    idle = [row for row in rows if row["phase"] == "idle"]
    assert len(idle) >= 3
    for column in ("allocated_bytes", "reserved_bytes", "in_use_bytes", "kv_used_bytes"):
        assert len({row[column] for row in idle}) == 1, column
    assert max(int(row["kv_used_bytes"]) for row in steps) > 0
    assert max(int(row["workspace_bytes"]) for row in steps) == summary["peak_workspace_bytes"]
    assert summary["peak_workspace_bytes"] == summary["executors"][0]["bytes"]["workspace_high_water"]
    assert summary["executors"][0]["nvml"] == {"absent": "the device is the CPU"}
    assert main(["diagnose", str(out / "memory.csv"), "--json"]) == 0
    diagnosis = json.loads(capsys.readouterr().out)
    assert diagnosis["cause"] != "leak"
    assert any("it does not rise" in str(entry) for entry in diagnosis["ruled_out"])


# -- the peak --------------------------------------------------------------------------------------------------------------


def followed(step) -> OpTimeline:
    timeline, ops, work = OpTimeline(0), Ops("cpu"), Workspace(1 << 16)
    ops.scratch = work
    with timeline.follow(BatchShape(decode_seqs=2, sampled_seqs=2), ops, work):
        step(ops, work)
    return timeline


def test_the_operation_with_the_most_live_bytes_holds_the_peak():
    def step(ops, work):
        x = work.take("gate and up", (4, 64), torch.float32)  # 1024 bytes
        torch.mm(torch.ones(4, 8), torch.ones(8, 64), out=x)
        with work.scope():
            ops.silu_mul(x, work.take("silu", (4, 32), torch.float32))  # 512 more, and the twin's scratch
        torch.add(x, 1.0, out=x)

    timeline = followed(step)
    assert timeline.peak.operation == "silu_mul"
    assert timeline.peak.workspace_bytes > 1024 + 512
    assert ("gate and up", 1024) in timeline.peak.live
    assert ("silu", 512) in timeline.peak.live
    operations = [(event.operation, event.into) for event in timeline.events]
    assert ("mm", "gate and up") in operations
    assert operations[-1] == ("add", "gate and up")
    assert timeline.events[-1].workspace_bytes == 1024  # the scope is left


def test_what_is_taken_from_the_allocator_counts_too():
    def step(ops, work):
        work.take("hidden", (4, 64), torch.float32)
        big = torch.ones(100_000, dtype=torch.uint8)
        del big
        torch.ones(10)

    timeline = followed(step)
    assert timeline.peak.operation == "ones" or timeline.peak.allocated_bytes == 100_000
    assert timeline.peak.live_bytes == 100_000 + 1024


def test_a_fallback_is_named_with_the_operation():
    def step(ops, work):
        ops.meant = "triton"  # as on a GPU, where the twin is not what is meant to serve
        ops.silu_mul(work.take("x", (4, 64), torch.float32).fill_(1.0), work.take("silu", (4, 32), torch.float32))

    event = followed(step).peak
    assert (event.operation, event.served_by, event.fallback) == ("silu_mul", "torch", True)
    assert "silu_mul (served by torch, a fallback)" in document_of(followed(step))["answer"]


def test_afterwards_nothing_is_watched_and_a_replaced_operation_is_still_replaced():
    timeline, ops, work = OpTimeline(0), Ops("cpu"), Workspace(1 << 12)
    calls = []
    ops.rms_norm = lambda *arguments: calls.append(arguments)
    with timeline.follow(BatchShape(decode_seqs=1), ops, work):
        ops.rms_norm("x")
    ops.rms_norm("y")
    assert calls == [("x",), ("y",)]
    assert len(timeline.events) == 1
    assert "silu_mul" not in vars(ops)
    assert work.on_take is None


def document_of(timeline: OpTimeline) -> dict:
    settings = {"model": model_shape("tiny-llama-test"), "gpu": gpu("h100-sxm-80gb")}
    ledger = build_ledger(**settings, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128)
    return peak_document(timeline, Device(*settings.values(), ledger, read_faults(None)).steps)


def test_the_ledger_s_line_stands_beside_each_operation():
    """2 decodes of tiny-llama: hidden 64, 3 x 128 MLP numbers a token, bf16 or float32 as the ledger's dtype says."""
    shape = model_shape("tiny-llama-test")

    def step(ops, work):
        x = work.take("gate and up", (2, 2 * shape.intermediate_size), torch.float32).fill_(1.0)
        ops.silu_mul(x, work.take("silu", (2, shape.intermediate_size), torch.float32))

    document = document_of(followed(step))
    assert [list(row) for row in document["operations"]] == [list(COLUMNS)] * len(document["operations"])
    row = next(row for row in document["operations"] if row["operation"] == "silu_mul")
    element = 4 if shape.dtype == "float32" else 2
    assert row["ledger_op"] == "MLP gate, up and product"
    assert row["predicted_bytes"] == 2 * 3 * shape.intermediate_size * element
    assert row["predicted_phase_bytes"] == 512 * -(-row["predicted_bytes"] // 512) + 512 * -(
        -2 * 3 * shape.hidden_size * element // 512
    )


def test_the_command_names_the_operation_and_writes_the_table(tmp_path, capsys):
    scenario, out = tmp_path / "real.toml", tmp_path / "out"
    scenario.write_text(RUN.format(requests=4, rate=50.0), encoding="utf-8")
    assert main(["run", str(scenario), "--peak-step", "0", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "step 0, " in text
    assert "Measured  " in text
    assert "Simulated  " not in text, "its time is what the steps took"
    assert "(served by torch) holds the peak of temporary memory" in text
    assert "a torch twin takes intermediate results besides" in text
    with (out / "peak_by_op.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    (peak,) = [row for row in rows if row["is_peak"] == "true"]
    assert f"{peak['operation']} (served by torch)" in text
    assert int(peak["live_bytes"]) == max(int(row["live_bytes"]) for row in rows)
    written = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert written["executors"][0]["peak_by_op"]["step"] == 0
    assert any("step 0 was followed operation by operation" in warning for warning in written["warnings"])
    assert int(peak["workspace_bytes"]) == max(int(row["workspace_bytes"]) for row in rows)


def test_the_report_shows_what_served_each_operation_and_what_fell_back(tmp_path):
    from sim.results.report_executors import executors_html

    scenario = tmp_path / "real.toml"
    scenario.write_text(RUN.format(requests=3, rate=50.0), encoding="utf-8")
    result = run_scenario(Scenario.load(scenario), peak_step=0)
    page = result.report(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "arena for temporary tensors, not yet used" in page and "allocator: stuck" not in page
    assert "<h2>What ran</h2>" in page
    assert "No operation fell back." in page
    assert "Memory peak of step 0" in page
    assert '<td class="text">decode_attention</td><td class="text">torch</td>' in page
    (executor,) = result.summary["executors"]
    fallen = {"operation": "prefill_attention", "served": "torch", "reason": "triton <missing>", "calls": 3}
    page = executors_html({"executors": [{**executor, "fallbacks": [fallen]}]})
    assert "<b>prefill_attention</b> fell back to torch 3 times: triton &lt;missing&gt;" in page
    assert executors_html({}) == ""


def test_a_step_that_never_came_costs_no_results(tmp_path, capsys):
    scenario, out = tmp_path / "real.toml", tmp_path / "out"
    scenario.write_text(RUN.format(requests=2, rate=50.0), encoding="utf-8")
    assert main(["run", str(scenario), "--peak-step", "99999", "--out", str(out)]) == 2
    assert "--peak-step is 99999, but the run had" in capsys.readouterr().err
    assert json.loads((out / "summary.json").read_text(encoding="utf-8"))["finished"] == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--peak-step", "99999"], ["--peak-step is 99999", "steps, numbered from 0"]),
        (
            ["--peak-step", "0", "--executor", "model", "--gpu", "h100"],
            ["--peak-step looks at a device", "--executor torch"],
        ),
        (["--memory-snapshot", "s.pickle"], ["CUDA's caching allocator", "device is cpu"]),
        (
            ["--memory-snapshot", "s.pickle", "--executor", "model", "--gpu", "h100"],
            ["--memory-snapshot looks at a device"],
        ),
    ],
)
def test_what_cannot_be_looked_at_is_bad_input(flags, words, tmp_path, capsys):
    scenario = tmp_path / "real.toml"
    scenario.write_text(RUN.format(requests=2, rate=50.0).replace('device = "cpu"\n', ""), encoding="utf-8")
    assert main(["run", str(scenario), *flags]) == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words), message
