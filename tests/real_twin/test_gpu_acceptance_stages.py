"""The stages of the acceptance run that need a GPU, on one that is not there: what they ask, what they write down, when they fail."""

from __future__ import annotations

import json

import pytest

from experiments.acceptance import stages
from experiments.acceptance.job import Job
from experiments.acceptance.pressure import PressureSettings, run_pressure
from gpu import bench
from gpu.decode_account import SHAPES
from tests.support.fake_cuda import fake_cuda

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")


@pytest.fixture
def gpu(monkeypatch):
    """A fake GPU on which a copy of a gibibyte takes half a millisecond, and a kernel what the test says."""
    import torch

    kernel_ms = {"now": 0.5}
    timed: list[object] = []

    def do_bench(call, **settings):
        timed.append(call)
        return 0.5 if len(timed) == 1 else kernel_ms["now"]

    monkeypatch.setattr("triton.testing.do_bench", do_bench)
    monkeypatch.setattr("gpu.device.find_device", lambda name: torch.device("cuda", 0))
    with fake_cuda():
        yield kernel_ms


def carried_out(stage, tmp_path) -> dict:
    job = Job(device="cuda", out=tmp_path / "stage.json", limit_s=60)
    stage(job)
    job.write()
    return json.loads(job.out.read_text(encoding="utf-8"))


def test_decode_beside_a_copy_has_a_row_a_shape_those_with_a_bar_first(gpu, tmp_path, data_dir, monkeypatch):
    monkeypatch.setenv("KVTWIN_DATA", str(data_dir))
    found = carried_out(stages.decode, tmp_path)
    assert found["failures"] == []
    assert found["facts"]["copy_gb_per_s"] == pytest.approx(2 * 2**30 / 0.5e-3 / 1e9)
    rows = found["facts"]["decode"]
    assert [row["name"].split("bf16,")[1].split(",")[0] for row in rows][:2] == ["64x8192", "128x4096"]
    assert len(rows) == len(SHAPES)
    assert all(0.9 < row["copy_share"] < 1.1 for row in rows[:2])


def test_decode_below_its_share_of_a_copy_is_a_bar_not_met(gpu, tmp_path):
    gpu["now"] = 0.7
    found = carried_out(stages.decode, tmp_path)
    assert [text.partition(":")[0].split("bf16,")[1].split(",")[0] for text in found["failures"]] == [
        "64x8192",
        "128x4096",
    ]
    assert all("less than 85%" in text for text in found["failures"])


@pytest.mark.parametrize("error", [0.02, float("nan")])
def test_decode_that_computes_something_else_is_a_bar_not_met_however_fast(gpu, tmp_path, monkeypatch, error):
    monkeypatch.setattr("gpu.bench.relative_error", lambda call: error)
    found = carried_out(stages.decode, tmp_path)
    assert len(found["failures"]) == len(SHAPES)
    assert all(f"off by {error} of its answer, more than 0.01" in text for text in found["failures"])


def test_a_sweep_is_written_down_as_it_goes(gpu, tmp_path):
    rows = carried_out(stages.sweep, tmp_path)["facts"]["sweep"]
    assert len(rows) == 2 * 4 * len(bench.SWEEP)
    assert {"name", "microseconds", "copy_share"} == set(rows[0])


def test_the_other_kernels_are_timed_and_all_are_compiled(gpu, tmp_path, monkeypatch):
    compiled: list[tuple[str, ...]] = []
    monkeypatch.setattr("experiments.kernels.compile_all", lambda targets, only: compiled.append(targets) or [])
    facts = carried_out(stages.kernels, tmp_path)["facts"]
    assert compiled == [("sm_90",)]
    assert {row["name"].partition("[")[0] for row in facts["kernels"]} >= {"rms_norm", "sample", "move_blocks"}
    assert facts["compiled"] == []


def test_pressure_on_a_gpu_replays_graphs_and_looks_at_what_torch_has_reserved():
    with fake_cuda() as log:
        figures, missed = run_pressure(PressureSettings.of("cuda", small=True))
    assert missed == []
    assert figures["reserved_bytes"] == [2 << 30]
    assert sum(figures["executor"]["graphs"]["replays"].values()) > 50
    assert figures["executor"]["swapped_out_blocks"] > 0
    assert len(log.of("replay")) > 50
