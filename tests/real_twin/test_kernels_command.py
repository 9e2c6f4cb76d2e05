"""`kvtwin kernels`: what it prints, and how it ends."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from experiments.kernels import bench_text, kernels, published_times
from gpu.published import decode_times, few_decode_times, nearest
from sim.core.config import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def test_the_document_has_the_agreed_keys_for_every_kernel(capsys):
    assert kernels("sm_90", only="silu_mul", json=True) == 0
    document = json.loads(capsys.readouterr().out)
    (kernel,) = document["kernels"]
    assert {"name", "target", "registers", "spill_bytes", "shared_bytes", "vector_bytes", "ok"} <= set(kernel)
    assert (kernel["name"], kernel["target"], kernel["ok"], kernel["vector_bytes"]) == (
        "silu_mul[bf16]",
        "sm_90",
        True,
        16,
    )


def test_the_table_has_a_line_a_kernel_and_a_verdict(capsys):
    assert kernels("all", only="rope") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[1:4]] == ["sm_80", "sm_90", "sm_100"]
    assert lines[-1] == "3 compiled: all keep their budgets"


def test_a_kernel_over_its_budget_ends_with_one(capsys, monkeypatch):
    from gpu.compile_check import Budget
    from gpu.kernels import catalogue

    make, _ = catalogue.CATALOGUE["silu_mul[bf16]"]
    monkeypatch.setitem(catalogue.CATALOGUE, "silu_mul[bf16]", (make, Budget(registers=8)))
    assert kernels("sm_90", only="silu_mul") == 1
    assert "registers of 8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": "sm_91"}, "unknown target 'sm_91': did you mean sm_9"),
        ({"only": "rms_nrom"}, "unknown kernel 'rms_nrom': did you mean rms_norm"),
    ],
)
def test_what_does_not_exist_is_named_with_what_is_near(arguments, message):
    with pytest.raises(ConfigError, match=message):
        kernels(**arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_timing_without_a_gpu_is_refused_and_says_what_can_be_done():
    with pytest.raises(
        ConfigError, match=r"--bench needs a CUDA device: torch .* sees no CUDA device; without one, leave"
    ):
        kernels(bench=True)


def test_without_torch_the_message_says_how_to_get_it():
    script = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton"):
            raise ModuleNotFoundError("no", name=name)
sys.meta_path.insert(0, Absent())
sys.path.insert(0, {str(ROOT)!r})
from experiments.kernels import kernels
try:
    kernels()
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "kvtwin kernels needs torch, which is not installed: pip install 'kvtwin[gpu]'\n"


def test_timings_are_set_beside_the_published_ones():
    text = bench_text(
        {
            "provenance": {"device": "a GPU", "torch": "2", "triton": "3", "cuda": "13"},
            "timings": [
                {
                    "name": "decode",
                    "microseconds": 600.0,
                    "gb_per_s": 3500.0,
                    "copy_share": 0.9,
                    "published_microseconds": 550.0,
                    "published_source": "FA3, measured by NVIDIA",
                },
                {"name": "copy", "microseconds": 1.0, "gb_per_s": 1.0, "copy_share": 1.0},
            ],
            "published_note": "",
        }
    )
    assert "90.0%" in text and "550" in text and "published: FA3, measured by NVIDIA" in text


def test_without_the_tables_the_shapes_with_a_bar_have_a_published_time_all_the_same(monkeypatch, tmp_path):
    monkeypatch.delenv("KVTWIN_DATA", raising=False)
    for folder in (None, tmp_path):
        found, note = published_times(folder, "NVIDIA H200")
        assert found(64, 8192, "bfloat16").microseconds == 490.8
        assert "NVIDIA H200, measured by NVIDIA" in found(128, 4096, "bfloat16").source
        assert found(64, 8192, "fp8") is None and found(256, 2048, "bfloat16") is None
        assert note
        assert published_times(folder, "a GPU")[0](64, 8192, "bfloat16") is None


def test_the_few_times_are_those_of_the_tables(data_dir):
    pytest.importorskip("pyarrow", reason="reading parquet needs the silicon extra")
    for device in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"):
        times, _ = decode_times(data_dir, device)
        few = few_decode_times(device)
        assert len(few) == 4
        for each in few:
            same = nearest(times, each.batch_size, each.context_tokens, each.kv_cache_dtype)
            assert same is not None and round(same.microseconds, 1) == each.microseconds
            assert same.source == each.source


def test_missing_tables_are_a_note_and_no_error(tmp_path):
    times, why_not = decode_times(tmp_path, "NVIDIA H200")
    assert times == [] and "no published tables" in why_not


def test_published_decode_times_of_the_same_shape_are_found(data_dir):
    pytest.importorskip("pyarrow", reason="reading parquet needs the silicon extra")
    times, _ = decode_times(data_dir, "NVIDIA H200")
    found = nearest(times, 64, 8192, "bfloat16")
    assert found is not None and found.context_tokens == 8192
    # 64 x 8192 tokens x 4 KiB of KV a layer at 4.8 TB/s is 447 µs: no kernel is faster
    assert 447 < found.microseconds < 1000
    assert "measured by NVIDIA" in found.source
    assert nearest(times, 64, 5000, "bfloat16") is None
    assert decode_times(data_dir, "a GPU")[1] == "the published tables have no a GPU"
